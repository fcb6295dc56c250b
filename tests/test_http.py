"""The door to the network, against servers that behave badly: real sockets, scripted answers."""

from __future__ import annotations

import asyncio
import os
import socket
import threading
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from pathlib import Path

import pytest

from aenv import http
from aenv.errors import Invalid, NetworkError, TooLarge

Script = Callable[[asyncio.StreamReader, asyncio.StreamWriter, int], Awaitable[None]]
OK = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok"


@asynccontextmanager
async def server(script: Script, path: Path | None = None) -> AsyncIterator[str]:
    """Runs ``script`` on each connection, with the connection's number."""
    count = 0
    tasks: set[asyncio.Task[None]] = set()

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal count
        count += 1
        task = asyncio.current_task()
        assert task is not None
        tasks.add(task)
        try:
            await script(reader, writer, count)
        finally:
            writer.close()

    if path is not None:
        listening = await asyncio.start_unix_server(handle, path)
        url = f"unix:{path}"
    else:
        listening = await asyncio.start_server(handle, "127.0.0.1", 0)
        url = f"http://127.0.0.1:{listening.sockets[0].getsockname()[1]}"
    try:
        yield url
    finally:
        listening.close()
        await http.close()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def read_request(reader: asyncio.StreamReader) -> bytes:
    head = await reader.readuntil(b"\r\n\r\n")
    length = int(head.lower().partition(b"content-length: ")[2].split(b"\r\n")[0])
    return head + await reader.readexactly(length)


async def answer_all(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, number: int) -> None:
    while True:
        await read_request(reader)
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 1\r\n\r\n%d" % number)


async def test_connections_are_used_again() -> None:
    async with server(answer_all) as url:
        assert [(await http.request("GET", url, "/")).body for _ in range(5)] == [b"1"] * 5
        together = await asyncio.gather(*(http.request("GET", url, "/") for _ in range(3)))
        assert sorted(response.body for response in together) == [b"1", b"2", b"3"]


async def test_a_unix_socket(tmp_path: Path) -> None:
    async with server(answer_all, tmp_path / "s") as url:
        assert (await http.request("GET", url, "/x")).body == b"1"


async def test_what_is_sent() -> None:
    seen: list[bytes] = []

    async def script(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, number: int) -> None:
        seen.append(await read_request(reader))
        writer.write(OK)

    async with server(script) as url:
        await http.request("POST", f"{url}/prefix/", "/a?b=c", headers=b"X-One: 1\r\n", body=b"body")
    head, _, body = seen[0].partition(b"\r\n\r\n")
    assert head.split(b"\r\n")[0] == b"POST /prefix/a?b=c HTTP/1.1"
    assert b"X-One: 1" in head
    assert body == b"body"


