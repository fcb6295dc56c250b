"""Help for tests of the egress proxy: servers behind it, and clients in front of it. Real sockets throughout."""

import asyncio
import contextlib
import os
import socket
from collections.abc import AsyncIterator

from aenv.engines.egress import Egress
from aenv.engines.egress.proxy import Proxy

NOBODY = 65534 if os.geteuid() == 0 else None
PATIENCE = 20.0


class Server:
    """A server that remembers what it was sent, and answers each connection by ``answer``."""

    def __init__(self, answer):
        self._answer = answer
        self.port = 0
        self.received: list[bytearray] = []
        self.ends: list[str] = []
        """How connections ended, as the server saw it."""
        self._tasks: set[asyncio.Task] = set()

    async def __aenter__(self):
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.port = self._server.sockets[0].getsockname()[1]
        return self

    async def __aexit__(self, *_):
        self._server.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _serve(self, reader, writer):
        self._tasks.add(task := asyncio.current_task())
        task.add_done_callback(self._tasks.discard)
        received = bytearray()
        self.received.append(received)
        try:
            await self._answer(Connection(reader, writer, received))
            self.ends.append("answered")
        except (asyncio.IncompleteReadError, EOFError):
            self.ends.append("end")
        except ConnectionError:
            self.ends.append("reset")
        finally:
            writer.close()

    @property
    def heads(self):
        return [bytes(received).partition(b"\r\n\r\n")[0] for received in self.received]


class Connection:
    def __init__(self, reader, writer, received):
        self.reader, self.writer, self.received = reader, writer, received

    async def head(self):
        found = await self.reader.readuntil(b"\r\n\r\n")
        self.received += found
        return found

    async def some(self):
        found = await self.reader.read(65536)
        if not found:
            raise EOFError
        self.received += found
        return found

    async def send(self, data):
        self.writer.write(data)
        await self.writer.drain()


async def hello(connection):
    await connection.head()
    await connection.send(b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\nConnection: keep-alive\r\nX-Kept: 1\r\n\r\nhello")
    await connection.some()  # stays open, as servers that ignore "close" do


async def echo(connection):
    while True:
        await connection.send(await connection.some())


async def silence(connection):
    while True:
        await connection.some()


class Door:
    """A sandbox's way out, as its clients see it."""

    def __init__(self, port):
        self.port = port

    async def connect(self):
        return await asyncio.open_connection("127.0.0.1", self.port)

    async def ask(self, data):
        """All that is answered to some bytes, until the proxy closes."""
        reader, writer = await self.connect()
        try:
            writer.write(data)
            await writer.drain()
            async with asyncio.timeout(PATIENCE):
                return await reader.read()
        finally:
            writer.close()

    async def get(self, server_port, path="/", host="127.0.0.1", extra=""):
        return await self.ask(request(host, server_port, path, extra))

    async def tunnel(self, address):
        """A tunnel, or the status line that says why not."""
        reader, writer = await self.connect()
        writer.write(f"CONNECT {address} HTTP/1.1\r\nHost: {address}\r\n\r\n".encode())
        async with asyncio.timeout(PATIENCE):
            head = await reader.readuntil(b"\r\n\r\n")
        if not head.startswith(b"HTTP/1.1 200 "):
            writer.close()
            return head.partition(b"\r\n")[0].decode()
        return reader, writer


def request(host, port, path="/", extra=""):
    return f"GET http://{host}:{port}{path} HTTP/1.1\r\nHost: {host}:{port}\r\n{extra}\r\n".encode()


@contextlib.asynccontextmanager
async def serving(*allow: str, **options) -> AsyncIterator[Door]:
    """A proxy in this process, for what needs other limits or another resolver."""
    found = Proxy(**options)
    listener = socket.create_server(("127.0.0.1", 0))
    found.add("box-1", listener, allow)
    try:
        yield Door(listener.getsockname()[1])
    finally:
        await found.remove("box-1")
        assert found.open == 0


@contextlib.asynccontextmanager
async def process(uid=NOBODY) -> AsyncIterator[Egress]:
    egress = await Egress.start(uid)
    try:
        yield egress
    finally:
        await egress.close()
        assert not os.path.exists(f"/proc/{egress.pid}")


@contextlib.asynccontextmanager
async def added(egress, id, *allow):
    with socket.create_server(("127.0.0.1", 0)) as listener:
        await egress.add(id, listener, allow)
        port = listener.getsockname()[1]
    yield Door(port)
    await egress.remove(id)


async def until(condition):
    async with asyncio.timeout(PATIENCE):
        while not condition():
            await asyncio.sleep(0.01)


def status(answer: bytes) -> int:
    return int(answer.split(b" ", 2)[1])


def descriptors(pid):
    return len(os.listdir(f"/proc/{pid}/fd"))
