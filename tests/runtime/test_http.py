"""The plain HTTP routes, the limits, and who is let in."""

from __future__ import annotations

import socket
from collections.abc import Iterator

import pytest

from aenv.runtime import tokens
from tests.runtime.test_mcp import call
from tests.runtime.wire import META, Session, modern, send
from tests.support import FIXTURES, Sandbox, sandbox


@pytest.mark.parametrize(
    ("method", "path", "body", "status", "answer"),
    [
        ("GET", "/health", None, 200, {"status": "healthy", "detail": "all well"}),
        ("POST", "/tools/add", {"a": "5"}, 200, 7),
        ("POST", "/tools/custom", {}, 200, {"content": [{"type": "text", "text": "mine"}], "is_error": False}),
        ("POST", "/task/reward?name=score", {"answer": "42"}, 200, 1.0),
        ("POST", "/functions/shout", {"text": "a"}, 200, {"text": "A"}),
        ("GET", "/custom/path?n=3&flag=true", None, 200, {"n": 3, "flag": True}),
        ("POST", "/reset", {"seed": 4}, 200, {"seed": 4}),
        ("POST", "/reset", {"seed": 4, "arguments": {"level": "2"}}, 200, {"seed": 4, "level": 2}),
        ("POST", "/reset", {"arguments": {"level": 2}}, 200, {"seed": None, "level": 2}),
    ],
)
def test_routes(lab: Sandbox, method: str, path: str, body: object, status: int, answer: object) -> None:
    reply = send(lab.port, method, path, body)
    assert (reply.status, reply.json) == (status, {"success": True, "data": answer})


@pytest.mark.parametrize(
    ("method", "path", "body", "status", "code"),
    [
        ("POST", "/tools/add", {"a": "x"}, 422, "invalid"),
        ("POST", "/tools/add", b"{", 422, "invalid"),
        ("POST", "/tools/add", b"[]", 422, "invalid"),
        ("POST", "/tools/none", {}, 404, "not_found"),
        ("POST", "/tools/fail", {}, 500, "author_failed"),
        ("POST", "/tools/leave", {}, 500, "author_failed"),
        ("POST", "/tools/odd", {}, 500, "author_failed"),
        ("POST", "/task/reward?name=broken", {}, 500, "author_failed"),
        ("POST", "/task/reward", {}, 422, "invalid"),
        ("POST", "/reset", {"seed": "x"}, 422, "invalid"),
        ("POST", "/reset", {"other": 1}, 422, "invalid"),
        ("POST", "/reset", {"arguments": [1]}, 422, "invalid"),
        ("POST", "/reset", {"seed": 4, "arguments": {"level": "high"}}, 422, "invalid"),
        ("POST", "/reset", {"seed": 4, "arguments": {"height": 2}}, 422, "invalid"),
        ("POST", "/reset", {"arguments": {"seed": 4}}, 422, "invalid"),
        ("GET", "/nowhere", None, 404, "not_found"),
        ("GET", "/custom/path?n=x", None, 422, "invalid"),
        ("PUT", "/health", {}, 405, "invalid"),
        ("GET", "/functions/shout?text=a", None, 405, "invalid"),
        ("POST", "/../../etc/passwd", {}, 404, "not_found"),
    ],
)
def test_errors_name_their_kind(lab: Sandbox, method: str, path: str, body: object, status: int, code: str) -> None:
    reply = send(lab.port, method, path, body)
    assert (reply.status, reply.json["success"], reply.json["code"]) == (status, False, code)
    assert reply.json["error"]


def test_no_path_of_the_machine_is_told(lab: Sandbox) -> None:
    reply = send(lab.port, "POST", "/tools/fail", {})
    assert str(FIXTURES) not in reply.body.decode()


# Host and Origin


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({}, 200),
        ({"Host": "localhost:1"}, 200),
        ({"Host": "[::1]:8081"}, 200),
        ({"Host": "evil.example.com"}, 403),
        ({"Host": "127.0.0.1.evil.com"}, 403),
        ({"Host": "localhost@evil.com"}, 403),
        ({"Host": ""}, 403),
        ({"Origin": "http://localhost:6274"}, 200),
        ({"Origin": "http://evil.example.com"}, 403),
        ({"Origin": "null"}, 403),
    ],
)
def test_only_this_machines_names_are_served(lab: Sandbox, headers: dict[str, str], status: int) -> None:
    assert send(lab.port, "GET", "/health", headers=headers).status == status
    meta = {"Mcp-Method": "tools/list", "MCP-Protocol-Version": "2026-07-28"}
    assert modern(lab.port, "tools/list", headers={**meta, **headers}).status == status


# Tokens


