"""Two connections that are joined to one."""

from __future__ import annotations

import asyncio
import socket
from typing import Any

from aenv.runtime.relay import Relay
from tests.support import until

MB = 1024 * 1024


class Side(asyncio.Protocol):
    """One end of a connection, before it is joined."""

    def __init__(self) -> None:
        self.full = False

    def connection_made(self, transport: Any) -> None:
        self.transport = transport

    def pause_writing(self) -> None:
        self.full = True

    def resume_writing(self) -> None:
        self.full = False


async def made() -> tuple[Side, asyncio.StreamReader, asyncio.StreamWriter]:
    """A connection: our end, and the other one."""
    ours, theirs = socket.socketpair()
    _, side = await asyncio.get_running_loop().create_connection(Side, sock=ours)
    return side, *await asyncio.open_connection(sock=theirs)


async def test_one_that_is_full_already_makes_the_other_wait() -> None:
    (one, reader, kept), (other, _, writer) = await made(), await made()
    one.transport.write(b"x" * 4 * MB)
    assert one.full
    relay = Relay(one.transport, other.transport, active=lambda: None)
    relay.begin(one_full=one.full)
    held = one.transport.get_write_buffer_size()
    writer.write(b"y" * 4 * MB)
    await until(lambda: writer.transport.get_write_buffer_size() > 0, "a side that has to wait")
    for _ in range(100):
        await asyncio.sleep(0)
    assert relay.unsent <= held
    async with asyncio.timeout(30):
        assert await reader.readexactly(8 * MB) == b"x" * 4 * MB + b"y" * 4 * MB
    relay.cut()
    async with asyncio.timeout(30):
        await relay.ended
    writer.close()
    kept.close()
