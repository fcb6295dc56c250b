"""Clients and sandboxes that leave, die, stall or lie: right answers, nothing left behind."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import struct
from collections.abc import AsyncIterator

import pytest

from aenv.api.gateway import Place, router
from aenv.api.gateway import connection as limits
from aenv.api.gateway import gateway as looks
from aenv.errors import NetworkError, OutOfMemory, SandboxLost
from tests.api.gateway.support import (
    OWNER,
    Client,
    Count,
    Known,
    asked,
    client,
    head,
    ok,
    place,
    serving,
    upstream,
)
from tests.support import until

MB = 1024 * 1024
ONE = "/env-instance/one"
CALL_ID = f"{OWNER}AEnv-Call-Id: c1\r\n"


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Look often, and do not wait long for anything."""
    monkeypatch.setattr(looks, "EVERY", 0.05)
    monkeypatch.setattr(router, "NEWS", 0.3)
    monkeypatch.setattr(limits, "LINGER", 0.3)


# Clients that leave


async def _never(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    await head(reader)
    await reader.read()  # ends when the gateway hangs up


async def _stream(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    await head(reader)
    writer.write(b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n")
    writer.write(b"5\r\ndata:\r\n")
    await reader.read()


@pytest.mark.parametrize("way", ["close", "reset", "half"])
@pytest.mark.parametrize("when", ["before an answer", "in the middle of one", "in the middle of its request"])
async def test_a_client_that_leaves_ends_its_call(way: str, when: str) -> None:
    count = Count()
    handler = _stream if when == "in the middle of one" else _never
    async with upstream(count.on(handler)) as url, serving(Known(place(url))) as gateway, client(gateway) as one:
        if when == "in the middle of its request":
            one.put(f"{ONE}/files", "Content-Length: 1000\r\n")
            one.send("abc")
        else:
            one.get(f"{ONE}/mcp")
        if when == "in the middle of one":
            await one.head()
            assert await one.chunk() == b"data:"
        await until(lambda: count.made == 1, "the call")
        if way == "reset":
            _reset(one)
        elif way == "close":
            one.writer.close()
        else:
            one.writer.write_eof()
        await until(lambda: count.ended == 1, "the end of the call")
        await until(lambda: not gateway._open, "the end of the connection")


def _reset(one: Client) -> None:
    sock: socket.socket = one.writer.get_extra_info("socket")
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    one.vanish()


async def test_a_client_that_leaves_while_it_is_kept_waiting_is_noticed() -> None:
    count, free = Count(), asyncio.Event()

    async def handler(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await head(reader)
        writer.transport.pause_reading()
        await free.wait()
        writer.transport.resume_reading()
        while await reader.read(MB):
            pass

    async with upstream(count.on(handler)) as url, serving(Known(place(url))) as gateway, client(gateway) as one:
        one.put(f"{ONE}/files", f"Content-Length: {64 * MB}\r\n")
        one.send(b"x" * 2 * MB)
        await until(lambda: any(held._paused for held in gateway._open), "a pause")
        _reset(one)
        await until(lambda: not gateway._open, "the end of the connection")
        free.set()
        await until(lambda: count.ended == 1, "the end of the call")


async def test_a_client_that_leaves_while_its_sandbox_is_looked_for_leaves_nothing() -> None:
    class Slow(Known):
        asked = ended = 0

        async def place(self, id: str) -> Place:
            self.asked += 1
            try:
                await asyncio.sleep(3600)
            finally:
                self.ended += 1
            raise AssertionError

    directory = Slow()
    async with serving(directory) as gateway, client(gateway) as one:
        one.get(f"{ONE}/mcp")
        await until(lambda: directory.asked == 1, "the question")
        one.vanish()
        await until(lambda: directory.ended == 1, "its end")


# Sandboxes that die


async def test_an_answer_that_breaks_off_never_looks_whole() -> None:
    async def handler(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        way = (await head(reader)).line.split()[1]
        if way == "/chunked":
            writer.write(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n")
        elif way == "/length":
            writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 10\r\n\r\nabc")
        elif way == "/endless":
            writer.write(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n0\r\nX: " + b"x" * MB)
            await reader.read()
        else:
            writer.write(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nabc\r\nnonsense")

    async with upstream(handler) as url, serving(Known(place(url))) as gateway:
        for way in ("/chunked", "/nonsense", "/endless"):
            async with client(gateway) as one:
                one.get(f"{ONE}{way}")
                assert (await one.head()).status == 200
                assert await one.chunk() == b"abc"
                assert await one.rest() == b""  # and no last chunk
        async with client(gateway) as one:
            one.get(f"{ONE}/length")
            assert (await one.head()).headers["content-length"] == "10"
            assert await one.rest() == b"abc"
        async with client(gateway) as old:  # to whom the end of the connection is the end of the answer
            old.send(f"GET {ONE}/chunked HTTP/1.0\r\nHost: localhost\r\n{OWNER}\r\n")
            with pytest.raises(ConnectionResetError):
                await old.rest()


async def test_who_dies_before_the_answer_is_lost_with_the_reason() -> None:
    directory = Known()

    async def handler(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await head(reader)
        directory.fails("one", OutOfMemory("instance one is gone: out of memory"))

    async with upstream(handler) as url, serving(directory) as gateway:
        directory.places["one"] = directory.running["one"] = place(url)
        reply = await asked(gateway, f"{ONE}/x")
        assert (reply.status, reply.json["code"]) == (502, "out_of_memory")
        assert reply.json == {"success": False, "error": "instance one is gone: out of memory", "code": "out_of_memory"}
        reply = await asked(gateway, f"{ONE}/x")
        assert reply.json["code"] == "out_of_memory"
        del directory.places["one"]
        assert (await asked(gateway, f"{ONE}/x", "Authorization: Bearer anna\r\n")).status == 404


async def test_who_cannot_be_reached_is_lost_with_the_reason_as_soon_as_it_is_known(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    directory = Known(place("unix:/nowhere/at/all"))
    async with serving(directory) as gateway:
        reply = await asked(gateway, f"{ONE}/x")
        assert (reply.status, reply.json["code"]) == (502, "sandbox_lost")
        assert "No such file" in reply.json["error"]
        monkeypatch.setattr(router, "NEWS", 20.0)

        async def learn() -> None:
            await asyncio.sleep(0.05)
            directory.fails("one", SandboxLost("it ended with exit code 3"))

        learning = asyncio.create_task(learn())
        reply = await asked(gateway, f"{ONE}/x")
        await learning
        assert reply.json["error"] == "it ended with exit code 3"


async def test_a_sandbox_that_moved_is_found_again() -> None:
    async def handler(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await head(reader)
        writer.write(ok(b"here now"))

    directory = Known(place("unix:/nowhere/at/all"))
    async with upstream(handler) as url, serving(directory) as gateway:
        directory.places["one"] = place(url)
        assert (await asked(gateway, f"{ONE}/x")).body == b"here now"


async def test_a_request_is_repeated_only_where_that_does_no_harm() -> None:
    heard: list[str] = []

    async def handler(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        request = await head(reader)
        body = await reader.readexactly(int(request.headers.get("content-length", 0)))
        heard.append(request.line.split()[1])
        if heard.count(heard[-1]) > 1:
            writer.write(ok(body))

    async with upstream(handler) as url, serving(Known(place(url))) as gateway:
        assert (await asked(gateway, f"{ONE}/get")).status == 200
        async with client(gateway) as one:
            one.post(f"{ONE}/with-id", b"body", CALL_ID)
            assert (await one.reply()).body == b"body"
        async with client(gateway) as one:
            one.post(f"{ONE}/large", b"x" * MB, CALL_ID)
            reply = await one.reply()
            assert (reply.status, reply.json["code"], reply.headers["retry-after"]) == (503, "network", "1")
        async with client(gateway) as one:
            one.post(f"{ONE}/unsafe", b"body")
            reply = await one.reply()
            assert (reply.status, reply.json["code"]) == (502, "network")
        assert [heard.count(path) for path in ("/get", "/with-id", "/large", "/unsafe")] == [2, 2, 1, 1]


async def test_a_sandbox_that_hangs_up_on_everybody_is_no_use() -> None:
    async def handler(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.transport.abort()

    async with upstream(handler) as url, serving(Known(place(url))) as gateway:
        assert (await asked(gateway, f"{ONE}/x")).status in (502, 503)
        assert (await asked(gateway, f"{ONE}/x", method="POST")).status == 502
        name = gateway.exposed_url("one", 80, 1e10).split("/")[2]
        assert (await asked(gateway, "/", "", host=name)).status == 502


async def test_what_nobody_can_have_read_is_sent_again() -> None:
    """The sandbox takes no more on a kept connection, and nobody was told yet."""

    async def handler(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        request = await head(reader)
        await reader.readexactly(int(request.headers["content-length"]))
        with socket.socket(fileno=os.dup(writer.get_extra_info("socket").fileno())) as sock:
            sock.shutdown(socket.SHUT_RD)
        writer.write(ok())
        await asyncio.Event().wait()

    count = Count()
    async with upstream(count.on(handler)) as url, serving(Known(place(url))) as gateway, client(gateway) as one:
        for _ in range(5):
            one.post(f"{ONE}/unsafe", b"once")
            assert (await one.reply()).body == b"fine"
        assert count.made == 5


async def test_a_kept_connection_that_was_closed_is_not_used() -> None:
    async def handler(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await head(reader)
        writer.write(ok())  # and closes, without having said so

    count = Count()
    async with upstream(count.on(handler)) as url, serving(Known(place(url))) as gateway, client(gateway) as one:
        for _ in range(20):
            one.post(f"{ONE}/unsafe")
            assert (await one.reply()).body == b"fine"
        assert count.made == 20


@pytest.mark.parametrize(
    "answer",
    [
        b"SSH-2.0-OpenSSH\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: 1\r\nTransfer-Encoding: chunked\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: gzip\r\n\r\n",
        pytest.param(b"HTTP/1.1 200 OK\r\nX: " + b"x" * 100_000 + b"\r\n\r\n", id="long value"),
        pytest.param(b"HTTP/1.1 200 OK\r\nX: " + b"x" * MB, id="endless value"),
        pytest.param(b"HTTP/1.1 200 OK\r\n" + b"x" * MB, id="endless name"),
        pytest.param(b"HTTP/1.1 200 " + b"x" * MB, id="endless reason"),
        b"HTTP/1.1 101 Switching Protocols\r\nConnection: upgrade\r\nUpgrade: x\r\n\r\nraw",
        b"HTTP/1.1 101 Switching Protocols\r\n\r\n",
    ],
)
async def test_an_answer_that_is_none_is_not_passed_on(answer: bytes) -> None:
    async def handler(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await head(reader)
        writer.write(answer)
        await reader.read()

    async with upstream(handler) as url, serving(Known(place(url))) as gateway:
        reply = await asked(gateway, f"{ONE}/x")
        assert (reply.status, reply.json["code"]) == (502, "network")


async def test_more_than_was_asked_for_reaches_nobody() -> None:
    async def handler(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while True:
            await head(reader)
            writer.write(ok(b"first") + ok(b"nobody's"))

    async with upstream(handler) as url, serving(Known(place(url))) as gateway, client(gateway) as one:
        for _ in range(5):
            one.get(f"{ONE}/x")
            assert (await one.reply()).body == b"first"


# Endings


@contextlib.asynccontextmanager
async def _half_way() -> AsyncIterator[tuple[asyncio.Event, str]]:
    go = asyncio.Event()

    async def handler(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while True:
            await head(reader)
            writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 6\r\n\r\nhal")
            await go.wait()
            writer.write(b"ves")

    async with upstream(handler) as url:
        yield go, url


async def test_closing_lets_calls_end_and_takes_no_more() -> None:
    async with (
        _half_way() as (go, url),
        serving(Known(place(url))) as gateway,
        client(gateway) as one,
        client(gateway) as idle,
    ):
        idle.get("/health")
        await idle.reply()
        one.get(f"{ONE}/x")
        await one.head()
        closing = asyncio.create_task(gateway.close(30))
        assert (await idle.reply()).status == 503  # to what it may just be asking
        await idle.ended()
        with pytest.raises(OSError):  # noqa: PT011
            await asyncio.open_connection("127.0.0.1", gateway.port)
        go.set()
        assert await one.exactly(len("halves")) == b"halves"
        assert (await one.reply()).status == 503
        await closing


async def test_closing_cuts_what_does_not_end() -> None:
    async with upstream(_stream) as url, serving(Known(place(url))) as gateway, client(gateway) as one:
        one.get(f"{ONE}/mcp")
        await one.head()
        assert await one.chunk() == b"data:"
        await gateway.close(0.05)
        assert await one.rest() == b""


async def test_the_end_of_an_instance_ends_its_connections() -> None:
    count = Count()
    directory = Known()
    async with _half_way() as (go, url), serving(directory) as gateway, client(gateway) as one, client(gateway) as two:
        directory.places["one"] = directory.running["one"] = place(url)
        go.set()
        one.get(f"{ONE}/x")
        assert (await one.reply()).body == b"halves"
        go.clear()
        two.get(f"{ONE}/x")
        await two.head()
        directory.places.clear()
        directory.running.clear()
        gateway.ended("one")
        assert await two.rest() == b"hal"
        assert not gateway.router.idle
        assert count.made == count.ended


async def test_a_store_that_is_away_is_not_a_sandbox_that_is_lost() -> None:
    class Away(Known):
        async def place(self, id: str) -> Place:
            raise NetworkError("the store does not answer")

    async with serving(Away()) as gateway:
        reply = await asked(gateway, f"{ONE}/x")
        assert (reply.status, reply.json["code"], reply.headers["retry-after"]) == (503, "network", "1")


async def test_a_directory_that_fails_is_not_the_clients_business(caplog: pytest.LogCaptureFixture) -> None:
    class Broken(Known):
        async def place(self, id: str) -> Place:
            raise RuntimeError("secret")

    async with serving(Broken()) as gateway:
        reply = await asked(gateway, f"{ONE}/x")
        assert (reply.status, reply.json["code"]) == (500, "internal")
        assert "secret" not in reply.body.decode()
    assert "secret" in caplog.text
