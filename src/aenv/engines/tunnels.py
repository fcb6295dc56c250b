"""Sandboxes that are reached through a socket of this machine, where there is no other way to them."""

from __future__ import annotations

import asyncio
import logging
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, suppress
from pathlib import Path
from typing import Protocol

from aenv.errors import AEnvError

log = logging.getLogger("aenv.engine")
_PIECE = 64 * 1024
_MOST_OPEN = 64
"""Connections by one tunnel at once: each costs more than a socket at the other end."""
_LINGER = 10.0
"""Seconds in which a sandbox must have ended its side of a connection that nobody else is at."""
_STUCK = 60.0
"""Seconds in which it must have taken a piece."""


class Beyond(Protocol):
    """The other end of a connection."""

    async def send(self, data: bytes) -> None:
        """Send, at the pace at which it is taken."""
        ...

    async def end_input(self) -> None:
        """Tell it that nothing more will be sent."""
        ...

    def output(self) -> AsyncIterator[bytes]:
        """What it sends, to the end."""
        ...


class Tunnel(ABC):
    """A socket of this machine, every connection of which is carried to a sandbox in a way of its own."""

    def __init__(self, path: Path, name: str) -> None:
        """``name`` is what the sandbox is called in the log."""
        self._path, self._name = path, name
        self._server: asyncio.AbstractServer | None = None
        self._open: set[asyncio.Task[None]] = set()
        self._made = 0

    @property
    def url(self) -> str:
        return f"unix:{self._path}"

    async def open(self) -> None:
        self._path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        with suppress(FileNotFoundError):
            self._path.unlink()
        self._server = await asyncio.start_unix_server(self._join, str(self._path))
        self._path.chmod(0o600)
        self._made = self._path.lstat().st_ino

    async def close(self) -> None:
        if self._server is not None:
            self._server.close()
        for task in self._open:
            task.cancel()
        await asyncio.gather(*self._open, return_exceptions=True)
        with suppress(FileNotFoundError):
            if self._path.lstat().st_ino == self._made:  # else another engine of the same name has the door now
                self._path.unlink()

    async def _join(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        if len(self._open) >= _MOST_OPEN:
            log.warning("%s has %d connections, and gets no more", self._name, _MOST_OPEN)
            writer.close()
            return
        self._open.add(task)
        try:
            await self._relay(reader, writer)
        except (AEnvError, OSError) as exc:  # whoever connected sees that nobody answers
            log.debug("no tunnel to %s: %s", self._name, exc)
        except asyncio.CancelledError:  # by close; passed on, the server would log it as a fault
            return
        finally:
            self._open.discard(task)
            writer.close()

    async def _relay(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Carry one connection to its end."""
        async with self.connect() as beyond, asyncio.timeout(None) as limit:

            async def send() -> None:
                try:
                    while piece := await reader.read(_PIECE):
                        async with asyncio.timeout(_STUCK):
                            await beyond.send(piece)
                    await beyond.end_input()
                finally:
                    limit.reschedule(asyncio.get_running_loop().time() + _LINGER)

            sending = asyncio.create_task(send())
            try:
                async for piece in beyond.output():
                    writer.write(piece)
                    await writer.drain()
            finally:
                sending.cancel()
                await asyncio.gather(sending, return_exceptions=True)

    @abstractmethod
    def connect(self) -> AbstractAsyncContextManager[Beyond]:
        """Connect to the runtime in the sandbox, for one connection of ours."""
