"""One connection through the egress proxy: what gets through, and what does not."""

import asyncio
import contextlib
import socket
import struct
import sys

import pytest

from aenv.engines.egress import peers, proxy
from tests.engines.egress_servers import PATIENCE, Server, echo, hello, request, serving, silence, status, until
from tests.engines.test_egress_rules import LOOPBACKS

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the process engine proxies on Linux alone")


# What gets through


async def test_a_request_arrives_in_origin_form_without_what_was_meant_for_the_proxy():
    async with Server(hello) as server, serving(f"127.0.0.1:{server.port}") as door:
        fields = (
            "Accept: */*\r\nConnection: x-mine, keep-alive\r\nX-Mine: secret\r\nProxy-Connection: keep-alive\r\n"
            "Proxy-Authorization: Basic abc\r\nTE: trailers\r\nUpgrade: h2c\r\nKeep-Alive: 5\r\n"
        )
        answer = await door.get(server.port, "/a/b?c=d", extra=fields)
    assert server.heads == [
        f"GET /a/b?c=d HTTP/1.1\r\nHost: 127.0.0.1:{server.port}\r\naccept: */*\r\nConnection: close".encode()
    ]
    head, _, body = answer.partition(b"\r\n\r\n")
    assert head == b"HTTP/1.1 200 OK\r\nx-kept: 1\r\nContent-Length: 5\r\nConnection: close"
    assert body == b"hello"


async def test_a_url_without_path_and_a_host_in_other_letters():
    async with Server(hello) as server, serving(f"localhost:{server.port}") as door:
        url, host = f"HTTP://LocalHost:{server.port}?q", f"localhost.:{server.port}"
        answer = await door.ask(f"GET {url} HTTP/1.1\r\nHost: {host}\r\n\r\n".encode())
    assert status(answer) == 200
    assert server.heads[0].startswith(f"GET /?q HTTP/1.1\r\nHost: localhost:{server.port}\r\n".encode())


async def test_bodies_go_both_ways_and_chunks_are_framed_anew():
    async def collect(connection):
        await connection.head()
        while not connection.received.endswith(b"0\r\n\r\n"):
            await connection.some()
        await connection.send(
            b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n3;x=y\r\nabc\r\n0004\r\ndefg\r\n0\r\nX-T: 1\r\n\r\n"
        )

    async with Server(collect) as server, serving(f"127.0.0.1:{server.port}") as door:
        head = f"POST http://127.0.0.1:{server.port}/ HTTP/1.1\r\nHost: 127.0.0.1:{server.port}\r\n".encode()
        answer = await door.ask(
            head
            + b"Transfer-Encoding: Chunked\r\n\r\n5;evil=1\r\nhello\r\n00006\r\n world\r\n0\r\nX-Trailer: 1\r\n\r\n"
        )
    assert server.received[0].partition(b"\r\n\r\n")[2] == b"5\r\nhello\r\n6\r\n world\r\n0\r\n\r\n"
    assert b"transfer-encoding: chunked" in answer.lower()
    assert answer.partition(b"\r\n\r\n")[2] == b"3\r\nabc\r\n4\r\ndefg\r\n0\r\n\r\n"


async def test_a_client_of_http_1_0_gets_no_chunks_and_no_interim_answers():
    async def answer(connection):
        await connection.head()
        await connection.send(b"HTTP/1.1 103 Early Hints\r\n\r\nHTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n")
        await connection.send(b"3\r\nabc\r\n0\r\n\r\n")

    async with Server(answer) as server, serving(f"127.0.0.1:{server.port}") as door:
        found = await door.ask(f"GET http://127.0.0.1:{server.port}/ HTTP/1.0\r\n\r\n".encode())
        modern = await door.get(server.port)
    assert found == b"HTTP/1.1 200 OK\r\nConnection: close\r\n\r\nabc"
    assert modern.startswith(b"HTTP/1.1 103 Early Hints\r\n\r\nHTTP/1.1 200 OK\r\n")