@pytest.fixture(scope="module")
def guarded() -> Iterator[tuple[Sandbox, str]]:
    owner = tokens.new_owner_token()
    with sandbox(FIXTURES / "lab", variables={"AENV_OWNER_TOKEN_SHA256": tokens.digest(owner)}) as running:
        yield running, owner


def _bearer(token: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {token}"}


def test_the_owner_may_everything(guarded: tuple[Sandbox, str]) -> None:
    running, owner = guarded
    assert send(running.port, "POST", "/task/reward?name=score", {"answer": "42"}, _bearer(owner)).json["data"] == 1.0
    assert modern(running.port, "tools/list", headers=_bearer(owner)).status == 200


def test_an_agent_may_use_tools_and_nothing_else(guarded: tuple[Sandbox, str]) -> None:
    running, owner = guarded
    agent = tokens.agent_token(tokens.digest(owner))
    assert modern(running.port, "tools/call", call("add", {"a": 1}), _bearer(agent)).json["result"]
    assert send(running.port, "POST", "/tools/add", {"a": 1}, _bearer(agent)).json["data"] == 3
    for path in ("/task/reward?name=score", "/functions/shout", "/reset"):
        reply = send(running.port, "POST", path, {"answer": "42"}, _bearer(agent))
        assert (reply.status, reply.json["code"]) == (403, "forbidden")
    assert send(running.port, "GET", "/custom/path?n=1", None, _bearer(agent)).status == 403
    assert send(running.port, "GET", "/functions/list", None, _bearer(agent)).status == 403


@pytest.mark.parametrize("headers", [{}, _bearer("wrong"), _bearer(""), {"Authorization": "Basic eDp5"}])
def test_a_stranger_sees_health_alone(guarded: tuple[Sandbox, str], headers: dict[str, str]) -> None:
    running, _ = guarded
    assert send(running.port, "GET", "/health", headers=headers).json == {
        "success": True,
        "data": {"status": "healthy"},
    }
    for method, path in (("POST", "/mcp"), ("GET", "/tools"), ("GET", "/info"), ("POST", "/task/reward")):
        reply = send(running.port, method, path, {} if method == "POST" else None, headers)
        assert reply.status == 401
        assert reply.headers["www-authenticate"] == "Bearer"


async def test_an_agent_url_opens_the_tools(guarded: tuple[Sandbox, str]) -> None:
    from aenv import Environment, Forbidden, attach

    running, owner = guarded
    async with Environment("lab", provision=attach(running.url, owner)) as env:
        assert await env.call_reward({"answer": "42"}, name="score") == 1.0
        url = await env.agent_url()
    path = url.removeprefix(running.url)
    assert path.startswith("/mcp?token=")
    body = {"jsonrpc": "2.0", "id": 1, "method": "tools/list", "params": {"_meta": META}}
    headers = {"MCP-Protocol-Version": "2026-07-28", "Mcp-Method": "tools/list"}
    assert send(running.port, "POST", path, body, headers).status == 200
    assert send(running.port, "POST", f"/task/reward?{path.partition('?')[2]}", {}).status == 401
    async with Environment("lab", provision=attach(running.url, path.rpartition("=")[2])) as agent:
        with pytest.raises(Forbidden):
            await agent.call_reward({"answer": "42"}, name="score")


def test_beyond_loopback_a_token_is_made_and_shown_once() -> None:
    with sandbox(FIXTURES / "lab", "--host", "0.0.0.0") as running:
        owner = running.log.partition("owner token (shown once): ")[2].split()
        while not owner:
            owner = running.log.partition("owner token (shown once): ")[2].split()
        assert send(running.port, "GET", "/tools").status == 401
        assert send(running.port, "GET", "/tools", headers=_bearer(owner[0])).status == 200
    with sandbox(FIXTURES / "lab", "--host", "0.0.0.0", "--open-access") as running:
        assert send(running.port, "GET", "/tools").status == 200


# Limits


def test_a_body_over_the_limit_is_refused_before_it_is_read() -> None:
    with sandbox(FIXTURES / "lab", variables={"AENV_MAX_BODY": "1000"}) as running:
        reply = send(running.port, "POST", "/tools/length", {"text": "x" * 2000})
        assert (reply.status, reply.json["code"]) == (413, "too_large")
        with socket.create_connection(("127.0.0.1", running.port), timeout=20) as sock:
            head = b"POST /tools/length HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n"
            sock.sendall(head + b"800\r\n" + b"x" * 2048 + b"\r\n")
            assert b"413" in sock.recv(1000)
        assert send(running.port, "POST", "/tools/length", {"text": "x" * 100}).json["data"] == 100


def test_not_http_and_half_requests_harm_nobody(lab: Sandbox) -> None:
    half = [socket.create_connection(("127.0.0.1", lab.port)) for _ in range(20)]
    for sock in half:
        sock.sendall(b"POST /mcp HTTP/1.1\r\nHost: localhost\r\nContent-Length: 100\r\n\r\n{")
    with socket.create_connection(("127.0.0.1", lab.port), timeout=20) as odd:
        odd.sendall(b"\x16\x03\x01 nonsense\r\n\r\n")
        assert b"400" in odd.recv(1000)
    assert Session(lab.port).request("ping").json["result"] == {}
    for sock in half:
        sock.close()
    assert modern(lab.port, "tools/list").status == 200


def test_a_slow_reader_delays_nobody(lab: Sandbox) -> None:
    with socket.socket() as slow:
        slow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        slow.connect(("127.0.0.1", lab.port))
        body = b'{"size": 20000000}'
        slow.sendall(b"POST /tools/big HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n\r\n%b" % (len(body), body))
        assert slow.recv(100).startswith(b"HTTP/1.1 200")
        for n in range(20):
            assert send(lab.port, "POST", "/tools/add", {"a": n}).json["data"] == n + 2
        received = 100
        while received < 20_000_000:
            received += len(slow.recv(1_000_000))


def _raw(port: int, data: bytes) -> bytes:
    """What comes back for bytes sent as they are, until the server closes."""
    with socket.create_connection(("127.0.0.1", port), timeout=20) as sock:
        sock.sendall(data)
        found = b""
        while part := sock.recv(65536):
            found += part
        return found


def test_a_page_of_another_site_cannot_make_a_browser_call(lab: Sandbox) -> None:
    for site in ("cross-site", "same-site"):
        assert send(lab.port, "GET", "/custom/path?n=1", headers={"Sec-Fetch-Site": site}).status == 403
    assert send(lab.port, "GET", "/custom/path?n=1", headers={"Sec-Fetch-Site": "none"}).status == 200


@pytest.mark.parametrize(
    "flood",
    [b"GET /" + b"a" * 5_000_000, b"GET / HTTP/1.1\r\nHost: localhost\r\nX: " + b"a" * 5_000_000],
    ids=["path", "header"],
)
def test_a_head_without_end_is_cut_off(lab: Sandbox, flood: bytes) -> None:
    with socket.create_connection(("127.0.0.1", lab.port), timeout=20) as sock:
        with pytest.raises(OSError):  # noqa: PT011 - reset or broken pipe, as the kernel has it
            sock.sendall(flood * 10)
    assert send(lab.port, "GET", "/health").status == 200


CHUNKED = b"POST /tools/add HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n"


@pytest.mark.parametrize(
    "flood", [b"8;x=", b'8\r\n{"a": 1}\r\n0\r\nX: ', b'8\r\n{"a": 1}\r\n0\r\n'], ids=["size", "value", "name"]
)
def test_what_comes_with_a_body_is_bounded(lab: Sandbox, flood: bytes) -> None:
    with socket.create_connection(("127.0.0.1", lab.port), timeout=20) as sock, pytest.raises(ConnectionError):
        sock.sendall(CHUNKED + flood + b"a" * 50_000_000)
    assert send(lab.port, "GET", "/health").status == 200


@pytest.mark.parametrize("broken", [b"zz\r\n", b'8\r\n{"a": 1}XX', b'8\r\n{"a": 1}\r\n0\r\nno header\r\n\r\n'])
def test_a_body_that_breaks_off_in_nonsense_is_answered(lab: Sandbox, broken: bytes) -> None:
    """Also when somebody waits for it already."""
    with socket.create_connection(("127.0.0.1", lab.port), timeout=30) as sock:
        sock.sendall(CHUNKED.replace(b"chunked", b"chunked\r\nExpect: 100-continue"))
        assert sock.recv(65536).startswith(b"HTTP/1.1 100")
        sock.sendall(broken)
        assert sock.recv(65536).startswith(b"HTTP/1.1 400")
        assert sock.recv(65536) == b""


def test_many_requests_in_one_piece_are_not_one_long_head(lab: Sandbox) -> None:
    asked = b"GET /health HTTP/1.1\r\nHost: localhost\r\nX: " + b"a" * 500 + b"\r\n\r\n"
    last = asked.replace(b"Host", b"Connection: close\r\nHost")
    assert _raw(lab.port, asked * 999 + last).count(b"HTTP/1.1 200") == 1000


@pytest.mark.parametrize(
    ("request_", "answer"),
    [
        (b"GET /health HTTP/1.1\r\nHost: evil.com\r\nHost: localhost\r\n\r\n", b"HTTP/1.1 400"),
        (b"GET /tools HTTP/1.1\r\nHost: localhost\r\nAuthorization: a\r\nAuthorization: b\r\n\r\n", b"HTTP/1.1 400"),
        (b"POST /tools/add HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: xchunked\r\n\r\n{}", b"HTTP/1.1 400"),
        (
            b"POST /tools/add HTTP/1.1\r\nHost: evil.com\r\nConnection: close\r\nTransfer-Encoding: chunked\r\n\r\n"
            b'8\r\n{"a": 1}\r\n0\r\nHost: localhost\r\n\r\n',
            b"HTTP/1.1 403",
        ),
        (b"GET /health HTTP/1.0\r\nHost: localhost\r\n\r\n", b"HTTP/1.1 200"),
        (b"HEAD /health HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n", b"HTTP/1.1 405"),
        (b"OPTIONS /mcp HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n", b"HTTP/1.1 405"),
    ],
)
def test_odd_but_readable_requests(lab: Sandbox, request_: bytes, answer: bytes) -> None:
    assert _raw(lab.port, request_).startswith(answer)


@pytest.mark.parametrize(
    "framing",
    [b'Content-Length: 8\r\n\r\n{"a": 1}', b'Transfer-Encoding: chunked\r\n\r\n3\r\n{"a\r\n5\r\n": 1}\r\n0\r\n\r\n'],
    ids=["length", "chunked"],
)
def test_who_asks_for_another_protocol_is_heard_to_the_end(lab: Sandbox, framing: bytes) -> None:
    """HTTP clients in Java ask for HTTP/2 in every request: it is not spoken here, and their bodies count."""
    head = b"POST /tools/add HTTP/1.1\r\nHost: localhost\r\nConnection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\n"
    asked = head + b"HTTP2-Settings: AAMAAABkAAQ\r\n" + framing
    last = asked.replace(b"Connection: Upgrade", b"Connection: close, Upgrade")
    assert _raw(lab.port, asked * 200 + last).count(b'{"success":true,"data":3}') == 201
    with socket.create_connection(("127.0.0.1", lab.port), timeout=30) as sock:
        for byte in last:
            sock.sendall(bytes([byte]))
        assert b'{"success":true,"data":3}' in b"".join(iter(lambda: sock.recv(65536), b""))


def test_requests_sent_before_the_answer_to_an_earlier_one(lab: Sandbox) -> None:
    def one(n: int) -> bytes:
        body = b'{"a": %d}' % n
        return b"POST /tools/add HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n\r\n%b" % (len(body), body)

    with socket.create_connection(("127.0.0.1", lab.port), timeout=20) as sock:
        sock.sendall(b"".join(one(n) for n in range(40)))
        found = b""
        while found.count(b'"data"') < 40:
            found += sock.recv(65536)
    assert [int(part.split(b"}")[0]) for part in found.split(b'"data":')[1:]] == [n + 2 for n in range(40)]


def test_expecting_to_be_told_to_go_on(lab: Sandbox) -> None:
    head = b"POST /tools/add HTTP/1.1\r\nHost: localhost\r\nExpect: 100-continue\r\nContent-Length: 8\r\n\r\n"
    with socket.create_connection(("127.0.0.1", lab.port), timeout=20) as sock:
        sock.sendall(head)
        assert sock.recv(1000).startswith(b"HTTP/1.1 100 Continue")
        sock.sendall(b'{"a": 1}')
        assert b'"data":3' in sock.recv(1000)


@pytest.mark.parametrize(
    "body", [b'{"jsonrpc":1,', b"[" * 100_000, b'{"x":' * 100_000, b'{"a":"\xff"}', b'{"a":' + b"[" * 100_000]
)
@pytest.mark.parametrize("path", ["/mcp", "/reset", "/tools/add", "/functions/shout"])
def test_json_that_is_none_is_the_callers_fault(lab: Sandbox, path: str, body: bytes) -> None:
    reply = send(lab.port, "POST", path, body)
    assert 400 <= reply.status < 500
    assert reply.json


def test_a_health_check_that_hangs_takes_one_thread() -> None:
    with sandbox(FIXTURES / "lab", variables={"AENV_THREADS": "3"}) as running:
        send(running.port, "POST", "/functions/hang_health", {"value": True})
        socks = [socket.create_connection(("127.0.0.1", running.port)) for _ in range(10)]
        for sock in socks:
            sock.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")
        assert send(running.port, "POST", "/tools/add", {"a": 1}).json["data"] == 3
        assert send(running.port, "POST", "/functions/hang_health", {"value": False}).status == 200
        for sock in socks:
            assert sock.recv(100).startswith(b"HTTP/1.1 200")
            sock.close()
