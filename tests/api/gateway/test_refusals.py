"""Clients that stall, drip or lie about their requests: each is told so, and none keeps what it holds."""

from __future__ import annotations

import asyncio
import contextlib

import pytest

from aenv.api.gateway import connection as limits
from aenv.api.gateway import gateway as looks
from tests.api.gateway.support import OWNER, OWNER_TOKEN, Count, Known, asked, client, head, place, serving, upstream
from tests.support import until

ONE = "/env-instance/one"


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Look often, and do not wait long for anybody."""
    monkeypatch.setattr(looks, "EVERY", 0.05)
    monkeypatch.setattr(limits, "LINGER", 0.3)


async def _never(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    await head(reader)
    await reader.read()  # ends when the gateway hangs up


async def _no_one(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    raise AssertionError("this must not come so far")


@pytest.mark.parametrize(
    "request_",
    [
        b"POST {} HTTP/1.1\r\nHost: localhost\r\n{}Content-Length: 3\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
        b"POST {} HTTP/1.1\r\nHost: localhost\r\n{}Content-Length: 3\r\nContent-Length: 3\r\n\r\nabc",
        b"POST {} HTTP/1.1\r\nHost: localhost\r\n{}Content-Length: 3, 3\r\n\r\nabc",
        b"POST {} HTTP/1.1\r\nHost: localhost\r\n{}Content-Length: -3\r\n\r\nabc",
        b"POST {} HTTP/1.1\r\nHost: localhost\r\n{}Content-Length : 3\r\n\r\nabc",
        b"POST {} HTTP/1.1\r\nHost: localhost\r\n{}Transfer-Encoding: gzip, chunked\r\n\r\n0\r\n\r\n",
        b"POST {} HTTP/1.1\r\nHost: localhost\r\n{}Transfer-Encoding: chunked\r\nTransfer-Encoding: x\r\n\r\n0\r\n\r\n",
        b"POST {} HTTP/1.1\r\nHost: localhost\r\n{}Transfer-Encoding: xchunked\r\n\r\n0\r\n\r\n",
        b"POST {} HTTP/1.0\r\nHost: localhost\r\n{}Transfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
        b"GET {} HTTP/1.1\r\nHost: localhost\r\n{}X: a\n Y: b\r\n\r\n",
        b"GET {} HTTP/1.1\nHost: localhost\n{}\n",
        b"GET {} HTTP/1.1\r\nHost: localhost\r\n{}X: a\r\n folded\r\n\r\n",
        b"GET {} HTTP/1.1\r\nHost: localhost\r\n{}X: a\0b\r\n\r\n",
        b"GET {} HTTP/1.1\r\nHost: localhost\r\nHost: localhost\r\n{}\r\n",
        b"GET {} HTTP/1.1\r\nHost: localhost\r\n{}{}\r\n",
        b"GET {} HTTP/2.0\r\nHost: localhost\r\n{}\r\n",
        b"GET http://localhost{} HTTP/1.1\r\nHost: localhost\r\n{}\r\n",
        b"CONNECT localhost:80 HTTP/1.1\r\nHost: localhost\r\n{}\r\n",
        b"GET {}/../two/mcp HTTP/1.1\r\nHost: localhost\r\n{}\r\n",
        b"GET {}/%2e%2E/two/mcp HTTP/1.1\r\nHost: localhost\r\n{}\r\n",
        b"GET {}/..%2ftwo/mcp HTTP/1.1\r\nHost: localhost\r\n{}\r\n",
        b"GET {}/..\\two/mcp HTTP/1.1\r\nHost: localhost\r\n{}\r\n",
        b"GET /env-instance/../one/mcp HTTP/1.1\r\nHost: localhost\r\n{}\r\n",
        b"GET /env-instance/on%65/mcp HTTP/1.1\r\nHost: localhost\r\n{}\r\n",
        b"GET /env-instance//mcp HTTP/1.1\r\nHost: localhost\r\n{}\r\n",
        b"GET {} HTTP/1.1\r\nHost: localhost\r\n{}AEnvCore-EnvInstance-ID: two\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: localhost\r\n{}AEnvCore-EnvInstance-ID: one\r\nAEnvCore-EnvInstance-ID: one\r\n\r\n",
        b"GET /mcp HTTP/1.1\r\nHost: localhost\r\n{}AEnvCore-EnvInstance-ID: a/b\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
    ],
)
async def test_what_could_mean_two_things_is_refused(request_: bytes) -> None:
    line, *rest = request_.split(b"\r\n", 1)
    text = line.replace(b"{}", ONE.encode() + b"/mcp" if b"{} " in line else ONE.encode())
    text = b"\r\n".join([text, *(x.replace(b"{}", OWNER.encode()) for x in rest)])
    if b"HTTP/1.1\n" in line:
        text = text.replace(b"\n{}", b"\n" + OWNER.encode())
    async with upstream(_no_one) as url, serving(Known(place(url))) as gateway, client(gateway) as one:
        one.send(text + b"\r\n\r\n")
        reply = await one.reply()
        assert (reply.status, reply.json["code"]) == (400, "invalid")
        assert OWNER_TOKEN not in reply.body.decode()


@pytest.mark.parametrize("path", ["/", f"/{'x' * 70_000}"], ids=["headers", "path"])
async def test_a_head_without_end_is_refused(path: str) -> None:
    async with serving(Known()) as gateway, client(gateway) as one:
        one.send(f"GET {path} HTTP/1.1\r\nHost: localhost\r\n")
        for _ in range(50):
            one.send("X-More: " + "y" * 5000 + "\r\n")
        assert (await one.reply()).status == 431


POST = f"POST {ONE}/x HTTP/1.1\r\nHost: localhost\r\n{OWNER}Transfer-Encoding: chunked\r\n\r\n"


@pytest.mark.parametrize(
    "begin",
    ["", "GET /", "GET / HTTP/1.1\r\nX", "GET / HTTP/1.1\r\nX: ", f"{POST}0\r\nX: ", f"{POST}3\r\nabc\r\n1;x="],
    ids=["method", "path", "name", "value", "trailer", "chunk"],
)
async def test_a_line_without_end_is_refused(begin: str) -> None:
    """It is not kept until its end comes."""
    async with upstream(_never) as url, serving(Known(place(url))) as gateway, client(gateway) as one:
        one.send(begin)
        for _ in range(100):
            one.send("y" * 5000)
        assert (await one.reply()).status == (431 if begin else 400)


async def test_a_head_that_names_much_takes_no_longer() -> None:
    """Each of these names many headers to be left out; together they took a minute, for everybody."""
    named = ",".join(f"{number:x}" for number in range(5000))
    many = f"GET /health HTTP/1.1\r\nHost: localhost\r\nConnection: {named}\r\n" + "b:\r\n" * 7000 + "\r\n"
    async with serving(Known()) as gateway, client(gateway) as one:
        for _ in range(20):
            one.send(many)
            assert (await one.reply()).status == 200


async def test_trailers_without_end_are_refused() -> None:
    async with upstream(_never) as url, serving(Known(place(url))) as gateway, client(gateway) as one:
        one.send(f"POST {ONE}/x HTTP/1.1\r\nHost: localhost\r\n{OWNER}Transfer-Encoding: chunked\r\n\r\n0\r\n")
        for _ in range(50):
            one.send("X-More: " + "y" * 5000 + "\r\n")
        assert (await one.reply()).status == 431


async def test_a_body_that_goes_wrong_is_the_end_of_its_request() -> None:
    count = Count()
    async with upstream(count.on(_never)) as url, serving(Known(place(url))) as gateway, client(gateway) as one:
        one.send(f"POST {ONE}/x HTTP/1.1\r\nHost: localhost\r\n{OWNER}Transfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n")
        await until(lambda: count.made == 1, "the call")
        one.send("zz\r\n")
        assert (await one.reply()).status == 400
        await until(lambda: count.ended == 1, "the end of the call")


@pytest.mark.parametrize(
    ("limit", "sent", "status"),
    [
        ("SLOW_HEAD", f"GET {ONE}/x HTTP/1.1\r\nHost: local", 408),
        ("SLOW_BODY", f"POST {ONE}/x HTTP/1.1\r\nHost: localhost\r\n{OWNER}Content-Length: 9\r\n\r\nabc", 408),
        ("IDLE", "", None),
    ],
    ids=["head", "body", "all"],
)
async def test_a_client_that_is_silent_for_too_long_is_ended(
    limit: str, sent: str, status: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, limit, 0.1)
    async with upstream(_never) as url, serving(Known(place(url))) as gateway, client(gateway) as one:
        one.send(sent)
        if status is not None:
            assert (await one.reply()).status == status
        await one.ended()
        await until(lambda: not gateway._open, "the end of the connection")


async def test_a_client_that_drips_its_head_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "SLOW_HEAD", 0.3)
    async with serving(Known()) as gateway, client(gateway) as one:
        one.send("GET / HTTP/1.1\r\n")
        drips = 0
        with contextlib.suppress(ConnectionError):
            while gateway._open and drips < 3000:
                one.send("X: y\r\n")
                drips += 1
                await asyncio.sleep(0.01)
        assert drips < 3000


async def test_too_many_connections_are_turned_away() -> None:
    async with serving(Known(), most_connections=2) as gateway, client(gateway) as one, client(gateway) as two:
        for each in (one, two):
            each.get("/health")
            assert (await each.reply()).status == 200
        async with client(gateway) as three:
            three.get("/health")
            reply = await three.reply()
            assert (reply.status, reply.headers["retry-after"]) == (503, "1")
        one.vanish()
        await until(lambda: len(gateway._open) < 2, "room")
        assert (await asked(gateway, "/health")).status == 200
