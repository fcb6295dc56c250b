"""Ports inside a sandbox, by a name of their own: through a real runtime, to servers of every kind."""

from __future__ import annotations

import asyncio
import contextlib
import json
import shutil
import socket
import tempfile
import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from aenv.api.gateway import Gateway, Place
from aenv.engines.process.engine import ProcessEngine
from aenv.engines.specs import complete
from aenv.errors import SandboxLost
from aenv.models import EnvRef, SandboxSpec
from aenv.project import read
from tests.api.gateway.support import (
    AGENT_TOKEN,
    OWNER,
    OWNER_TOKEN,
    Client,
    Count,
    Known,
    asked,
    client,
    head,
    inside,
    ok,
    serving,
)
from tests.engines.process.lab import isolation_or_skip
from tests.support import FIXTURES, Sandbox, sandbox, until

MB = 1024 * 1024


def host(gateway: Gateway, port: int, *, seconds: float = 1000, id: str = "one") -> str:
    return gateway.exposed_url(id, port, time.time() + seconds).split("/")[2]


async def _echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Answers with the head it got, and the size of the body."""
    while True:
        request = await head(reader)
        body = await reader.readexactly(int(request.headers.get("content-length", 0)))
        writer.write(ok(json.dumps([request.line, request.headers, len(body)]).encode(), "Set-Cookie: a=b\r\n"))


async def test_a_server_in_the_sandbox_is_served_under_its_own_name(directory: Known) -> None:
    count = Count()
    async with inside(count.on(_echo)) as port, serving(directory) as gateway, client(gateway) as one:
        name = host(gateway, port)
        headers = "Cookie: c=d\r\nAuthorization: Basic eDp5\r\nOrigin: http://elsewhere\r\nSec-Fetch-Site: none\r\n"
        for _ in range(3):
            one.get("/env-instance/x/../a?b=%2e", headers, host=name)
            reply = await one.reply()
            line, seen, _ = reply.json
            assert line == "GET /env-instance/x/../a?b=%2e HTTP/1.1"
            assert (seen["host"], seen["cookie"], seen["authorization"]) == (name, "c=d", "Basic eDp5")
            assert seen["origin"] == "http://elsewhere"
            assert (reply.headers["set-cookie"], reply.headers["referrer-policy"]) == ("a=b", "same-origin")
        one.send(f"POST /up HTTP/1.1\r\nHost: {name}\r\nContent-Length: {4 * MB}\r\n\r\n", b"x" * 4 * MB)
        assert (await one.reply()).json[2] == 4 * MB
        assert count.made == 1
    assert set(directory.used) == {"one"}


async def test_our_tokens_never_go_in(directory: Known) -> None:
    async with inside(_echo) as port, serving(directory) as gateway:
        for token, passes in (
            (OWNER_TOKEN, False),
            (AGENT_TOKEN, False),
            ("anna", False),
            ("bert", False),
            ("the app's own", True),
        ):
            headers = f"Authorization: Bearer {token}\r\nAEnvCore-EnvInstance-ID: one\r\n"
            _, seen, _ = (await asked(gateway, "/", headers, host=host(gateway, port))).json
            assert ("authorization" in seen) is passes
            assert "aenvcore-envinstance-id" not in seen


async def test_a_websocket_in_the_sandbox(directory: Known) -> None:
    async def handler(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        assert (await head(reader)).headers["upgrade"] == "websocket"
        writer.write(b"HTTP/1.1 101 Switching Protocols\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n\r\n")
        while data := await reader.read(65536):
            writer.write(data.upper())
            await writer.drain()

    upgrade = "Connection: Upgrade\r\nUpgrade: websocket\r\n"
    count = Count()
    async with inside(count.on(handler)) as port, serving(directory) as gateway, client(gateway) as one:
        one.get("/", upgrade, host=host(gateway, port))
        assert (await one.head()).status == 101
        for _ in range(4):
            one.send(b"x" * MB)
            assert await one.exactly(MB) == b"X" * MB
        one.vanish()
        await until(lambda: count.ended == 1, "the end of the connection inside")


async def test_addresses_that_lead_nowhere(directory: Known) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        unused = free.getsockname()[1]
        async with serving(directory) as gateway:
            for name, status, told in (
                (host(gateway, unused), 502, f"port {unused}"),
                (host(gateway, 80, seconds=-1), 410, "over"),
                (host(gateway, 80, id="two"), 404, "gone"),
                ("x.one.localhost", 403, "not one"),
                (host(gateway, 80).replace("80-", "81-", 1), 403, "not one"),
            ):
                reply = await asked(gateway, "/", "", host=name)
                assert reply.status == status
                assert told in reply.body.decode()
                assert reply.headers["content-type"].startswith("text/plain")
            directory.fails("one", SandboxLost("it ended"))
            assert (await asked(gateway, "/", "", host=host(gateway, 80))).body == b"it ended\n"


async def test_a_client_that_stops_reading_stops_the_server_inside(directory: Known) -> None:
    sent = 0

    async def handler(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal sent
        await head(reader)
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 1000000000000\r\n\r\n")
        while True:
            writer.write(b"x" * 65536)
            await writer.drain()
            sent += 65536

    count = Count()
    async with inside(count.on(handler)) as port, serving(directory) as gateway, client(gateway) as one:
        one.get("/", "", host=host(gateway, port))
        await one.head()
        one.writer.transport.pause_reading()
        (held,) = gateway._open
        await until(lambda: held.stalled, "a stall")
        one.vanish()
        await until(lambda: count.ended == 1, "the end of the connection inside")
        assert sent < 64 * MB


# The runtime's side of it


@contextlib.asynccontextmanager
async def straight(lab: Sandbox) -> AsyncIterator[Client]:
    reader, writer = await asyncio.open_connection("127.0.0.1", lab.port)
    try:
        yield Client(reader, writer)
    finally:
        writer.close()


UPGRADE = "Connection: Upgrade\r\nUpgrade: tcp\r\n"


async def test_only_the_owner_gets_to_a_port(lab: Sandbox) -> None:
    async with inside(_echo) as port:
        for headers, path, status in (
            (f"{UPGRADE}", f"/ports/{port}", 401),
            (f"Authorization: Bearer {AGENT_TOKEN}\r\n{UPGRADE}", f"/ports/{port}", 403),
            (OWNER, f"/ports/{port}", 426),
            (f"{OWNER}Upgrade: tcp\r\n", f"/ports/{port}", 426),
            (f"{OWNER}Connection: Upgrade\r\nUpgrade: websocket\r\n", f"/ports/{port}", 426),
            (f"{OWNER}{UPGRADE}", "/ports/0", 422),
            (f"{OWNER}{UPGRADE}", "/ports/65536", 422),
            (f"{OWNER}{UPGRADE}", "/ports/x", 422),
            (f"{OWNER}{UPGRADE}", "/ports/" + "9" * 5000, 422),
        ):
            async with straight(lab) as one:
                one.get(path, headers, "POST")
                assert (await one.reply()).status == status, (headers, path)


async def test_a_port_is_a_raw_connection_both_ways(lab: Sandbox) -> None:
    async def handler(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"hello")
        while data := await reader.read(65536):
            writer.write(data)
            await writer.drain()
        writer.write(b"bye")

    async with inside(handler) as port, straight(lab) as one:
        one.get(f"/ports/{port}", OWNER + UPGRADE, "POST")
        one.send(b"early")
        assert (await one.head()).status == 101
        assert await one.exactly(10) == b"helloearly"

        async def send() -> None:
            for _ in range(8):
                one.send(b"\0" * MB)
                await one.writer.drain()
            one.writer.write_eof()

        sending = asyncio.create_task(send())
        assert len(await one.exactly(8 * MB)) == 8 * MB
        assert await one.rest() == b"bye"
        await sending


async def test_a_server_that_only_speaks_is_heard(lab: Sandbox) -> None:
    async def handler(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"hello and good bye")

    async with inside(handler) as port:
        for _ in range(20):
            async with straight(lab) as one:
                one.get(f"/ports/{port}", OWNER + UPGRADE, "POST")
                assert (await one.head()).status == 101
                assert await one.rest() == b"hello and good bye"


async def test_through_the_gateway_an_owner_gets_a_raw_connection_too(directory: Known) -> None:
    async with inside(_echo) as port, serving(directory) as gateway, client(gateway) as one:
        one.get(f"/env-instance/one/ports/{port}", f"Authorization: Bearer anna\r\n{UPGRADE}", "POST")
        assert (await one.head()).status == 101
        one.get("/x", "", host="inside")
        assert (await one.reply()).json[0] == "GET /x HTTP/1.1"


async def test_a_sandbox_that_ends_ends_its_tunnels() -> None:
    async def handler(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read()

    count = Count()
    with sandbox(FIXTURES / "lab") as running:
        async with inside(count.on(handler)) as port, straight(running) as one:
            one.get(f"/ports/{port}", UPGRADE, "POST")
            assert (await one.head()).status == 101
            ending = asyncio.create_task(asyncio.to_thread(running.stop))
            await one.ended()
            assert await ending == 0
            await until(lambda: count.ended == 1, "the end of the connection inside")


PROJECT = '''
import http.server
import threading

from aenv import register_tool


class Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_GET(self):
        self.send_response(200)
        self.send_header("Content-Length", "12")
        self.end_headers()
        self.wfile.write(b"from within\\n")


@register_tool
def serve() -> int:
    """Serve, on loopback only."""
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    return server.server_address[1]
'''


async def test_a_sandbox_without_network_is_reached(monkeypatch: pytest.MonkeyPatch) -> None:
    isolation_or_skip("auto")
    home = Path(tempfile.mkdtemp(prefix="gwx-", dir="/tmp"))
    home.chmod(0o755)
    monkeypatch.setenv("AENV_HOME", str(home))
    project = home / "project"
    (project / "src").mkdir(parents=True)
    (project / "config.json").write_text('{"name": "within", "version": "1.0.0"}')
    (project / "src" / "within.py").write_text(PROJECT)
    try:
        async with ProcessEngine() as engine:
            spec = complete(SandboxSpec(env=EnvRef("any"), network="none", startup_timeout=60), read(project))
            async with engine.provision(spec) as made:
                assert made.token is not None
                directory = Known(Place("one", made.url, "anna", made.token))
                async with serving(directory) as gateway, client(gateway) as one:
                    one.post("/env-instance/one/tools/serve", b"{}", "Authorization: Bearer anna\r\n")
                    port = (await one.reply()).json["data"]
                    for _ in range(2):
                        one.get("/", "", host=host(gateway, port))
                        assert (await one.reply()).body == b"from within\n"
    finally:
        shutil.rmtree(home, ignore_errors=True)
