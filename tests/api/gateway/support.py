"""What tests of the gateway work with: a directory in memory, servers that misbehave, clients that speak in bytes."""

from __future__ import annotations

import asyncio
import contextlib
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any, NamedTuple

from aenv.api.gateway import Answered, Gateway, Place, Replicas
from aenv.auth.callers import Caller, Scope
from aenv.errors import AEnvError, NotFound, Unauthorized
from aenv.runtime import tokens
from tests.support import Reply

PATIENCE = 30.0
KEY = b"k" * 32
OWNER_TOKEN = "the-token-of-the-owner"
AGENT_TOKEN = tokens.agent_token(tokens.digest(OWNER_TOKEN))
OWNER = f"Authorization: Bearer {OWNER_TOKEN}\r\n"


class Known:
    """A directory that knows what it was told."""

    def __init__(self, *places: Place) -> None:
        self.places = {place.id: place for place in places}
        self.running = dict(self.places)
        """Those that are known without asking."""
        self.callers = {
            "anna": Caller("anna", frozenset({Scope.RUN})),
            "anna-reads": Caller("anna", frozenset({Scope.READ})),
            "bert": Caller("bert", frozenset({Scope.RUN})),
            "admin": Caller("root", frozenset({Scope.ADMIN})),
        }
        self.used: list[str] = []

    def known(self, id: str) -> Place | None:
        return self.running.get(id)

    async def place(self, id: str) -> Place:
        await asyncio.sleep(0)
        if id not in self.places:
            raise NotFound(f"no instance {id}")
        return self.places[id]

    async def caller(self, token: str) -> Caller:
        await asyncio.sleep(0)
        if token not in self.callers:
            raise Unauthorized("unknown token")
        return self.callers[token]

    def touched(self, id: str) -> None:
        self.used.append(id)

    def fails(self, id: str, error: Any) -> None:
        """From now on the instance is known to be gone."""
        self.running.pop(id, None)
        before = self.places[id]
        self.places[id] = Place(id, before.url, before.owner, before.token, error)


def place(url: str, id: str = "one") -> Place:
    return Place(id, url, "anna", OWNER_TOKEN)


class Served:
    """Services that are as the test says: one, unless it says more."""

    def __init__(self, *ready: str, id: str = "both") -> None:
        """With a replica at each URL, called r0, r1 and so on."""
        self.all: dict[str, Replicas] = {}
        self.heard: dict[str, Replicas] = self.all
        """What is known without asking."""
        self.asked = 0
        self.set(*(place(url, f"r{number}") for number, url in enumerate(ready)), id=id)

    def set(
        self, *ready: Place, leaving: tuple[Place, ...] = (), id: str = "both", failure: AEnvError | None = None
    ) -> None:
        """From now on, these are its replicas."""
        self.all[id] = Replicas(id, "anna", OWNER_TOKEN, ready, leaving, failure)

    def known(self, id: str) -> Replicas | None:
        return self.heard.get(id)

    async def find(self, id: str) -> Replicas:
        self.asked += 1
        await asyncio.sleep(0)
        if id not in self.all:
            raise NotFound(f"no service {id}")
        found = self.heard[id] = self.all[id]
        return found


class Seen:
    """A watcher that remembers."""

    def __init__(self) -> None:
        self.calls: list[Answered] = []

    def answered(self, call: Answered) -> None:
        self.calls.append(call)


@contextlib.asynccontextmanager
async def serving(directory: Known, *, grace: float = 0.0, **options: Any) -> AsyncIterator[Gateway]:
    """A gateway on a free port."""
    made = Gateway(directory, key=KEY, **options)
    await made.listen(port=0)
    try:
        yield made
    finally:
        await made.close(grace)


Handler = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


