"""A loopback port for a sandbox that is reached by a local socket, so that its URL can be handed to others."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

_PIECE = 64 * 1024


@asynccontextmanager
async def forwarded(path: str) -> AsyncIterator[str]:
    """A URL on this machine whose connections go to the unix socket at ``path``, for the length of the block.

    Bytes are passed on as they are. Who may ask for what is decided inside, by the token.
    """
    open_now: set[asyncio.StreamWriter] = set()

    async def connect(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        open_now.add(writer)
        try:
            inside_reader, inside = await asyncio.open_unix_connection(path)
        except OSError:
            writer.close()
            open_now.discard(writer)
            return
        open_now.add(inside)
        try:
            await asyncio.gather(_pass_on(reader, inside), _pass_on(inside_reader, writer))
        finally:
            for end in (writer, inside):
                end.close()
                open_now.discard(end)

    server = await asyncio.start_server(connect, "127.0.0.1", 0)
    try:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    finally:
        server.close()
        for writer in list(open_now):
            writer.transport.abort()


async def _pass_on(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with suppress(OSError):
        while data := await reader.read(_PIECE):
            writer.write(data)
            await writer.drain()
        if writer.can_write_eof():
            writer.write_eof()
