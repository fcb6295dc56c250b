"""Help for tests of the platform's clients: a control plane whose answers a test writes, on a real socket."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

from aenv import http

ENV = {
    "id": "lab@1.2.3",
    "name": "lab",
    "version": "1.2.3",
    "created_at": "2030-01-01T00:00:00.000Z",
    "updated_at": "2030-01-01T00:00:00.000Z",
}


@dataclass
class Asked:
    """One request."""

    method: str
    path: str
    query: dict[str, list[str]]
    headers: dict[str, str]
    body: bytes
    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter

    @property
    def line(self) -> str:
        return f"{self.method} {self.path}"

    @property
    def json(self) -> Any:
        return json.loads(self.body)


class Cut(Exception):
    """Raised by an answer: the connection ends instead."""


@dataclass
class Plane:
    """A control plane. ``answer`` gets each request and returns a status and what is answered as JSON, or as bytes."""

    answer: Callable[[Asked], Awaitable[tuple[int, Any]]]
    url: str = ""
    asked: list[Asked] = field(default_factory=list)

    @property
    def lines(self) -> list[str]:
        return [asked.line for asked in self.asked]

    def count(self, line: str) -> int:
        return self.lines.count(line)

    async def handle(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while True:
                asked = await read(reader, writer)
                self.asked.append(asked)
                status, told = await self.answer(asked)
                write(writer, status, told)
                await writer.drain()
        except (asyncio.IncompleteReadError, ConnectionError, Cut):
            pass
        finally:
            writer.close()


async def read(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> Asked:
    head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
    first, *lines = head.rstrip().split("\r\n")
    method, target, _ = first.split(" ")
    headers = {name.lower(): value for name, _, value in (line.partition(": ") for line in lines)}
    body = await reader.readexactly(int(headers.get("content-length", 0)))
    url = urlsplit(target)
    return Asked(method, unquote(url.path), parse_qs(url.query), headers, body, reader, writer)


def write(writer: asyncio.StreamWriter, status: int, told: Any, headers: str = "") -> None:
    body = told if isinstance(told, bytes) else json.dumps(told).encode()
    kind = "application/octet-stream" if isinstance(told, bytes) else "application/json"
    head = f"HTTP/1.1 {status} Status\r\nContent-Type: {kind}\r\n{headers}Content-Length: {len(body)}\r\n\r\n"
    writer.write(head.encode() + body)


def ok(data: Any, **more: Any) -> tuple[int, Any]:
    return 200, {"success": True, "code": 0, "message": "ok", "data": data, **more}


def failed(status: int, error: str, message: str = "no", hint: str | None = None) -> tuple[int, Any]:
    told = {"success": False, "code": status, "message": message, "data": None, "error": error, "hint": hint}
    return status, told


@asynccontextmanager
async def plane(answer: Callable[[Asked], Awaitable[tuple[int, Any]]]) -> AsyncIterator[Plane]:
    """A control plane on a free port, until the block ends."""
    made = Plane(answer)
    tasks: set[asyncio.Task[None]] = set()

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        tasks.add(task)
        await made.handle(reader, writer)

    server = await asyncio.start_server(handle, "127.0.0.1", 0)
    made.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    try:
        yield made
    finally:
        server.close()
        await http.close()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