class _Handling:
    """Has a server's connections handled, and ends what is left of that."""

    def __init__(self, handler: Handler) -> None:
        self._handler = handler
        self._tasks: set[asyncio.Task[None] | None] = set()

    async def __call__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._tasks.add(asyncio.current_task())
        try:
            with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
                await self._handler(reader, writer)
        finally:
            writer.close()

    async def end(self, server: asyncio.Server) -> None:
        server.close()
        tasks = [task for task in self._tasks if task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


@contextlib.asynccontextmanager
async def upstream(handler: Handler) -> AsyncIterator[str]:
    """A server on a local socket in place of a sandbox: what it does is up to the test."""
    handling = _Handling(handler)
    with tempfile.TemporaryDirectory(prefix="gw-") as folder:
        path = Path(folder) / "s"
        server = await asyncio.start_unix_server(handling, path)
        try:
            yield f"unix:{path}"
        finally:
            await handling.end(server)


@contextlib.asynccontextmanager
async def inside(handler: Handler) -> AsyncIterator[int]:
    """A server on a port of a sandbox that shares our loopback interface; the port."""
    handling = _Handling(handler)
    server = await asyncio.start_server(handling, "127.0.0.1", 0)
    try:
        yield server.sockets[0].getsockname()[1]
    finally:
        await handling.end(server)


class Request(NamedTuple):
    """What a server was asked."""

    line: str
    headers: dict[str, str]
    head: str


async def head(reader: asyncio.StreamReader) -> Request:
    """The head of the next request."""
    text = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
    line, *lines = text[:-4].split("\r\n")
    return Request(line, {name.lower(): value for name, value in (x.split(": ", 1) for x in lines)}, text)


async def chunks(reader: asyncio.StreamReader) -> bytes:
    """A body in chunks."""
    body = b""
    while size := int(await reader.readuntil(b"\r\n"), 16):
        body += (await reader.readexactly(size + 2))[:-2]
    assert await reader.readexactly(2) == b"\r\n"
    return body


def ok(body: bytes = b"fine", extra: str = "") -> bytes:
    return f"HTTP/1.1 200 OK\r\n{extra}Content-Length: {len(body)}\r\n\r\n".encode() + body


class Client:
    """A connection whose every byte is the test's own."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer

    def send(self, *parts: str | bytes) -> None:
        for part in parts:
            self.writer.write(part.encode("latin-1") if isinstance(part, str) else part)

    def get(self, path: str, headers: str = OWNER, method: str = "GET", host: str = "localhost") -> None:
        self.send(f"{method} {path} HTTP/1.1\r\nHost: {host}\r\n{headers}\r\n")

    def put(self, path: str, headers: str) -> None:
        """The head of a request whose body is to follow."""
        self.send(f"PUT {path} HTTP/1.1\r\nHost: localhost\r\n{OWNER}{headers}\r\n")

    def delete(self, path: str, headers: str = OWNER) -> None:
        self.get(path, headers, "DELETE")

    def post(self, path: str, body: bytes = b"", headers: str = OWNER) -> None:
        self.send(f"POST {path} HTTP/1.1\r\nHost: localhost\r\n{headers}Content-Length: {len(body)}\r\n\r\n", body)

    async def head(self) -> Reply:
        """The head of the next answer."""
        async with asyncio.timeout(PATIENCE):
            text = (await self.reader.readuntil(b"\r\n\r\n")).decode("latin-1")
        first, *lines = text[:-4].split("\r\n")
        pairs = [line.split(": ", 1) for line in lines]
        assert len({name.lower() for name, _ in pairs}) == len(pairs), f"a header came twice: {text}"
        return Reply(int(first.split()[1]), {name.lower(): value for name, value in pairs}, b"")

    async def exactly(self, size: int) -> bytes:
        async with asyncio.timeout(PATIENCE):
            return await self.reader.readexactly(size)

    async def chunk(self) -> bytes:
        """The next chunk; the last is empty."""
        async with asyncio.timeout(PATIENCE):
            size = int(await self.reader.readuntil(b"\r\n"), 16)
            data = await self.reader.readexactly(size + 2)
        assert data.endswith(b"\r\n")
        return data[:-2]

    async def reply(self, *, bare: bool = False) -> Reply:
        """The next answer as a whole."""
        found = await self.head()
        body = b""
        if bare:
            return found
        if "content-length" in found.headers:
            body = await self.exactly(int(found.headers["content-length"]))
        elif found.headers.get("transfer-encoding") == "chunked":
            while chunk := await self.chunk():
                body += chunk
        else:
            body = await self.rest()
        return found._replace(body=body)

    async def rest(self) -> bytes:
        """Everything until the connection ends."""
        async with asyncio.timeout(PATIENCE):
            return await self.reader.read()

    async def ended(self) -> None:
        """Wait until the other side has closed, with or without a word."""
        with contextlib.suppress(ConnectionError):
            assert await self.rest() == b""

    def vanish(self) -> None:
        self.writer.transport.abort()


@contextlib.asynccontextmanager
async def client(gateway: Gateway) -> AsyncIterator[Client]:
    reader, writer = await asyncio.open_connection("127.0.0.1", gateway.port, limit=1024 * 1024)
    try:
        yield Client(reader, writer)
    finally:
        writer.close()


async def asked(
    gateway: Gateway, path: str, headers: str = OWNER, method: str = "GET", host: str = "localhost"
) -> Reply:
    """One request on a connection of its own."""
    async with client(gateway) as one:
        one.get(path, headers, method, host)
        return await one.reply(bare=method == "HEAD")


async def posted(gateway: Gateway, path: str, body: bytes = b"", headers: str = OWNER) -> Reply:
    """One request with a body, on a connection of its own."""
    async with client(gateway) as one:
        one.post(path, body, headers)
        return await one.reply()


class Count:
    """Connections that a server has had, and how many of them ended."""

    def __init__(self) -> None:
        self.made = 0
        self.ended = 0

    def on(self, handler: Handler) -> Handler:
        async def counted(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            self.made += 1
            try:
                await handler(reader, writer)
            finally:
                self.ended += 1

        return counted
