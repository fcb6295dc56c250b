"""What a container prints, as whatever runs it keeps that: followed once somebody looks, and kept within bounds."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing, suppress
from typing import Protocol

from aenv.engines.base import Output
from aenv.errors import AEnvError, NotFound
from aenv.runtime.hidden import Hidden, Printing

KEPT = 256 * 1024
"""Bytes of the newest output that are kept here."""
_CATCH_UP = 2.0
"""Seconds in which what was printed already must have come."""
_LAST_WORDS = 4096
_KNOWN = 1024
"""Bytes by which the place is found up to which everything has come. So many lines hold at least as much."""


class Source(Protocol):
    """Where the output of one container is kept."""

    async def last(self, lines: int | None = None) -> bytes:
        """What is kept, or the last lines of it; ``NotFound`` when the container is gone."""
        ...

    def follow(self) -> AsyncGenerator[bytes, None]:
        """What is kept, and what comes, as it comes."""
        ...


class Printed:
    """The output of one container."""

    def __init__(self, source: Source, hidden: Hidden | None) -> None:
        self._source = source
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
        return found if (found := await self.last(1)).strip() else (await self.last(_KNOWN))[-_KNOWN:]

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
        known = bytes(self._came[-_KNOWN:])
        data = await self.last(2 * _KNOWN if known else None)
        if known and known not in data:  # many lines have come since, or the known ones are gone
            data = await self.last()
        self._take(data.rpartition(known)[2] if known else data)

    async def last(self, lines: int | None = None) -> bytes:
        """What is kept there, secrets and all, or the last lines of it."""
        return await self._source.last(lines)

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
        try:
            async with aclosing(self._source.follow()) as pieces:
                async for piece in pieces:
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


def last_words(printed: bytes, lines: int = 20) -> str:
    """The last lines of what was printed."""
    return "\n".join(printed[-_LAST_WORDS:].decode(errors="replace").splitlines()[-lines:])