@pytest.mark.parametrize(
    ("method", "head"),
    [("HEAD", b"HTTP/1.1 200 OK\r\nContent-Length: 99\r\n\r\n"), ("GET", b"HTTP/1.1 304 Not Modified\r\n\r\n")],
)
async def test_answers_without_a_body_end_with_their_head(method, head):
    async def answer(connection):
        await connection.head()
        await connection.send(head)
        await connection.some()

    async with Server(answer) as server, serving(f"127.0.0.1:{server.port}") as door:
        found = await door.ask(request("127.0.0.1", server.port).replace(b"GET", method.encode(), 1))
    assert found == head.removesuffix(b"\r\n") + b"Connection: close\r\n\r\n"


async def test_expect_continue():
    async def answer(connection):
        await connection.head()
        await connection.send(b"HTTP/1.1 100 Continue\r\n\r\n")
        await connection.some()
        await connection.send(b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n")

    async with Server(answer) as server, serving(f"127.0.0.1:{server.port}") as door:
        reader, writer = await door.connect()
        fields = "Expect: 100-continue\r\nContent-Length: 4\r\n"
        writer.write(request("127.0.0.1", server.port, extra=fields))
        async with asyncio.timeout(PATIENCE):
            assert status(await reader.readuntil(b"\r\n\r\n")) == 100
            writer.write(b"body")
            assert status(await reader.read()) == 200
        writer.close()
    assert server.received[0].endswith(b"\r\n\r\nbody")


async def test_a_tunnel_carries_both_ways_and_each_side_may_end_before_the_other():
    async def after_the_end(connection):
        with contextlib.suppress(EOFError):
            while True:
                await connection.some()
        await connection.send(b"you said %d bytes" % len(connection.received))

    async with Server(after_the_end) as server, serving(f"127.0.0.1:{server.port}") as door:
        reader, writer = await door.tunnel(f"127.0.0.1:{server.port}")
        for _ in range(16):
            writer.write(bytes(65536))
            await writer.drain()
        writer.write_eof()
        async with asyncio.timeout(PATIENCE):
            assert await reader.read() == b"you said 1048576 bytes"
        writer.close()


async def test_what_is_sent_right_behind_connect_is_not_lost():
    async with Server(echo) as server, serving(f"127.0.0.1:{server.port}") as door:
        reader, writer = await door.connect()
        writer.write(f"CONNECT 127.0.0.1:{server.port} HTTP/1.0\r\n\r\nearly".encode())
        async with asyncio.timeout(PATIENCE):
            await reader.readuntil(b"\r\n\r\n")
            assert await reader.readexactly(5) == b"early"
        writer.close()


# What does not


@pytest.mark.parametrize("spelling", [*LOOPBACKS, "0", "0.0.0.0", "[::1]", "[::]", "localhost"])
async def test_no_spelling_of_loopback_gets_around_the_list(spelling):
    async with Server(hello) as server:
        async with serving(f"example.org:{server.port}", f"*.example.org:{server.port}", "127.0.0.1:1") as door:
            assert (await door.tunnel(f"{spelling}:{server.port}")).startswith("HTTP/1.1 403 ")
            assert status(await door.get(server.port, host=spelling)) == 403
        assert not server.received


@pytest.mark.parametrize("spelling", LOOPBACKS)
async def test_every_spelling_of_a_listed_address_gets_through(spelling):
    async with Server(hello) as server, serving(f"127.0.0.1:{server.port}") as door:
        assert status(await door.get(server.port, host=spelling)) == 200
    assert f"\r\nHost: 127.0.0.1:{server.port}\r\n".encode() in server.received[0]


async def test_another_port_of_a_listed_host_is_denied():
    async with Server(hello) as server, Server(hello) as other, serving(f"127.0.0.1:{server.port}") as door:
        assert await door.tunnel(f"127.0.0.1:{other.port}") == (
            f"HTTP/1.1 403 127.0.0.1:{other.port} is not in network.allow"
        )
        assert status(await door.get(other.port)) == 403
        assert status(await door.get(server.port)) == 200
    assert not other.received


async def test_an_empty_list_allows_nothing():
    async with Server(hello) as server, serving() as door:
        assert status(await door.get(server.port)) == 403


@pytest.mark.parametrize(
    "template",
    [
        "GET http://127.0.0.1:{port}/ HTTP/1.1\r\n\r\n",
        "GET http://127.0.0.1:{port}/ HTTP/1.1\r\nHost: evil.example\r\n\r\n",
        "GET http://127.0.0.1:{port}/ HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n",
        "GET http://127.0.0.1:{port}/ HTTP/1.1\r\nHost:\r\n\r\n",
        "GET http://127.0.0.1:{port}/ HTTP/1.1\r\nHost: {host}\r\nHost: {host}\r\n\r\n",
        "GET http://127.0.0.1:{port}/ HTTP/1.1\r\nHost: {host}\r\nhOsT: evil.example\r\n\r\n",
        "GET http://127.0.0.1:{port}/ HTTP/1.1\r\nHost : {host}\r\n\r\n",
        "GET http://127.0.0.1:{port}/ HTTP/1.1\r\nHost: {host}\r\n folded: yes\r\n\r\n",
        "GET http://127.0.0.1:{port}/ HTTP/1.1\r\n Host: {host}\r\n\r\n",
        "GET http://127.0.0.1:{port}/ HTTP/1.1\r\nHost: {host}\nX: y\r\n\r\n",
        "GET http://127.0.0.1:{port}/ HTTP/1.1\r\nHost: {host}\rX: y\r\n\r\n",
        "GET http://127.0.0.1:{port}/ HTTP/1.1\r\nHost: {host}\r\nX: a\0b\r\n\r\n",
        "GET http://127.0.0.1:{port}/ HTTP/1.1\r\nHost: {host}\r\n: empty\r\n\r\n",
        "GET http://127.0.0.1:{port}@evil.example/ HTTP/1.1\r\nHost: evil.example\r\n\r\n",
        "GET http://evil.example@127.0.0.1:{port}/ HTTP/1.1\r\nHost: {host}\r\n\r\n",
        "GET http://127.0.0.1:{port}\\@evil.example/ HTTP/1.1\r\nHost: {host}\r\n\r\n",
        "GET http://127.0.0.1:{port}#@evil.example/ HTTP/1.1\r\nHost: {host}\r\n\r\n",
        "GET http://127.0.0.1:{port}/#x HTTP/1.1\r\nHost: {host}\r\n\r\n",
        "GET http:///127.0.0.1:{port}/ HTTP/1.1\r\nHost: {host}\r\n\r\n",
        "GET https://127.0.0.1:{port}/ HTTP/1.1\r\nHost: {host}\r\n\r\n",
        "GET / HTTP/1.1\r\nHost: {host}\r\n\r\n",
        "GET {host} HTTP/1.1\r\nHost: {host}\r\n\r\n",
        "OPTIONS * HTTP/1.1\r\nHost: {host}\r\n\r\n",
        "GET http://127.0.0.1:{port}/ http/1.1\r\nHost: {host}\r\n\r\n",
        "GET http://127.0.0.1:{port}/ HTTP/2.0\r\nHost: {host}\r\n\r\n",
        "GET http://127.0.0.1:{port}/ HTTP/0.9\r\nHost: {host}\r\n\r\n",
        "GET  http://127.0.0.1:{port}/ HTTP/1.1\r\nHost: {host}\r\n\r\n",
        "GET http://127.0.0.1:{port}/a b HTTP/1.1\r\nHost: {host}\r\n\r\n",
        "GET http://127.0.0.1:{port}/\r\n\r\n",
        "\r\nGET http://127.0.0.1:{port}/ HTTP/1.1\r\nHost: {host}\r\n\r\n",
        "G@T http://127.0.0.1:{port}/ HTTP/1.1\r\nHost: {host}\r\n\r\n",
        "POST http://127.0.0.1:{port}/ HTTP/1.1\r\nHost: {host}\r\nContent-Length: 5\r\n"
        "Transfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
        "POST http://127.0.0.1:{port}/ HTTP/1.1\r\nHost: {host}\r\nTransfer-Encoding: chunked, identity\r\n\r\n",
        "POST http://127.0.0.1:{port}/ HTTP/1.1\r\nHost: {host}\r\nTransfer-Encoding: gzip, chunked\r\n\r\n",
        "POST http://127.0.0.1:{port}/ HTTP/1.1\r\nHost: {host}\r\nTransfer-Encoding: xchunked\r\n\r\n",
        "POST http://127.0.0.1:{port}/ HTTP/1.1\r\nHost: {host}\r\nTransfer-Encoding: chunked\r\n"
        "Transfer-Encoding: identity\r\n\r\n",
        "POST http://127.0.0.1:{port}/ HTTP/1.0\r\nHost: {host}\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
        "POST http://127.0.0.1:{port}/ HTTP/1.1\r\nHost: {host}\r\nContent-Length: 5\r\nContent-Length: 6\r\n\r\nhello",
        "POST http://127.0.0.1:{port}/ HTTP/1.1\r\nHost: {host}\r\nContent-Length: 5, 5\r\n\r\nhello",
        "POST http://127.0.0.1:{port}/ HTTP/1.1\r\nHost: {host}\r\nContent-Length: +5\r\n\r\nhello",
        "POST http://127.0.0.1:{port}/ HTTP/1.1\r\nHost: {host}\r\nContent-Length: 0x5\r\n\r\nhello",
        "POST http://127.0.0.1:{port}/ HTTP/1.1\r\nHost: {host}\r\nContent-Length: -1\r\n\r\n",
        "CONNECT {host} HTTP/1.1\r\nHost: {host}\r\nContent-Length: 5\r\n\r\nhello",
        "CONNECT 127.0.0.1 HTTP/1.1\r\nHost: {host}\r\n\r\n",
        "CONNECT http://{host}/ HTTP/1.1\r\nHost: {host}\r\n\r\n",
        "CONNECT evil@{host} HTTP/1.1\r\nHost: {host}\r\n\r\n",
        "CONNECT 127.0.0.1:0{port}0 HTTP/1.1\r\nHost: {host}\r\n\r\n",
        "\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03 tls? \r\n\r\n",
        "SSH-2.0-OpenSSH_9.2\r\n\r\n",
    ],
)
async def test_what_could_be_read_in_two_ways_is_refused_before_anybody_is_dialled(template):
    async with Server(hello) as server, serving(f"127.0.0.1:{server.port}", "evil.example:80") as door:
        raw = template.format(port=server.port, host=f"127.0.0.1:{server.port}").encode("latin-1")
        answer = await door.ask(raw)
        assert answer.startswith(b"HTTP/1.1 400 bad request: "), answer
    assert not server.received


@pytest.mark.parametrize(
    "body",
    [
        b"z\r\n",
        b"-1\r\n",
        b"0x5\r\nhello\r\n",
        b"5 \r\nhello\r\n",
        b"5\nhello\r\n",
        b"4\r\nhello\r\n0\r\n\r\n",
        b"1" * 16 + b"\r\n",
        b"\r\n",
        b"5;" + b"x" * 5000 + b"\r\n",
        b"0\r\n" + b"a: b\r\n" * 300 + b"\r\n",
    ],
    ids=lambda body: str(body[:20]),
)
async def test_chunks_that_are_none_end_the_request_before_the_server_takes_it_for_whole(body):
    async with Server(silence) as server, serving(f"127.0.0.1:{server.port}") as door:
        answer = await door.ask(
            request("127.0.0.1", server.port, extra="Transfer-Encoding: chunked\r\n").replace(b"GET", b"PUT", 1) + body
        )
        assert status(answer) == 400, answer
        await until(lambda: server.ends)
    assert server.ends == ["reset"]
    assert not server.received[0].endswith(b"0\r\n\r\n")


async def test_a_second_request_behind_the_first_reaches_nobody():
    async with Server(hello) as server, Server(hello) as other:
        async with serving(f"127.0.0.1:{server.port}") as door:
            for second in (request("127.0.0.1", other.port), request("127.0.0.1", server.port, "/second")):
                first = request("127.0.0.1", server.port, "/first", extra="Content-Length: 4\r\n") + b"body"
                answer = await door.ask(first + second)
                assert answer.count(b"HTTP/1.1 ") == 1
                assert status(answer) == 200
    assert not other.received
    assert len(server.received) == 2
    assert all(bytes(received).endswith(b"\r\n\r\nbody") for received in server.received)


async def test_the_log_names_host_and_port_alone_and_not_without_end(capfd):
    async with serving("example.org:80") as door:
        for number in range(30):
            await door.ask(request("evil.example", 80, f"/path?token=secret{number}", extra="Cookie: private\r\n"))
    lines = capfd.readouterr().err.splitlines()
    assert lines[0] == "egress: box-1: denied evil.example:80"
    assert len(lines) == proxy.MOST_DENIALS
    assert lines[-1].endswith("not logged")
    assert not any(word in line for line in lines for word in ("secret", "private", "path"))


# Names


class Resolver:
    """A resolver that gives one answer after the other, as a hostile one would."""

    def __init__(self, *answers):
        self.answers = list(answers)
        self.asked: list[str] = []

    async def __call__(self, name):
        self.asked.append(name)
        answer = self.answers.pop(0)
        if answer is None:
            raise socket.gaierror(socket.EAI_NONAME, "no such name")
        return answer


@pytest.mark.parametrize(
    "addresses",
    [
        ["127.0.0.1"],
        ["::1"],
        ["::ffff:127.0.0.1"],
        ["0.0.0.0"],
        ["169.254.169.254"],
        ["fe80::1%lo"],
        ["10.0.0.1", "192.168.0.1", "fd00::1"],
        ["64:ff9b::7f00:1"],
        [],
    ],
)
async def test_a_name_that_leads_inside_is_denied(addresses, capfd):
    resolver = Resolver(addresses, addresses)
    async with Server(hello) as server:
        async with serving(f"rebind.example:{server.port}", resolve=resolver) as door:
            answer = await door.get(server.port, host="rebind.example")
            assert status(answer) == 403
            assert b"not public" in answer
            assert b"IP:port" in answer
            assert "not public" in await door.tunnel(f"rebind.example:{server.port}")
        assert not server.received
    assert f"box-1: denied rebind.example:{server.port}" in capfd.readouterr().err


async def test_a_name_is_looked_up_once_and_what_was_checked_is_dialled():
    resolver = Resolver(["169.254.169.254", "127.0.0.1"])
    async with Server(hello) as server:
        allow = (f"inside.example:{server.port}", f"127.0.0.1:{server.port}")
        async with serving(*allow, resolve=resolver) as door:
            assert status(await door.get(server.port, host="INSIDE.example.")) == 200
    assert resolver.asked == ["inside.example"]
    assert f"\r\nHost: inside.example:{server.port}\r\n".encode() in server.received[0]


async def test_a_name_that_is_not_listed_is_not_looked_up():
    resolver = Resolver()
    async with serving("*.example.org:443", resolve=resolver) as door:
        for name in ("example.org", "secret-data.evil.example", "localhost"):
            assert (await door.tunnel(f"{name}:443")).startswith("HTTP/1.1 403 ")
    assert resolver.asked == []


async def test_localhost_is_the_machine_only_when_it_is_listed_by_that_name():
    async with Server(hello) as server:
        async with serving(f"localhost:{server.port}", resolve=Resolver()) as door:
            assert status(await door.get(server.port, host="localhost")) == 200
            assert status(await door.get(server.port)) == 403
        async with serving(f"*.localhost:{server.port}", resolve=Resolver(["127.0.0.1"])) as door:
            assert status(await door.get(server.port, host="a.localhost")) == 403


async def test_a_name_that_has_no_address_is_a_bad_gateway():
    async with serving("gone.example:80", resolve=Resolver(None)) as door:
        answer = await door.get(80, host="gone.example")
    assert status(answer) == 502
    assert b"gone.example cannot be resolved" in answer


# Servers that fail


async def test_a_server_that_is_not_there_is_a_bad_gateway():
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        port = closed.getsockname()[1]
        async with serving(f"127.0.0.1:{port}") as door:
            assert await door.tunnel(f"127.0.0.1:{port}") == (
                f"HTTP/1.1 502 127.0.0.1:{port} cannot be reached: Connection refused"
            )
            assert status(await door.get(port)) == 502


@pytest.mark.parametrize(
    "said",
    [
        b"",
        b"nonsense\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nbad field\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n",
        b"HTTP/1.1 101 Switching Protocols\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nX: " + b"x" * 300_000,
    ],
    ids=lambda said: str(said[:40]),
)
async def test_an_answer_that_is_none_is_a_bad_gateway(said):
    async def answer(connection):
        await connection.head()
        await connection.send(said)

    async with Server(answer) as server, serving(f"127.0.0.1:{server.port}") as door:
        found = await door.get(server.port)
    assert status(found) == 502
    assert f"127.0.0.1:{server.port}".encode() in found


async def test_a_server_that_cannot_be_reached_in_time(monkeypatch):
    monkeypatch.setattr(proxy, "CONNECT_TIMEOUT", 0.3)
    with contextlib.ExitStack() as stack:
        full = stack.enter_context(socket.create_server(("127.0.0.1", 0), backlog=0))
        address = full.getsockname()
        for _ in range(4):  # connections that nobody accepts, until the kernel drops the next
            waiting = stack.enter_context(socket.socket())
            waiting.setblocking(False)
            waiting.connect_ex(address)
        async with serving(f"127.0.0.1:{address[1]}") as door:
            assert (await door.tunnel(f"127.0.0.1:{address[1]}")).startswith("HTTP/1.1 504 ")


async def test_a_dead_address_does_not_hide_the_next(monkeypatch):
    monkeypatch.setattr(proxy, "ADDRESS_TIMEOUT", 0.2)
    with contextlib.ExitStack() as stack:
        async with Server(hello) as server:
            full = stack.enter_context(socket.create_server(("127.0.0.2", server.port), backlog=0))
            for _ in range(4):
                waiting = stack.enter_context(socket.socket())
                waiting.setblocking(False)
                waiting.connect_ex(full.getsockname())
            allow = [f"{host}:{server.port}" for host in ("two.example", "127.0.0.1", "127.0.0.2")]
            async with serving(*allow, resolve=Resolver(["127.0.0.2", "127.0.0.1"])) as door:
                assert status(await door.get(server.port, host="two.example")) == 200


async def test_a_server_that_says_nothing_is_a_timeout(monkeypatch):
    monkeypatch.setattr(peers, "IDLE", 0.3)
    async with Server(silence) as server, serving(f"127.0.0.1:{server.port}") as door:
        assert status(await door.get(server.port)) == 504
        await until(lambda: server.ends)
    assert server.ends == ["reset"]


async def test_a_server_that_is_cut_in_the_middle_is_not_taken_for_one_that_ended():
    async def cut(connection):
        await connection.head()
        await connection.send(b"HTTP/1.1 200 OK\r\n\r\nhalf of it")
        await connection.some()
        connection.writer.get_extra_info("socket").setsockopt(
            socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0)
        )

    async with Server(cut) as server, serving(f"127.0.0.1:{server.port}") as door:
        reader, writer = await door.connect()
        writer.write(request("127.0.0.1", server.port, extra="Content-Length: 4\r\n"))
        async with asyncio.timeout(PATIENCE):
            await reader.readuntil(b"half of it")
            writer.write(b"body")
            with pytest.raises(ConnectionResetError):
                await reader.read()
        writer.close()


