"""Who carries calls for an instance trusts nothing that it says: it is somebody's code."""

from __future__ import annotations

import asyncio
import json
import struct
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from aenv.client import carrying
from aenv.client.carrying import Carrier, Child
from aenv.errors import TooLarge
from aenv.models import Sandbox
from aenv.runtime.carried import AT_ONCE, MOST, Ask, written

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


async def test_one_that_asks_too_much_at_once_is_hung_up_on(tmp_path: Path) -> None:
    async def behave(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        for number in range(3 * AT_ONCE):  # one call under many names
            writer.write(asked(number))
        assert await reader.read() == b""

    low = Low()
    async with parent(tmp_path, low, behave):
        assert len(low.asked) <= 1


async def test_one_that_does_not_read_is_sent_one_answer_at_a_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[int] = []
    unread: list[int] = []

    def counted(answer: Any) -> bytes:
        made.append(answer.id)
        return written(answer)

    monkeypatch.setattr(carrying, "written", counted)
    low = Low()

    async def behave(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        reader._transport.pause_reading()  # type: ignore[attr-defined]
        for number in range(AT_ONCE):
            writer.write(asked(number, f"{number:024x}"))
        while len(low.asked) < AT_ONCE:
            await asyncio.sleep(0.01)
        low.answers.set()
        await asyncio.sleep(0.3)
        unread.append(len(made))

    async with parent(tmp_path, low, behave):
        assert unread == [1]


async def test_an_answer_that_is_too_long_is_not_read_to_its_end(tmp_path: Path) -> None:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % (MOST + 1))
        with suppress(ConnectionError):
            while True:
                writer.write(b" " * 1_000_000)
                await writer.drain()

    class Nobody:
        async def reason(self, id: str, patience: float) -> str:
            return ""

    server = await asyncio.start_unix_server(serve, tmp_path / "low")
    sandbox = Sandbox(url=f"unix:{tmp_path / 'low'}", id="low", env="low@1.0.0", boot="x")
    ask = Ask(id=1, call=CALL, alias="low", kind="call_function", name="much", timeout=30)
    with pytest.raises(TooLarge, match=f"the answer is over {MOST // 2} bytes"):
        await Child(sandbox, Nobody()).carried(ask)
    server.close()
