"""The instances that one depends on, as its runtime reaches them: who carries comes and goes."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
import pytest

from aenv.errors import SandboxError
from aenv.project.depends import parse
from aenv.runtime.carried import Answer, Ask, Messages, Ready, decode_asked, written
from aenv.runtime.children import Children
from aenv.runtime.functions import Function

TOOLS = [{"name": "add", "inputSchema": {"type": "object"}}]


class Carrier:
    """One end of a connection: it hears what is asked, and answers when it is told to."""

    def __init__(self, children: Children, offered: list[str]) -> None:
        self.heard: list[Any] = []
        self._messages = Messages()
        self._protocol: Any = None
        self._closing = False

        def offer(tools: list[Function]) -> None:
            offered.extend(tool.name for tool in tools)

        scope = {"aenv.upgrade": lambda protocol: (self, b"")}
        self.serving = asyncio.create_task(children.serve(scope, offer, lambda: None))

    def answer(self, ask: Ask) -> None:
        self._protocol.data_received(written(Answer(id=ask.id, value=msgspec.Raw(msgspec.json.encode(TOOLS)))))

    async def next(self) -> Any:
        async with asyncio.timeout(5):
            while not self.heard:
                await asyncio.sleep(0)
        return self.heard.pop(0)

    # As the transport

    def set_protocol(self, protocol: Any) -> None:
        self._protocol = protocol

    def is_closing(self) -> bool:
        return self._closing

    def is_reading(self) -> bool:
        return True

    def write(self, data: bytes) -> None:
        self.heard += map(decode_asked, self._messages.feed(data))

    def abort(self) -> None:
        if not self._closing:
            self._closing = True
            asyncio.get_running_loop().call_soon(self._protocol.connection_lost, None)


async def test_who_carries_may_leave_while_the_tools_of_others_are_read() -> None:
    children = Children({alias: parse({"env": "low", "prefix": f"{alias}_"}) for alias in ("one", "two")})
    offered: list[str] = []
    first = Carrier(children, offered)
    first.answer(await first.next())
    await first.next()
    first.abort()
    second = Carrier(children, offered)
    while True:
        message = await second.next()
        if isinstance(message, Ready):
            break
        second.answer(message)
    assert message.error is None
    assert offered == ["one_add", "two_add"]
    children.close()
    await asyncio.gather(first.serving, second.serving)


async def test_one_that_is_ending_waits_for_nobody() -> None:
    children = Children({"one": parse("low")})
    carrier = Carrier(children, [])
    assert await carrier.next() == Ready()
    calling = asyncio.create_task(children.child("one").list_tools())
    await carrier.next()
    children.close()
    async with asyncio.timeout(5):
        with pytest.raises(SandboxError, match="one cannot be reached any more: this environment is ending"):
            await calling
        with pytest.raises(SandboxError, match="this environment is ending"):  # as a teardown would
            await children.child("one").list_tools()
        await carrier.serving