async def test_an_answer_that_comes_before_the_body_is_sent_is_passed_on():
    async def refuse(connection):
        await connection.head()
        await connection.send(b"HTTP/1.1 413 Too Large\r\nContent-Length: 3\r\n\r\nno!")

    async with Server(refuse) as server, serving(f"127.0.0.1:{server.port}") as door:
        reader, writer = await door.connect()
        writer.write(request("127.0.0.1", server.port, extra="Content-Length: 100000000\r\n") + bytes(100_000))
        async with asyncio.timeout(PATIENCE):
            found = await reader.read()
        writer.close()
    assert status(found) == 413
    assert found.endswith(b"no!")


# Clients that fail


async def test_a_head_that_is_too_long():
    async with Server(hello) as server, serving(f"127.0.0.1:{server.port}") as door:
        room = proxy.MOST_HEAD - len(request("127.0.0.1", server.port, extra="X: \r\n"))
        fits = await door.get(server.port, extra=f"X: {'x' * room}\r\n")
        assert status(fits) == 200
        for extra in (f"X: {'x' * (room + 1000)}\r\n", "X: y\r\n" * 100_000):
            assert status(await door.get(server.port, extra=extra)) == 431
        endless = await door.ask(b"x" * 200_000)
        assert status(endless) == 431
        assert status(await door.get(server.port, extra="X: y\r\n" * 300)) == 400
    assert len(server.received) == 1


