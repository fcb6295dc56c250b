"""A sandbox that nobody calls: its door, and the connections that it gives up."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest

from aenv.runtime.protocol import Connection, Connections, Receive, Send
from aenv.runtime.resting import Door
from aenv.runtime.server import bind_unix, loop_factory

Test = Callable[["House"], Coroutine[Any, Any, None]]
REQUEST = b"GET / HTTP/1.1\r\nHost: x\r\n\r\n"


async def answer(scope: Any, receive: Receive, send: Send) -> None:
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"2")]})
    await send({"type": "http.response.body", "body": b"ok"})


class House:
    """A server whose clients are plain sockets."""

    def __init__(self, path: Path) -> None:
        self._path = str(path)
        self.connections = Connections(answer)
        self.door = Door(bind_unix(self._path), self.connections)
        self._clients: list[socket.socket] = []

    def client(self) -> socket.socket:
        sock = socket.socket(socket.AF_UNIX)
        self._clients.append(sock)
        sock.connect(self._path)
        sock.setblocking(False)
        return sock

    async def asked(self, client: socket.socket) -> bytes:
        client.sendall(REQUEST)
        return await self.heard(client)

    async def heard(self, client: socket.socket) -> bytes:
        async with asyncio.timeout(20):
            return await asyncio.get_running_loop().sock_recv(client, 65536)

    async def used(self) -> tuple[socket.socket, Connection]:
        """A client whose connection was used, and that connection."""
        before = set(self.connections.open)
        client = self.client()
        assert (await self.asked(client)).endswith(b"ok")
        (connection,) = self.connections.open - before
        return client, connection

    def close(self) -> None:
        self.door.close()
        for client in self._clients:
            client.close()


@pytest.fixture(params=["asyncio", "uvloop"])
def run(request: pytest.FixtureRequest, tmp_path: Path) -> Callable[[Test], None]:
    def run(test: Test) -> None:
        async def main() -> None:
            house = House(tmp_path / "s")
            await house.door.open()
            try:
                await test(house)
            finally:
                house.close()
                await house.connections.drain(1.0)

        with asyncio.Runner(loop_factory=loop_factory() if request.param == "uvloop" else None) as runner:
            runner.run(main())

    return run


def test_who_calls_at_a_shut_door_waits_until_it_opens(run) -> None:
    async def test(house: House) -> None:
        for _ in range(3):
            inside, _ = await house.used()
            house.door.shut()
            waiting = [asyncio.ensure_future(house.asked(house.client())) for _ in range(5)]
            assert (await house.asked(inside)).endswith(b"ok"), "who was in before was put out"
            assert not any(each.done() for each in waiting)
            await house.door.open()
            assert all(said.endswith(b"ok") for said in await asyncio.gather(*waiting))

    run(test)


def test_a_connection_that_nobody_uses_is_closed_and_refuses_what_comes(run) -> None:
    async def test(house: House) -> None:
        client, connection = await house.used()
        assert connection.is_idle
        assert connection.hang_up() is True
        with pytest.raises(BrokenPipeError):
            client.sendall(REQUEST)
        assert await house.heard(client) == b""
        while house.connections.open:
            await asyncio.sleep(0)

    run(test)


def test_what_came_before_it_is_closed_is_answered(run) -> None:
    async def test(house: House) -> None:
        client, connection = await house.used()
        client.sendall(REQUEST)  # and the event loop has not heard of it
        assert connection.is_idle
        assert connection.hang_up() is False
        with pytest.raises(BrokenPipeError):
            client.sendall(REQUEST)
        assert (await house.heard(client)).endswith(b"ok")
        assert await house.heard(client) == b""
        while house.connections.open:
            await asyncio.sleep(0)

    run(test)


def test_a_client_that_has_left_is_hung_up_on(run) -> None:
    async def test(house: House) -> None:
        client, connection = await house.used()
        client.close()
        assert connection.hang_up() is True
        while house.connections.open:
            await asyncio.sleep(0)

    run(test)


def test_a_new_connection_is_about_to_be_used(run) -> None:
    async def test(house: House) -> None:
        client = house.client()
        while not house.connections.open:
            await asyncio.sleep(0)
        (connection,) = house.connections.open
        assert not connection.is_idle
        client.sendall(REQUEST[:10])
        await asyncio.sleep(0)
        assert not connection.is_idle
        client.sendall(REQUEST[10:])
        assert (await house.heard(client)).endswith(b"ok")
        assert connection.is_idle

    run(test)
