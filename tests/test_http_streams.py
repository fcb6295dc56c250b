"""Answers read as they come and bodies sent as they are made: real sockets, servers that behave badly."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from aenv import http
from aenv.errors import Invalid, NetworkError, TooLarge
from tests.support import until
from tests.test_http import OK, answer_all, read_request, server

MEGABYTE = 1024 * 1024


async def pieces(count: int, size: int = MEGABYTE) -> AsyncIterator[bytes]:
    for number in range(count):
        yield bytes([number % 256]) * size


@pytest.mark.parametrize(
    "answer",
    [
        b"HTTP/1.1 200 OK\r\nX-One: 1\r\nContent-Length: 6\r\n\r\nabcdef",
        b"HTTP/1.1 200 OK\r\nX-One: 1\r\nTransfer-Encoding: chunked\r\n\r\n2\r\nab\r\n4\r\ncdef\r\n0\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nX-One: 1\r\nConnection: close\r\n\r\nabcdef",
        b"HTTP/1.1 103 Early\r\nX-Two: 2\r\n\r\nHTTP/1.1 200 OK\r\nX-One: 1\r\nContent-Length: 6\r\n\r\nabcdef",
    ],
)
async def test_ways_to_answer(answer: bytes) -> None:
    async def script(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, number: int) -> None:
        await read_request(reader)
        for byte in answer:
            writer.write(bytes([byte]))
            await writer.drain()

    async with server(script) as url:
        async with http.stream("GET", url, "/") as found:
            assert (found.status, found.headers[b"x-one"], found.headers.get(b"x-two")) == (200, b"1", None)
            assert b"".join([piece async for piece in found]) == b"abcdef"
            assert [piece async for piece in found] == []
        async with http.stream("GET", url, "/") as found:
            with pytest.raises(TooLarge, match="over 5 bytes"):
                await found.read(5)


async def test_an_answer_that_is_not_read_makes_the_server_wait() -> None:
    writers: list[asyncio.StreamWriter] = []
    done = asyncio.Event()

    async def script(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, number: int) -> None:
        writers.append(writer)
        await read_request(reader)
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % (64 * MEGABYTE))
        async for piece in pieces(64):
            writer.write(piece)
            await writer.drain()
        done.set()

    async with server(script) as url:
        async with http.stream("GET", url, "/") as found:
            reading = aiter(found)
            size = len(await anext(reading))
            await until(lambda: writers[0].transport.get_write_buffer_size() > 0, "the server's having to wait")
            for _ in range(100):
                await asyncio.sleep(0)
            assert not done.is_set()
            assert found._unread < 8 * MEGABYTE
            async for piece in reading:
                size += len(piece)
            assert size == 64 * MEGABYTE
        await until(done.is_set, "the server's end")


@pytest.mark.parametrize("size", [None, 64 * MEGABYTE])
async def test_a_body_is_sent_as_fast_as_the_server_reads(size: int | None) -> None:
    taken = made = gap = 0
    go = asyncio.Event()

    async def body() -> AsyncIterator[bytes]:
        nonlocal made, gap
        async for piece in pieces(64):
            made += len(piece)
            gap = max(gap, made - taken)
            if gap > 16 * MEGABYTE:
                go.set()
            yield piece

    async def script(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, number: int) -> None:
        nonlocal taken
        head = (await reader.readuntil(b"\r\n\r\n")).lower()
        assert (b"transfer-encoding: chunked" in head) is (size is None)
        await go.wait()
        if size is not None:
            while taken < size:
                taken += len(await reader.read(MEGABYTE))
        else:
            while length := int(await reader.readline(), 16):
                await reader.readexactly(length + 2)
                taken += length
            await reader.readline()
        writer.write(OK)

    async with server(script) as url:
        asking = http.stream("PUT", url, "/", body=body(), size=size)
        entering = asyncio.create_task(asking.__aenter__())
        seen = -1
        while seen != made:  # until nothing more is taken from the body
            seen = made
            for _ in range(200):
                await asyncio.sleep(0)
        go.set()
        found = await entering
        assert (found.status, await found.read(10)) == (200, b"ok")
        await asking.__aexit__(None, None, None)
    assert taken == made == 64 * MEGABYTE
    assert gap <= 16 * MEGABYTE


async def test_a_refusal_ends_the_upload() -> None:
    async def script(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, number: int) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 413 Too Large\r\nContent-Length: 3\r\n\r\nbig")
        await writer.drain()
        while await reader.read(65536):
            continue

    async with server(script) as url:
        for body in (pieces(1000), b"x" * 50 * MEGABYTE):
            async with http.stream("POST", url, "/", body=body) as found:
                assert (found.status, await found.read(10)) == (413, b"big")


async def test_a_body_that_fails_is_all_that_is_heard_of_it() -> None:
    failures: list[dict[str, object]] = []
    asyncio.get_running_loop().set_exception_handler(lambda loop, context: failures.append(context))
    gone = asyncio.Event()

    async def script(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, number: int) -> None:
        await reader.read()
        gone.set()

    async def broken() -> AsyncIterator[bytes]:
        yield b"half"
        raise RuntimeError("the sender left")

    async with server(script) as url:
        with pytest.raises(RuntimeError, match="the sender left"):
            async with http.stream("PUT", url, "/", body=broken(), size=8):
                pass
        await gone.wait()
        await asyncio.sleep(0)
        gc.collect()
    assert failures == []


@pytest.mark.parametrize("announced", [1, 5 * MEGABYTE])
async def test_a_body_that_is_not_as_long_as_announced(announced: int) -> None:
    async def script(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, number: int) -> None:
        while await reader.read(65536):
            continue

    async with server(script) as url:
        with pytest.raises(Invalid, match="announced"):
            async with http.stream("POST", url, "/", body=pieces(2), size=announced):
                pass


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (b"", "without an answer"),
        (b"HTTP/1.1 200", "cut in the middle"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\nab", "cut in the middle"),
        (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n2\r\nab\r\n", "cut in the middle"),
        (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n2\r\nab\r\nzz\r\n", "not HTTP"),
        (b"not http at all\r\n\r\n", "not HTTP"),
    ],
)
async def test_an_answer_that_breaks_off(answer: bytes, words: str) -> None:
    async def script(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, number: int) -> None:
        await read_request(reader)
        writer.write(answer)

    async with server(script) as url:
        with pytest.raises(NetworkError, match=words):
            async with http.stream("GET", url, "/") as found:
                await found.read(100)


@pytest.mark.parametrize("answer", [b"", b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\nab"])
async def test_silence_has_an_end(answer: bytes) -> None:
    async def script(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, number: int) -> None:
        await read_request(reader)
        writer.write(answer)
        await reader.read(1)

    async with server(script) as url:
        with pytest.raises(NetworkError, match="was silent for 0.2 s"):
            async with http.stream("GET", url, "/", patience=0.2) as found:
                await found.read(100)


async def test_a_server_that_takes_nothing_is_given_up() -> None:
    async def script(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, number: int) -> None:
        await asyncio.Event().wait()

    async with server(script) as url:
        with pytest.raises(NetworkError, match="was silent for 0.2 s"):
            async with http.stream("POST", url, "/", body=pieces(64), patience=0.2):
                pass


@pytest.mark.parametrize("how", ["leave", "raise", "cancel"])
async def test_leaving_ends_the_connection(how: str) -> None:
    reading, ended = asyncio.Event(), asyncio.Event()

    async def script(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, number: int) -> None:
        await read_request(reader)
        writer.write(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n2\r\nab\r\n")
        try:
            await reader.read(1)
        finally:
            ended.set()

    async def use(url: str) -> None:
        async with http.stream("GET", url, "/") as found:
            assert await anext(aiter(found)) == b"ab"
            reading.set()
            if how == "raise":
                raise KeyError
            if how == "cancel":
                await found.read(100)

    async with server(script) as url:
        task = asyncio.create_task(use(url))
        if how == "cancel":
            await until(reading.is_set, "the first piece")
            task.cancel()
        await asyncio.wait((task,), timeout=30)
        assert task.done()
        await until(ended.is_set, "the end of the connection")
        if how == "raise":
            assert isinstance(task.exception(), KeyError)


async def test_a_bound_on_the_whole_answer() -> None:
    async with server(answer_all) as url:
        assert (await http.request("GET", url, "/", most=1)).body == b"1"
        with pytest.raises(TooLarge, match="over 0 bytes"):
            await http.request("GET", url, "/", most=0)
        assert (await http.request("GET", url, "/", most=1)).body == b"2"


async def test_a_server_that_restarts_is_waited_for(tmp_path: Path) -> None:
    async def script(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, number: int) -> None:
        await read_request(reader)
        writer.write(OK)

    path = tmp_path / "s"
    asking = asyncio.create_task(http.request("GET", f"unix:{path}", "/", retries=100, reconnecting=30))
    for _ in range(20):
        await asyncio.sleep(0.02)
    assert not asking.done()
    async with server(script, path):
        assert (await asking).body == b"ok"
    with pytest.raises(http.NotSent):
        await http.request("GET", f"unix:{tmp_path / 'never'}", "/", retries=2, reconnecting=30)


async def test_a_server_that_ends_first_and_takes_the_rest() -> None:
    ends, taken = asyncio.Event(), asyncio.Event()

    async def script(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, number: int) -> None:
        await read_request(reader)
        writer.write(b"HTTP/1.1 101 Switching Protocols\r\nConnection: Upgrade\r\nUpgrade: bytes\r\n\r\n")
        await ends.wait()
        writer.write_eof()
        while await reader.read(MEGABYTE):
            pass
        taken.set()

    async with server(script) as url, http.upgrade(url, "/", "bytes") as both:
        sending = asyncio.create_task(both.send(bytes(16 * MEGABYTE)))
        await until(lambda: both._drained is not None, "a server that takes no more")
        ends.set()
        assert [piece async for piece in both] == []
        await sending
        await taken.wait()
        assert both._is_lost  # and the end of the block ends what is no more
