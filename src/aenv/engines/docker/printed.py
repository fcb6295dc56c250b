"""What a container prints, as the daemon keeps it: followed from the moment somebody looks, and kept within bounds."""

from __future__ import annotations

import asyncio
from contextlib import aclosing, suppress

from aenv.engines.base import Output
from aenv.engines.docker.containers import MOST_LOG
from aenv.engines.docker.daemon import Daemon, Demultiplexer, demultiplex
from aenv.errors import AEnvError, NotFound
from aenv.runtime.hidden import Hidden, Printing

KEPT = 256 * 1024
"""Bytes of the newest output that are kept here."""
_MOST = 8 * MOST_LOG
"""Bytes that the daemon may answer with: its frames and what it keeps beyond what it was asked to."""
_CATCH_UP = 2.0
"""Seconds in which what was printed already must have come."""
_KNOWN = 1024
"""Bytes by which the place is found up to which everything has come."""
_ALL = {"stdout": "1", "stderr": "1"}


class Printed:
    """The output of one container."""

    def __init__(self, daemon: Daemon, container: str, hidden: Hidden | None) -> None:
        self._daemon, self._container = daemon, container
        self._kept = bytearray()
        self._start = 0
        self._came = bytearray()
        """The newest, as it came, secrets and all."""
        self._moved = asyncio.Event()
        self._following: asyncio.Task[None] | None = None
        self._stuck = False
        """Whether following it gives no more."""
        self._looking = asyncio.Lock()
        self._hidden = hidden
        self._printing = Printing(hidden) if hidden is not None else None

    def hide(self, hidden: Hidden) -> None:
        """Keep no secrets of what is printed from now on."""
        if self._printing is not None:
            self._keep(self._printing.end())
        self._hidden, self._printing = hidden, Printing(hidden)

    async def since(self, position: int) -> Output:
        """What is kept from that position on; all that was printed until now is in it."""
        async with self._looking:
            if self._following is None:
                self._following = asyncio.create_task(self._follow())
            with suppress(NotFound):  # its container is gone: what was kept stays
                if self._stuck or not await self._has_come(await self._newest()):
                    self._stuck = True
                    await self._fetch()
        begin = max(position, self._start)
        return Output(begin, bytes(self._kept[begin - self._start :]))

    async def _newest(self) -> bytes:
        """What the daemon has kept last: a line, or more where that says nothing. Of a line that was printed in pieces,
        Podman tells the last."""
        return found if (found := await self.last(1)).strip() else (await self.last())[-_KNOWN:]

    async def _has_come(self, due: bytes) -> bool:
        """Wait until a line that the daemon has is here; False when it does not come."""
        assert self._following is not None
        try:
            async with asyncio.timeout(_CATCH_UP):
                while due not in self._came:
                    if self._following.done():
                        return False
                    self._moved.clear()
                    await self._moved.wait()
        except TimeoutError:
            return False
        return True

    async def _fetch(self) -> None:
        """Take what is missing from what the daemon has kept: who follows that gets stuck where it began a new file."""
        await self.close()
        data = await self.last()
        known = bytes(self._came[-_KNOWN:])
        place = data.rfind(known) if known else -1
        self._take(data[place + len(known) :] if place >= 0 else data)

    async def last(self, lines: int | None = None) -> bytes:
        """What the daemon has kept, secrets and all, or the last lines of it."""
        query = _ALL | ({"tail": str(lines)} if lines is not None else {})
        data = await self._daemon.fetch(f"/containers/{self._container}/logs", query=query, most=_MOST)
        return b"".join(piece for _, piece in demultiplex(data))

    def note(self, data: bytes) -> None:
        """Keep this too, which another container printed."""
        self._keep(data if self._hidden is None else self._hidden.text(data.decode(errors="replace")).encode())

    async def close(self) -> None:
        if self._following is not None:
            self._following.cancel()
            await asyncio.gather(self._following, return_exceptions=True)

    async def drained(self, patience: float) -> None:
        """Wait until all that a container which has ended printed is here."""
        if self._following is not None:
            await asyncio.wait((self._following,), timeout=patience)

    async def _follow(self) -> None:
        frames = Demultiplexer()
        query = _ALL | {"follow": "1"}
        try:
            async with aclosing(self._daemon.pieces(f"/containers/{self._container}/logs", query=query)) as pieces:
                async for data in pieces:
                    for _, piece in frames.feed(data):
                        self._take(piece)
        except AEnvError:
            pass  # it is gone, or the daemon is: what was kept stays
        finally:
            if self._printing is not None:
                self._keep(self._printing.end())
            self._moved.set()

    def _take(self, data: bytes) -> None:
        self._came += data
        del self._came[:-KEPT]
        self._keep(data if self._printing is None else self._printing.pass_on(data))
        self._moved.set()

    def _keep(self, data: bytes) -> None:
        self._kept += data
        if (over := len(self._kept) - KEPT) > 0:
            del self._kept[:over]
            self._start += over