async def test_a_head_that_does_not_come(monkeypatch):
    monkeypatch.setattr(proxy, "SLOW_HEAD", 0.3)
    async with serving("example.org:80") as door:
        assert await door.ask(b"") == b""
        assert status(await door.ask(b"GET http://exa")) == 408
        reader, writer = await door.connect()
        stopped = asyncio.Event()

        async def drip():
            with contextlib.suppress(ConnectionError):
                while not stopped.is_set():
                    writer.write(b"x")
                    await writer.drain()
                    await asyncio.sleep(0.02)

        dripping = asyncio.create_task(drip())
        async with asyncio.timeout(PATIENCE):
            assert status(await reader.read()) == 408
        stopped.set()
        await dripping
        writer.close()


async def test_a_tunnel_on_which_nothing_moves_is_cut(monkeypatch):
    monkeypatch.setattr(peers, "IDLE", 0.3)
    async with Server(echo) as server, serving(f"127.0.0.1:{server.port}") as door:
        reader, writer = await door.tunnel(f"127.0.0.1:{server.port}")
        writer.write(b"alive")
        async with asyncio.timeout(PATIENCE):
            assert await reader.readexactly(5) == b"alive"
            with pytest.raises(ConnectionResetError):
                await reader.read()
        writer.close()
        await until(lambda: server.ends)
    assert server.ends == ["reset"]


