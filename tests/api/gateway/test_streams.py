"""Bytes on their way: passed on as they come, in both directions, and framed anew."""

from __future__ import annotations

import asyncio
import hashlib

import pytest

from aenv.api.gateway import connection as limits
from aenv.api.gateway import gateway as looks
from tests.api.gateway.support import OWNER, Count, Known, asked, chunks, client, head, ok, place, serving, upstream
from tests.support import until

MB = 1024 * 1024
ONE = "/env-instance/one"


async def test_a_request_passes_as_it_was_written() -> None:
    seen = []

    async def handler(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while True:
            request = await head(reader)
            body = await reader.readexactly(int(request.headers.get("content-length", 0)))
            seen.append((request, body))
            writer.write(
                ok(b"fine", "X-Answer: 1\r\nConnection: keep-alive, X-Secret\r\nX-Secret: 1\r\nKeep-Alive: 5\r\n")
            )

    async with upstream(handler) as url, serving(Known(place(url))) as gateway, client(gateway) as one:
        one.post(
            f"{ONE}/tools/add?x=%20y",
            b"body",
            f"{OWNER}X-Mine: a b\r\nX-Hop: 1\r\nConnection: keep-alive, X-Hop\r\nTE: trailers\r\nOrigin: http://localhost\r\n"
            "Proxy-Authorization: Basic eDp5\r\nAEnvCore-MCPProxy-URL: http://10.0.0.1:1/\r\n",
        )
        reply = await one.reply()
        assert (reply.status, reply.body, reply.headers["x-answer"]) == (200, b"fine", "1")
        assert not {"keep-alive", "x-secret", "connection"} & set(reply.headers)
        request, body = seen[0]
        assert (request.line, body) == ("POST /tools/add?x=%20y HTTP/1.1", b"body")
        assert request.headers == {
            "host": "localhost",
            "x-request-id": reply.headers["x-request-id"],
            "x-mine": "a b",
            "content-length": "4",
            "authorization": OWNER.split(": ", 1)[1].strip(),
        }
        one.get("/mcp", f"{OWNER}AEnvCore-EnvInstance-ID: one\r\n")
        assert (await one.reply()).status == 200
        assert seen[1][0].line == "GET /mcp HTTP/1.1"


async def test_what_has_come_goes_on_at_once_in_both_directions() -> None:
    async def handler(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Answers each chunk before it takes the next."""
        assert (await head(reader)).headers["transfer-encoding"] == "chunked"
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n")
        while size := int(await reader.readuntil(b"\r\n"), 16):
            data = (await reader.readexactly(size + 2))[:-2]
            writer.write(b"%x\r\n%b\r\n" % (size, data.upper()))
        assert await reader.readexactly(2) == b"\r\n"
        writer.write(b"0\r\nX-Trailer: 1\r\n\r\n")

    async with upstream(handler) as url, serving(Known(place(url))) as gateway, client(gateway) as one:
        one.send(f"POST {ONE}/mcp HTTP/1.1\r\nHost: localhost\r\n{OWNER}Transfer-Encoding: chunked\r\n\r\n")
        found = await one.head()
        assert found.headers["content-type"] == "text/event-stream"
        assert found.headers["connection"] == "close"  # the request was not over yet
        for word in (b"one", b"two", b"three"):
            one.send(b"%x;extension=1\r\n%b\r\n" % (len(word), word))
            assert await one.chunk() == word.upper()
        one.send(b"0\r\nX-Trailer: 1\r\n\r\n")
        assert await one.chunk() == b""
        await one.ended()


@pytest.mark.parametrize("method", ["GET", "HEAD"])
@pytest.mark.parametrize(
    ("answer", "status", "body"),
    [
        (b"HTTP/1.1 204 No Content\r\n\r\n", 204, b""),
        (b"HTTP/1.1 304 Not Modified\r\nContent-Length: 10\r\nETag: x\r\n\r\n", 304, b""),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n", 200, b""),
        (b"HTTP/1.1 404 Not Here\r\nContent-Length: 2\r\n\r\nno", 404, b"no"),
        (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n2\r\nab\r\n1\r\nc\r\n0\r\n\r\n", 200, b"abc"),
        (b"HTTP/1.1 103 Early Hints\r\nLink: x\r\n\r\nHTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nab", 200, b"ab"),
    ],
)
async def test_answers_end_where_they_should(method: str, answer: bytes, status: int, body: bytes) -> None:
    async def handler(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while True:
            first = (await head(reader)).line.split()[0]
            bare = answer[: answer.index(b"\r\n\r\n", answer.rindex(b"HTTP/1.1 ")) + 4]
            writer.write(bare if first == "HEAD" else answer)

    count = Count()
    async with upstream(count.on(handler)) as url, serving(Known(place(url))) as gateway, client(gateway) as one:
        for _ in range(3):
            one.get(f"{ONE}/x", method=method)
            found = await one.head()
            if found.status == 103:
                assert found.headers == {"link": "x"}
                found = await one.head()
            assert found.status == status
            if method == "GET" and status not in (204, 304):
                if "content-length" in found.headers:
                    assert await one.exactly(int(found.headers["content-length"])) == body
                else:
                    got = b""
                    while chunk := await one.chunk():
                        got += chunk
                    assert got == body
        assert count.made == 1  # kept, and used again


async def test_an_answer_without_length_ends_with_its_connection() -> None:
    async def handler(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await head(reader)
        writer.write(b"HTTP/1.0 200 OK\r\n\r\nall of it")

    async with upstream(handler) as url, serving(Known(place(url))) as gateway:
        reply = await asked(gateway, f"{ONE}/x")
        assert (reply.body, reply.headers["transfer-encoding"]) == (b"all of it", "chunked")
        async with client(gateway) as old:
            old.send(f"GET {ONE}/x HTTP/1.0\r\nHost: localhost\r\n{OWNER}\r\n")
            reply = await old.reply()
            assert (reply.body, reply.headers.keys()) == (b"all of it", {"connection", "x-request-id"})
            assert reply.headers["connection"] == "close"


async def test_a_client_hears_whether_its_body_is_wanted() -> None:
    async def handler(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        request = await head(reader)
        assert request.headers["expect"] == "100-continue"
        if "/large" in request.line:
            writer.write(b"HTTP/1.1 413 Too Large\r\nContent-Length: 3\r\n\r\nno!")
            return
        writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        writer.write(ok(await reader.readexactly(4)))

    async with upstream(handler) as url, serving(Known(place(url))) as gateway:
        async with client(gateway) as one:
            one.put(f"{ONE}/x", "Expect: 100-continue\r\nContent-Length: 4\r\n")
            assert (await one.head()).status == 100
            one.send(b"data")
            assert (await one.reply()).body == b"data"
        async with client(gateway) as one:
            one.put(f"{ONE}/large", "Expect: 100-continue\r\nContent-Length: 4\r\n")
            reply = await one.reply()
            assert (reply.status, reply.body, reply.headers["connection"]) == (413, b"no!", "close")


async def test_an_early_answer_reaches_a_client_that_is_still_sending() -> None:
    async def handler(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await head(reader)
        writer.write(b"HTTP/1.1 413 Too Large\r\nContent-Length: 3\r\n\r\nno!")

    async with upstream(handler) as url, serving(Known(place(url))) as gateway, client(gateway) as one:
        one.put(f"{ONE}/x", f"Content-Length: {64 * MB}\r\n")
        one.send(b"x" * MB)
        assert (await one.reply()).status == 413
        one.send(b"x" * MB)
        await one.ended()


async def test_pipelined_requests_are_answered_in_order() -> None:
    async def handler(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while True:
            request = await head(reader)
            body = await reader.readexactly(int(request.headers.get("content-length", 0)))
            if request.line.startswith("GET /slow"):
                await asyncio.sleep(0.05)
            writer.write(ok(request.line.split()[1].encode() + body))

    async with upstream(handler) as url, serving(Known(place(url))) as gateway, client(gateway) as one:
        for turn in range(50):
            one.get(f"{ONE}/{'slow' if turn == 0 else 'get'}{turn}")
            one.post(f"{ONE}/post{turn}", b"!" * turn)
            one.get("/nowhere")
        one.send(b"nonsense\r\n\r\n")
        for turn in range(50):
            assert (await one.reply()).body == f"/{'slow' if turn == 0 else 'get'}{turn}".encode()
            assert (await one.reply()).body == f"/post{turn}".encode() + b"!" * turn
            assert (await one.reply()).status == 404
        last = await one.reply()
        assert (last.status, last.headers["connection"]) == (400, "close")
        await one.ended()


@pytest.mark.parametrize("piece", [1, 7, 64])
async def test_it_makes_no_difference_in_which_pieces_bytes_come(piece: int) -> None:
    async def trickle(writer: asyncio.StreamWriter, data: bytes) -> None:
        for start in range(0, len(data), piece):
            writer.write(data[start : start + piece])
            await asyncio.sleep(0)

    async def handler(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while True:
            request = await head(reader)
            body = await chunks(reader)
            await trickle(writer, b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n")
            await trickle(writer, b"%x\r\n%b\r\n0\r\nX-T: 1\r\n\r\n" % (len(body), body.upper()))
            assert request.headers["x-last"] == "1"

    chunked = f"{OWNER}Transfer-Encoding: chunked\r\nX-Last: 1\r\n"
    h2c = f"{chunked}Connection: Upgrade\r\nUpgrade: h2c\r\n"
    async with upstream(handler) as url, serving(Known(place(url))) as gateway, client(gateway) as one:
        for headers in (chunked, h2c, chunked):
            sent = f"POST {ONE}/x HTTP/1.1\r\nHost: localhost\r\n{headers}\r\n3\r\nabc\r\n4\r\ndefg\r\n0\r\n\r\n"
            await trickle(one.writer, sent.encode())
            found = await one.head()
            if found.status == 100:
                found = await one.head()
            assert found.status == 200
            body = b""
            while chunk := await one.chunk():
                body += chunk
            assert body == b"ABCDEFG"
            assert "connection" not in found.headers


async def test_bodies_far_larger_than_memory_would_hold_pass() -> None:
    size = 32 * MB

    async def handler(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        request = await head(reader)
        if request.line.startswith("GET"):
            writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % size)
            for _ in range(size // MB):
                writer.write(b"d" * MB)
                await writer.drain()
            return
        left, found = size, hashlib.sha256()
        while left:
            part = await reader.read(65536)
            found.update(part)
            left -= len(part)
        writer.write(ok(found.hexdigest().encode()))

    async with upstream(handler) as url, serving(Known(place(url))) as gateway:
        async with client(gateway) as one:
            one.get(f"{ONE}/files")
            found = await one.head()
            assert int(found.headers["content-length"]) == size
            left = size
            while left:
                left -= len(await one.exactly(min(left, MB)))
        async with client(gateway) as one:
            one.put(f"{ONE}/files", f"Content-Length: {size}\r\n")
            for _ in range(size // MB):
                one.send(b"u" * MB)
                await one.writer.drain()
            assert (await one.reply()).body == hashlib.sha256(b"u" * size).hexdigest().encode()


async def test_a_client_that_stops_reading_stops_the_sandbox_and_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    sent = 0
    count = Count()

    async def handler(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal sent
        await head(reader)
        writer.write(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n")
        while True:
            writer.write(b"10000\r\n%b\r\n" % (b"x" * 65536))
            sent += 65536
            await writer.drain()

    monkeypatch.setattr(looks, "EVERY", 0.05)
    async with upstream(count.on(handler)) as url, serving(Known(place(url))) as gateway, client(gateway) as one:
        one.get(f"{ONE}/mcp")
        await one.head()
        one.writer.transport.pause_reading()
        (held,) = gateway._open
        await until(lambda: held.stalled, "a stall")
        monkeypatch.setattr(limits, "STALLED", 0.2)
        await until(lambda: count.ended == 1, "the end of the call")
        assert sent < 64 * MB
        assert not gateway._open


async def test_a_sandbox_that_stops_reading_stops_the_client() -> None:
    reads = asyncio.Event()

    async def handler(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await head(reader)
        await reads.wait()
        left = 64 * MB
        while left:
            left -= len(await reader.read(MB))
        writer.write(ok())

    async with upstream(handler) as url, serving(Known(place(url))) as gateway, client(gateway) as one:
        one.put(f"{ONE}/files", f"Content-Length: {64 * MB}\r\n")
        sent = 0

        async def send() -> None:
            nonlocal sent
            for _ in range(64):
                one.send(b"x" * MB)
                await one.writer.drain()
                sent += 1

        sending = asyncio.create_task(send())
        await until(lambda: any(held._paused for held in gateway._open), "a pause")
        reads.set()
        await sending
        assert (await one.reply()).status == 200


async def test_a_websocket_passes() -> None:
    async def handler(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        request = await head(reader)
        assert (request.headers["connection"], request.headers["upgrade"]) == ("Upgrade", "websocket")
        assert request.headers["sec-websocket-key"] == "abc"
        if request.line.startswith("GET /no"):
            writer.write(b"HTTP/1.1 403 Forbidden\r\nContent-Length: 2\r\n\r\nno")
            return
        writer.write(
            b"HTTP/1.1 101 Switching Protocols\r\nConnection: Upgrade\r\nUpgrade: websocket\r\nX-Y: z\r\n\r\nhello"
        )
        while data := await reader.read(65536):
            writer.write(data.upper())
            await writer.drain()
        writer.write(b"bye")

    upgrade = f"{OWNER}Connection: keep-alive, Upgrade\r\nUpgrade: websocket\r\nSec-WebSocket-Key: abc\r\n"
    directory = Known()
    async with upstream(handler) as url:
        directory.running["one"] = place(url)
        async with serving(directory) as gateway:
            async with client(gateway) as one:
                one.get(f"{ONE}/ws", upgrade)
                one.send(b"early")
                found = await one.head()
                assert (found.status, found.headers["x-y"], found.headers["upgrade"]) == (101, "z", "websocket")
                assert await one.exactly(10) == b"helloEARLY"
                one.send(b"GET / HTTP/1.1\r\n\r\n")
                assert await one.exactly(18) == b"GET / HTTP/1.1\r\n\r\n"
                one.send(b"x" * MB)
                assert await one.exactly(MB) == b"X" * MB
                one.writer.write_eof()
                assert await one.rest() == b"bye"
            async with client(gateway) as one:
                one.get(f"{ONE}/no", upgrade)
                assert (await one.reply()).body == b"no"
                await one.ended()
            await until(lambda: not gateway._open, "the end of all connections")
    assert len(directory.used) > 4


async def test_an_upgrade_that_is_not_passed_on_is_a_plain_request() -> None:
    async def handler(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while True:
            request = await head(reader)
            assert not {"upgrade", "connection", "http2-settings"} & set(request.headers)
            if "transfer-encoding" in request.headers:
                body = await chunks(reader)
            else:
                body = await reader.readexactly(int(request.headers.get("content-length", 0)))
            writer.write(ok(body))

    h2c = f"{OWNER}Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAA\r\n"
    smuggled = b"GET /env-instance/two/x HTTP/1.1\r\nHost: localhost\r\n\r\n"
    async with upstream(handler) as url, serving(Known(place(url))) as gateway, client(gateway) as one:
        one.send(f"GET {ONE}/x HTTP/1.1\r\nHost: localhost\r\n{h2c}\r\n" * 600)
        for _ in range(600):
            assert (await one.reply()).body == b""
        one.post(f"{ONE}/x", smuggled, h2c)
        one.send(f"POST {ONE}/x HTTP/1.1\r\nHost: localhost\r\n{h2c}Transfer-Encoding: chunked\r\n\r\n")
        one.send(b"%x\r\n%b\r\n0\r\n\r\n" % (len(smuggled), smuggled))
        one.get(f"{ONE}/x")
        assert (await one.reply()).body == smuggled
        assert (await one.reply()).body == smuggled
        assert (await one.reply()).body == b""
