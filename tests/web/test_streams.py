"""Answers and bodies that take their time, and clients that do not."""

from __future__ import annotations

import contextlib
import http.client
import socket
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from aenv.runtime import protocol
from aenv.web import exchange
from tests.runtime.wire import Reply, send
from tests.web.shop import PIECE, Server

TOKEN = {"Authorization": "Bearer t-push"}


def until(holds: Callable[[], bool], what: str) -> None:
    """Wait for something that another thread does."""
    deadline = time.monotonic() + 30
    while not holds():
        assert time.monotonic() < deadline, f"{what} did not come"
        time.sleep(0.01)


@contextlib.contextmanager
def connected(server: Server, *, receives: int = 0) -> Iterator[socket.socket]:
    with socket.socket() as sock:
        if receives:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receives)
        sock.settimeout(30)
        sock.connect(("127.0.0.1", server.port))
        yield sock


def head(method: str, path: str, **headers: Any) -> bytes:
    lines = [f"{method} {path} HTTP/1.1", "Host: localhost", "Authorization: Bearer t-push"]
    lines += [f"{name.replace('_', '-')}: {value}" for name, value in headers.items()]
    return "\r\n".join([*lines, "", ""]).encode()


def test_a_stream_goes_out_as_it_is(shared: Server) -> None:
    for query, header in (("", "transfer-encoding"), ("?size=300000", "content-length")):
        reply = send(shared.port, "GET", f"/item/a/picture{query}", headers=TOKEN)
        assert (reply.status, reply.body) == (200, PIECE * 3)
        assert reply.headers["content-type"] == "image/x-fake"
        assert reply.headers["etag"] == '"1"'
        assert reply.headers["x-request-id"]
        assert header in reply.headers
    assert send(shared.port, "GET", "/item/a/picture?pieces=0", headers=TOKEN).body == b""


def test_a_stream_that_fails_before_it_begins_is_a_failure(shared: Server) -> None:
    closed = shared.shop.events.count("picture closed")
    reply = send(shared.port, "GET", "/item/missing/picture", headers=TOKEN)
    assert (reply.status, reply.json["error"], reply.json["message"]) == (404, "not_found", "no picture")
    assert shared.shop.events.count("picture closed") == closed + 1


@pytest.mark.parametrize(
    "path", ["/item/broken/picture", "/item/broken/picture?size=300001", "/item/a/picture?size=300001"]
)
def test_half_a_stream_does_not_pass_for_the_whole(shared: Server, path: str) -> None:
    with pytest.raises((http.client.IncompleteRead, ConnectionResetError)):
        send(shared.port, "GET", path, headers=TOKEN)


def test_a_stream_that_is_longer_than_it_said_breaks_the_connection(shared: Server) -> None:
    with connected(shared) as sock:
        sock.sendall(head("GET", "/item/a/picture?size=10"))
        received = b""
        with contextlib.suppress(ConnectionResetError):
            while part := sock.recv(65536):
                received += part
    assert len(received) < 2000


def test_a_follower_that_leaves_ends_the_stream(shared: Server) -> None:
    with connected(shared) as sock:
        sock.sendall(head("GET", "/follow"))
        assert _read_until(sock, b"first\n").startswith(b"HTTP/1.1 200")
        assert "follow closed" not in shared.shop.events
    until(lambda: "follow closed" in shared.shop.events, "the end of the stream")


def test_a_client_that_leaves_cancels_its_handler(server: Server) -> None:
    with connected(server) as sock:
        sock.sendall(head("POST", "/slow", Content_Length=0))
        until(lambda: "slow began" in server.shop.events, "the handler")
    until(lambda: "slow ended" in server.shop.events, "the end of the handler")
    until(lambda: bool(server.shop.audited), "a line in the audit log")
    assert (server.shop.audited[0].action, server.shop.audited[0].status) == ("POST /slow", 499)