async def test_a_server_is_not_waited_for_as_long_once_its_client_has_left(monkeypatch):
    monkeypatch.setattr(peers, "HALF_IDLE", 0.2)

    async def deaf(connection):
        await connection.head()
        while await connection.reader.read(100):
            pass
        await asyncio.sleep(3600)

    async with Server(deaf) as server, serving(f"127.0.0.1:{server.port}") as door:
        for raw in (
            request("127.0.0.1", server.port),
            f"CONNECT 127.0.0.1:{server.port} HTTP/1.1\r\nHost: x\r\n\r\nx\r\n\r\n".encode(),
        ):
            reader, writer = await door.connect()
            writer.write(raw)
            count = len(server.received)
            await until(lambda count=count: len(server.received) > count)
            writer.write_eof()
            async with asyncio.timeout(PATIENCE):
                with contextlib.suppress(ConnectionResetError):
                    await reader.read()
            writer.close()


async def test_a_client_that_is_cut_takes_its_server_connection_with_it():
    async with Server(silence) as server, serving(f"127.0.0.1:{server.port}") as door:
        tunnel = await door.tunnel(f"127.0.0.1:{server.port}")
        _, half_sent = await door.connect()
        half_sent.write(request("127.0.0.1", server.port, extra="Content-Length: 10\r\n") + b"half")
        waits = await door.connect()
        waits[1].write(request("127.0.0.1", server.port))
        await until(lambda: len(server.received) == 3 and all(server.received[1:]))
        for writer in (tunnel[1], half_sent, waits[1]):
            writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            writer.transport.abort()
        await until(lambda: len(server.ends) == 3)
