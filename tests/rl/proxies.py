"""A proxy between a client and its sandbox, on a real socket, that does something when an exchange of a kind comes."""

from __future__ import annotations

import asyncio
import os
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import msgspec

from aenv.models import Sandbox

CUT, CUT_LATE, HALF, STALL = "cut", "cut late", "half", "stall"
"""The connection ends before the sandbox is asked; after it was, without an answer; in the middle of the answer; or
nothing is ever heard of it again."""
Act = Callable[[Sandbox], Awaitable[str | None]]
"""Does something when an exchange comes; what it returns is what is done with the exchange."""


def kind_of(head: bytes) -> str:
    """What an exchange is about: ``reset``, ``tool``, ``tools``, ``reward``, ``file``, or nothing of these."""
    line = head.split(b"\r\n", 1)[0]
    if b" /reset" in line:
        return "reset"
    if b" /task/reward" in line:
        return "reward"
    if b" /files" in line:
        return "file"
    if b" /mcp" in line:
        return "tool" if b"\r\nmcp-method: tools/call" in head.lower() else "tools"
    return ""


class Trigger:
    """What is to happen at the exchange of that kind and number, and at those after it, so many times."""

    def __init__(self, kind: str, act: Act | str, nth: int = 0, times: float = float("inf")) -> None:
        self.kind = kind
        self.nth = nth
        self.times = times
        self.fired = 0
        self._act = act

    async def fire(self, kind: str, seen: int, sandbox: Sandbox) -> str | None:
        """``seen`` of the kind came before it in the life of its sandbox."""
        if kind != self.kind or seen < self.nth or self.fired >= self.times:
            return None
        self.fired += 1
        return self._act if isinstance(self._act, str) else await self._act(sandbox)

    @asynccontextmanager
    async def between(self, sandbox: Sandbox) -> AsyncIterator[Sandbox]:
        """The sandbox behind this."""
        assert sandbox.url.startswith("unix:")
        upstream = sandbox.url.removeprefix("unix:")
        seen: dict[str, int] = {}
        tasks: set[asyncio.Task[None]] = set()

        async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            task = asyncio.current_task()
            assert task is not None
            tasks.add(task)
            with suppress(OSError, EOFError, asyncio.IncompleteReadError, asyncio.CancelledError):
                while True:
                    head, body = await _message(reader)
                    kind = kind_of(head)
                    number = seen.get(kind, 0)
                    seen[kind] = number + 1
                    what = await self.fire(kind, number, sandbox)
                    if what == CUT:
                        break
                    if what == STALL:
                        await asyncio.Event().wait()
                    answer = await _asked(upstream, head, body)
                    if what == CUT_LATE:
                        break
                    writer.write(answer[: len(answer) // 2] if what == HALF else answer)
                    await writer.drain()
                    if what == HALF:
                        break
            writer.close()

        with tempfile.TemporaryDirectory(prefix="aerlx-", dir="/tmp") as folder:
            path = os.path.join(folder, "s")
            server = await asyncio.start_unix_server(serve, path)
            Path(path).chmod(0o666)
            try:
                yield msgspec.structs.replace(sandbox, url=f"unix:{path}")
            finally:
                server.close()
                for task in tasks:
                    task.cancel()
                if tasks:
                    await asyncio.wait(tasks)


async def _message(reader: asyncio.StreamReader) -> tuple[bytes, bytes]:
    head = await reader.readuntil(b"\r\n\r\n")
    length = 0
    for line in head.split(b"\r\n"):
        name, _, value = line.partition(b":")
        if name.lower() == b"content-length":
            length = int(value)
    return head, await reader.readexactly(length)


async def _asked(path: str, head: bytes, body: bytes) -> bytes:
    """What the sandbox answers, all of it."""
    reader, writer = await asyncio.open_unix_connection(path)
    try:
        writer.write(head + body)
        answered, content = await _message(reader)
        if b"transfer-encoding" in answered.lower():
            raise AssertionError("the sandbox answers in chunks, which this proxy does not know")
        return answered + content
    finally:
        writer.close()