def test_the_end_of_the_service_ends_streams_and_tells_those_who_wait(server: Server) -> None:
    answers: dict[str, Reply] = {}

    def ask(method: str, path: str) -> None:
        answers[path] = send(server.port, method, path, headers=TOKEN)

    threads = [threading.Thread(target=ask, args=asked) for asked in (("GET", "/follow"), ("POST", "/slow"))]
    with connected(server) as idle:
        for thread in threads:
            thread.start()
        until(lambda: "slow began" in server.shop.events, "the handler")
        until(lambda: len(server.connections.open) == 3, "the connections")
        until(lambda: "/follow" in server.app.metrics.text(), "the stream")
        server.stop()
        for thread in threads:
            thread.join(30)
        assert idle.recv(1) == b""
    assert answers["/follow"].body == b"first\n"
    assert answers["/slow"].status == 503
    assert (answers["/slow"].json["error"], answers["/slow"].headers["retry-after"]) == ("network", "1")
    assert {"follow closed", "slow ended"} <= {*server.shop.events}
    assert not server.connections.open


@pytest.mark.parametrize("path", ["/item/a/picture?pieces=1000", "/bulky?size=20000000"])
def test_a_client_that_stops_reading_is_let_go(server: Server, monkeypatch: pytest.MonkeyPatch, path: str) -> None:
    monkeypatch.setattr(exchange, "SLOW_READER", 0.2)
    with connected(server, receives=10_000) as sock:
        sock.sendall(head("GET", path))
        assert sock.recv(100).startswith(b"HTTP/1.1 200")
        until(lambda: not server.connections.open, "the end of the connection")
    if "picture" in path:
        assert server.shop.events == ["picture closed"]


def test_a_large_answer_arrives_whole(shared: Server) -> None:
    reply = send(shared.port, "GET", "/bulky?size=1000000", headers=TOKEN)
    assert len(reply.json["data"]) == 1_000_000


def test_an_upload_is_read_as_it_comes(server: Server) -> None:
    with connected(server) as sock:
        sock.sendall(head("PUT", "/item/a/picture", Content_Length=6) + b"abc")
        until(lambda: "piece" in server.shop.events, "the first piece")
        sock.sendall(b"def")
        assert b'{"size":6,"declared":6}' in _read_until(sock, b"}}")


def test_a_client_that_leaves_in_the_middle_of_its_upload(server: Server) -> None:
    with connected(server) as sock:
        sock.sendall(head("PUT", "/item/a/picture", Content_Length=6) + b"abc")
        until(lambda: "piece" in server.shop.events, "the first piece")
    until(lambda: "upload ClientLeft" in server.shop.events, "the end of the upload")
    with connected(server) as sock:
        sock.sendall(head("POST", "/item", Content_Length=6) + b"abc")
        until(lambda: len(server.connections.open) == 1, "the connection")
    until(lambda: len(server.shop.audited) == 2, "two lines in the audit log")
    assert [line.status for line in server.shop.audited] == [499, 499]


def test_an_upload_that_stalls_is_ended(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(protocol, "SLOW_BODY", 0.2)
    monkeypatch.setattr(protocol, "SLOW_HEAD", 0.1)
    with connected(server) as sock:
        sock.sendall(head("PUT", "/item/a/picture", Content_Length=6) + b"abc")
        with contextlib.suppress(ConnectionResetError):
            assert sock.recv(1) == b""
    until(lambda: "upload ClientLeft" in server.shop.events, "the end of the upload")


def test_requests_sent_without_reading_the_answers_wait(server: Server) -> None:
    def waits() -> bool:
        return any(found.writable is not None and found.task is None for found in server.connections.open)

    with connected(server, receives=10_000) as sock:
        sock.sendall(head("GET", "/bulky?size=200000") * 100)
        until(waits, "a full connection")
        assert _answered(server) < 100
        received = 0
        while received < 100 * 200_000:
            received += len(sock.recv(1_000_000))
        assert _answered(server) == 100


def test_a_client_that_never_reads_its_answers_is_let_go(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(protocol, "IDLE", 0.3)
    monkeypatch.setattr(protocol, "SLOW_HEAD", 0.1)
    with connected(server, receives=10_000) as sock:
        sock.sendall(head("GET", "/bulky?size=200000") * 100)
        assert sock.recv(100).startswith(b"HTTP/1.1 200")
        until(lambda: not server.connections.open, "the end of the connection")


def _answered(server: Server) -> int:
    line = next(line for line in server.app.metrics.text().splitlines() if "/bulky" in line)
    return int(line.rpartition(" ")[2])


def _read_until(sock: socket.socket, end: bytes) -> bytes:
    found = b""
    while end not in found:
        part = sock.recv(65536)
        assert part, f"the connection ended after {found!r}"
        found += part
    return found
