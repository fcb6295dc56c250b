"""Tokens, secrets and the audit log behind real HTTP, in a thread of their own."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from aenv.auth.audit import Audit
from aenv.auth.secrets import Secrets
from aenv.auth.tokens import Tokens, local_token
from aenv.runtime.access import Hosts
from aenv.runtime.protocol import Connections
from aenv.store import open_store
from aenv.web.accounts import routes
from aenv.web.app import App


class Served:
    """A server of accounts, with an admin's token for whoever asks."""

    def __init__(self, folder: Path, home: Path) -> None:
        self.url = ""
        self.admin = ""
        self._folder = folder
        self.home = home
        self._ready = threading.Event()
        self._loop = asyncio.new_event_loop()
        self._stop = asyncio.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def start(self) -> None:
        self._thread.start()
        assert self._ready.wait(30)

    def stop(self) -> None:
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join(30)
        assert not self._thread.is_alive()

    def _run(self) -> None:
        with asyncio.Runner(loop_factory=lambda: self._loop) as runner:
            runner.run(self._serve())

    async def _serve(self) -> None:
        async with await open_store(f"sqlite:{self._folder / 'store.db'}") as store:
            tokens, audit = Tokens(store, local=local_token(self.home)), Audit(store)
            self.admin = await tokens.first() or ""
            app = App(
                routes(tokens, Secrets(store), audit),
                title="Accounts",
                authenticate=tokens.authenticate,
                guard=Hosts(loopback=True),
                audit=audit.note,
            )
            connections = Connections(app)
            server = await self._loop.create_server(connections, "127.0.0.1", 0)
            self.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
            self._ready.set()
            await self._stop.wait()
            server.close()
            await app.close()
            await connections.drain(5)
            await audit.close()


@contextmanager
def served(folder: Path, home: Path) -> Iterator[Served]:
    server = Served(folder, home)
    server.start()
    try:
        yield server
    finally:
        server.stop()
