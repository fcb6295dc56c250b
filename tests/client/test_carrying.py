"""Who carries calls for an instance trusts nothing that it says: it is somebody's code."""

from __future__ import annotations

import asyncio
import json
import struct
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from aenv.client.carrying import Carrier
from aenv.models import Sandbox
from aenv.runtime.carried import Ask

CALL = "a" * 24
SWITCHED = b"HTTP/1.1 101 Switching Protocols\r\nConnection: upgrade\r\nUpgrade: aenv-children\r\n\r\n"
Behave = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Coroutine[Any, Any, None]]


def message(**fields: Any) -> bytes:
    data = json.dumps(fields).encode()
    return struct.pack("!I", len(data)) + data


def asked(id: int, call: str = CALL, **more: Any) -> bytes:
    return message(**{"type": "Ask", "id": id, "call": call, "alias": "low", "kind": "list_tools", "timeout": 5} | more)


class Low:
    """One that is needed. It answers when it is let."""

    def __init__(self) -> None:
        self.is_left = False
        self.asked: list[Ask] = []
        self.answers = asyncio.Event()

    async def carried(self, ask: Ask) -> Any:
        self.asked.append(ask)
        await self.answers.wait()
        return ["x" * 1_000_000]


@asynccontextmanager
async def parent(folder: Path, low: Low, behave: Behave) -> AsyncIterator[None]:
    """An instance that needs one, whose runtime is somebody else's program; once its first connection is over."""
    over = asyncio.Event()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if over.is_set():
            writer.transport.abort()
            return
        await reader.readuntil(b"\r\n\r\n")
        writer.write(SWITCHED + message(type="Ready"))
        try:
            await behave(reader, writer)
        finally:
            over.set()
            writer.transport.abort()

    server = await asyncio.start_unix_server(serve, folder / "parent")
    carrier = Carrier(Sandbox(url=f"unix:{folder / 'parent'}", id="parent"), {"low": low})
    running = asyncio.create_task(carrier.run())
    try:
        await carrier.prepared
        async with asyncio.timeout(10):
            await over.wait()
        yield
    finally:
        running.cancel()
        await asyncio.wait((running,))
        server.close()


@pytest.mark.parametrize("call", ["x\r\nAEnv-Agent: other", CALL + "\n", "", "A" * 24])
async def test_what_is_no_id_of_a_call_goes_into_no_header(tmp_path: Path, call: str) -> None:
    async def behave(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(asked(1, call))
        assert await reader.read() == b""

    low = Low()
    async with parent(tmp_path, low, behave):
        assert low.asked == []
