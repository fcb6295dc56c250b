"""What a daemon keeps of what a container printed."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing

from aenv.engines.docker.containers import MOST_LOG
from aenv.engines.docker.daemon import Daemon, Demultiplexer, demultiplex

_MOST = 8 * MOST_LOG
"""Bytes that the daemon may answer with: its frames and what it keeps beyond what it was asked to."""
_ALL = {"stdout": "1", "stderr": "1"}


class Log:
    """That of one container."""

    def __init__(self, daemon: Daemon, container: str) -> None:
        self._daemon, self._path = daemon, f"/containers/{container}/logs"

    async def last(self, lines: int | None = None) -> bytes:
        query = _ALL | ({"tail": str(lines)} if lines is not None else {})
        data = await self._daemon.fetch(self._path, query=query, most=_MOST)
        return b"".join(piece for _, piece in demultiplex(data))

    async def follow(self) -> AsyncGenerator[bytes, None]:
        frames = Demultiplexer()
        async with aclosing(self._daemon.pieces(self._path, query=_ALL | {"follow": "1"})) as pieces:
            async for data in pieces:
                for _, piece in frames.feed(data):
                    yield piece
