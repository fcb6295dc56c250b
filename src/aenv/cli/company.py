"""What a project depends on, beside ``aenv run``: on an event loop of its own, since the server has that of the main
thread."""

from __future__ import annotations

import asyncio
import os
import signal
from contextlib import suppress
from threading import Event, Thread

from aenv.client.local import embedded
from aenv.errors import AEnvError
from aenv.project import Project
from aenv.runtime.server import Served


class Company:
    """Instances of it, from when the project is served until ``stop``. Where one cannot be had, the program ends."""

    def __init__(self, found: Project) -> None:
        self._found = found
        self._runner = asyncio.Runner()
        self._stop = asyncio.Event()
        self._told = Event()
        self._thread: Thread | None = None
        self.problem: AEnvError | None = None
        """Why they cannot be had."""

    def start(self, served: Served) -> bool:
        """Have them, and say whether there are all of them."""
        if self._found.depends_on:
            self._thread = Thread(target=self._run, args=(served,))
            self._thread.start()
            self._told.wait()
        return self.problem is None

    def _run(self, served: Served) -> None:
        with self._runner:
            self._runner.run(self._live(served))

    async def _live(self, served: Served) -> None:
        try:
            async with embedded.accompanied(self._found, served.url, served.owner_token):
                self._told.set()
                await self._stop.wait()
        except AEnvError as exc:
            self.problem = exc
            os.kill(os.getpid(), signal.SIGTERM)
        finally:
            self._told.set()

    def stop(self) -> None:
        """End them, and wait for that."""
        if self._thread is not None:
            with suppress(RuntimeError):  # the loop has ended by itself
                self._runner.get_loop().call_soon_threadsafe(self._stop.set)
            self._thread.join()