@pytest.mark.parametrize(
    ("answer", "body"),
    [
        (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n2\r\nab\r\n1\r\nc\r\n0\r\n\r\n", b"abc"),
        (b"HTTP/1.1 200 OK\r\nConnection: close\r\n\r\nuntil the end", b"until the end"),
        (b"HTTP/1.1 100 Continue\r\n\r\n" + OK, b"ok"),
        (b"HTTP/1.1 204 No Content\r\n\r\n", b""),
    ],
)
async def test_ways_to_answer(answer: bytes, body: bytes) -> None:
    async def script(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, number: int) -> None:
        await read_request(reader)
        for byte in answer:
            writer.write(bytes([byte]))
            await writer.drain()

    async with server(script) as url:
        assert (await http.request("GET", url, "/")).body == body


@pytest.mark.parametrize(
    "answer", [b"", b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nab", b"not http at all\r\n\r\n", b"HTTP/1.1 200"]
)
async def test_a_cut_answer_is_asked_for_again_only_when_that_is_safe(answer: bytes) -> None:
    asked = 0

    async def script(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, number: int) -> None:
        nonlocal asked
        await read_request(reader)
        asked += 1
        writer.write(answer if asked < 3 else OK)

    async with server(script) as url:
        with pytest.raises(NetworkError):
            await http.request("POST", url, "/")
        assert asked == 1
        assert (await http.request("POST", url, "/", repeatable=True)).body == b"ok"
        assert asked == 3


async def test_a_busy_server_is_asked_again() -> None:
    asked = 0

    async def script(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, number: int) -> None:
        nonlocal asked
        while True:
            await read_request(reader)
            asked += 1
            busy = b"HTTP/1.1 503 Busy\r\nRetry-After: 0\r\nContent-Length: 0\r\n\r\n"
            writer.write(busy if asked % 3 else OK)

    async with server(script) as url:
        assert (await http.request("POST", url, "/")).status == 200
        assert asked == 3
        assert (await http.request("POST", url, "/", retries=0)).status == 503


async def test_of_too_many_connections_those_unused_for_the_longest_time_are_closed(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(http, "MOST_IDLE", 2)
    async with AsyncExitStack() as stack:
        a, b, c = [await stack.enter_async_context(server(answer_all, tmp_path / name)) for name in "abc"]
        bodies = [(await http.request("GET", url, "/")).body for url in (a, b, a, c, b, a)]
    assert bodies == [b"1", b"1", b"1", b"1", b"2", b"2"]


async def test_a_connection_closed_while_idle_costs_nothing() -> None:
    async def script(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, number: int) -> None:
        await read_request(reader)
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 1\r\n\r\n%d" % number)

    async with server(script) as url:
        for number in range(1, 4):
            assert (await http.request("POST", url, "/", retries=0, repeatable=True)).body == b"%d" % number


async def test_what_must_not_be_sent_twice_is_not_sent_on_a_connection_that_has_ended() -> None:
    go, ended = threading.Event(), threading.Event()

    def serve(listening: socket.socket) -> None:
        for _ in range(2):
            connection, _ = listening.accept()
            with connection:
                connection.recv(65536)
                connection.sendall(OK)
                go.wait(30)
            ended.set()

    with socket.create_server(("127.0.0.1", 0)) as listening:
        thread = threading.Thread(target=serve, args=(listening,))
        thread.start()
        url = f"http://127.0.0.1:{listening.getsockname()[1]}"
        assert (await http.request("POST", url, "/")).body == b"ok"
        go.set()
        assert ended.wait(30)  # and the event loop has not heard of it
        assert (await http.request("POST", url, "/")).body == b"ok"
        thread.join(30)
        await http.close()


async def test_what_nobody_can_have_read_is_sent_again(tmp_path: Path) -> None:
    """Its server takes no more, and the client has not been told: a request that is then written is refused."""

    async def script(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, number: int) -> None:
        await read_request(reader)
        with socket.socket(fileno=os.dup(writer.get_extra_info("socket").fileno())) as sock:
            sock.shutdown(socket.SHUT_RD)
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 1\r\n\r\n%d" % number)
        await asyncio.Event().wait()

    async with server(script, tmp_path / "s") as url:
        for number in range(1, 4):
            assert (await http.request("POST", url, "/", body=b"once", retries=0)).body == b"%d" % number


async def test_a_cancelled_request_leaves_no_answer_for_the_next() -> None:
    arrived, go = asyncio.Event(), asyncio.Event()

    async def script(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, number: int) -> None:
        while True:
            request = await read_request(reader)
            if b"/slow" in request:
                arrived.set()
                await go.wait()
            writer.write(
                b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\n" + (b"slow!" if b"/slow" in request else b"fast!")
            )

    async with server(script) as url:
        await http.request("GET", url, "/fast")
        slow = asyncio.create_task(http.request("GET", url, "/slow"))
        await arrived.wait()
        slow.cancel()
        with pytest.raises(asyncio.CancelledError):
            await slow
        go.set()
        assert (await http.request("GET", url, "/fast")).body == b"fast!"


async def test_an_answer_before_the_body_was_sent_ends_the_upload() -> None:
    async def script(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, number: int) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 413 Too Large\r\nContent-Length: 0\r\n\r\n")
        await writer.drain()
        while await reader.read(65536):
            continue

    async with server(script) as url:
        assert (await http.request("POST", url, "/", body=b"x" * 50_000_000)).status == 413


CHUNK = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n1\r\nx\r\n"


@pytest.mark.parametrize(
    "begin",
    [b"HTTP/1.1 200 ", b"HTTP/1.1 200 OK\r\nX: ", CHUNK + b"0\r\nX: ", CHUNK + b"1;x="],
    ids=["reason", "value", "trailer", "chunk"],
)
async def test_a_line_without_end_is_not_kept(begin: bytes) -> None:
    async def script(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, number: int) -> None:
        await read_request(reader)
        writer.write(begin)
        with suppress(ConnectionError):
            while True:
                writer.write(b"y" * 65536)
                await writer.drain()

    async with server(script) as url:
        with pytest.raises(TooLarge, match="head of the answer"):
            await http.request("POST", url, "/")
        with pytest.raises(TooLarge, match="head of the answer"):
            async with http.stream("POST", url, "/", patience=60) as answer:
                await answer.read(1000)


async def test_nobody_there() -> None:
    with pytest.raises(http.NotSent, match="cannot connect to 127.0.0.1:1: Connection refused$"):
        await http.request("GET", "http://127.0.0.1:1", "/", retries=1)
    with pytest.raises(http.NotSent, match="cannot connect"):
        await http.request("GET", "unix:/nonexistent/socket", "/", retries=0)


@pytest.mark.parametrize("url", ["ftp://x", "nothing", "http://", "http://h:port", "http://[::1"])
async def test_addresses_that_are_none(url: str) -> None:
    with pytest.raises(Invalid, match="not an address"):
        await http.request("GET", url, "/")


@pytest.mark.parametrize(
    ("path", "headers"), [("/a b", b""), ("/é", b""), ("/a\r\nX:b", b""), ("/", b"X: a\nY: b\r\n")]
)
async def test_nothing_is_smuggled_into_a_request(path: str, headers: bytes) -> None:
    with pytest.raises(Invalid, match="does not carry"):
        await http.request("GET", "http://127.0.0.1:1", path, headers=headers)
