"""A service over a real socket: envelopes, who may ask, what is refused and how, and what the audit log sees."""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import json
import logging
from typing import Any
from urllib.parse import quote_from_bytes

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from aenv.errors import NetworkError, from_wire
from aenv.runtime.access import Hosts
from aenv.runtime.protocol import Connections
from aenv.web.app import App
from aenv.web.routes import Call, Route
from tests.runtime.wire import Reply, send
from tests.web.shop import FAILURES, LARGEST_UPLOAD, Server, Shop


def ask(
    server: Server, method: str, path: str, body: Any = None, token: str | None = "t-push", **headers: str
) -> Reply:
    given = {name.replace("_", "-"): value for name, value in headers.items()}
    if token is not None:
        given["Authorization"] = f"Bearer {token}"
    return send(server.port, method, path, body, given)


def failed(reply: Reply, status: int, error: str = "invalid") -> str:
    """The message of a failure; its envelope is checked."""
    found = reply.json
    assert (reply.status, found["code"], found["error"]) == (status, status, error)
    assert found["success"] is False
    assert found["data"] is None
    assert set(found) == {"success", "code", "message", "data", "error", "hint"}
    assert from_wire({"code": found["error"], "message": found["message"]}).message == found["message"]
    assert reply.headers["x-request-id"]
    return str(found["message"])


def test_answers_are_in_the_envelope(shared: Server) -> None:
    assert ask(shared, "GET", "/item/newest").json == {
        "success": True, "code": 0, "message": "ok", "data": "newest"
    }  # fmt: skip
    made = ask(shared, "POST", "/item?dryRun=true", {"name": "a", "unknown": 1}, Idempotency_Key="k")
    assert made.status == 201
    assert made.json["data"]["labels"] == {"key": "k", "dry": "True"}
    assert ask(shared, "DELETE", "/item/a").json["data"] is None
    assert ask(shared, "PUT", "/item/a/note", {"text": "n"}).json["data"] == {"text": "n"}
    assert ask(shared, "PUT", "/item/a/note").json["data"] is None
    found = ask(shared, "GET", "/item/a%20%C3%A4/", User_Agent="test").json["data"]
    assert found == {"name": "a ä", "owner": "ann", "token": "t-push", "local": True, "agent": "test"}
    assert ask(shared, "GET", "/item/a").headers["x-shop"] == "open"
    assert ask(shared, "GET", "/item/a", X_Forwarded_For="1.2.3.4").json["data"]["local"] is False


def test_a_page_has_its_total(shared: Server) -> None:
    page = ask(shared, "GET", "/item/?tag=a&tag=b&kind=old&exact=1&most=2.5&limit=3&offset=1").json
    assert [item["name"] for item in page["data"]] == ["b", "old-True-2.5", "0"]
    assert (page["total"], page["limit"], page["offset"]) == (11, 3, 1)
    page = ask(shared, "GET", "/item").json
    assert (page["total"], page["limit"], page["offset"]) == (9, 100, 0)
    for query in ("limit=0", "limit=100000", "limit=-1", "limit=x", "offset=-1", "offset=99999999999999999999"):
        name = query.partition("=")[0]
        assert f"query parameter {name!r}" in failed(ask(shared, "GET", f"/item?{query}"), 422)


def test_head_is_get_without_its_body(shared: Server) -> None:
    for path in ("/item/newest", "/item/a/picture?size=300000", "/follow", "/docs"):
        asked, headed = ask(shared, "GET", "/item/newest"), ask(shared, "HEAD", path)
        assert (headed.status, headed.body) == (200, b"")
        assert path != "/item/newest" or headed.headers["content-length"] == asked.headers["content-length"]
    failed(ask(shared, "GET", "/nowhere"), 404, "not_served")
    assert ask(shared, "HEAD", "/nowhere").status == 404


def test_what_is_not_served(shared: Server) -> None:
    reply = ask(shared, "GET", "/itm", token=None)
    failed(reply, 404, "not_served")
    assert reply.json["hint"] == "did you mean /item/?"
    for method in ("PATCH", "OPTIONS", "TRACE"):
        reply = ask(shared, method, "/item", token=None)
        failed(reply, 405)
        assert reply.headers["allow"] == "GET, HEAD, POST"
        assert "access-control-allow-origin" not in reply.headers


def test_request_ids(shared: Server) -> None:
    assert ask(shared, "GET", "/health", X_Request_Id="trace-1.a_B").headers["x-request-id"] == "trace-1.a_B"
    made = [ask(shared, "GET", "/health", X_Request_Id=bad).headers["x-request-id"] for bad in ("a b", "x" * 65, "é")]
    assert all(id.isalnum() and len(id) == 16 for id in made)
    assert len({*made}) == 3


def test_who_may_ask(shared: Server) -> None:
    for token, method, path, status, error in [
        (None, "GET", "/item", 401, "unauthorized"),
        ("", "GET", "/item", 401, "unauthorized"),
        ("t-wrong", "GET", "/item", 401, "unauthorized"),
        ("t-none", "GET", "/item", 403, "forbidden"),
        ("t-read", "POST", "/item", 403, "forbidden"),
        ("t-none", "GET", "/metrics", 403, "forbidden"),
    ]:
        reply = ask(shared, method, path, token=token)
        failed(reply, status, error)
        assert ("www-authenticate" in reply.headers) == (status == 401)
        assert "t-wrong" not in reply.body.decode()
    assert ask(shared, "GET", "/item", token="t-read").status == 200
    assert ask(shared, "POST", "/item", {"name": "a"}, token="t-admin").status == 201
    for path in ("/health", "/openapi.json", "/docs"):
        assert ask(shared, "GET", path, token=None).status == 200
    assert send(shared.port, "GET", "/item", headers={"Authorization": "bearer  t-read "}).status == 200
    assert send(shared.port, "GET", "/item", headers={"Authorization": "Basic t-read"}).status == 401


def test_pages_of_other_sites_may_not_ask(shared: Server) -> None:
    for headers in (
        {"Host": "evil.com"},
        {"Origin": "http://evil.com"},
        {"Origin": "null"},
        {"Sec-Fetch-Site": "cross-site"},
    ):
        for path in ("/health", "/nowhere", "/item"):
            failed(ask(shared, "GET", path, **headers), 403, "forbidden")
    assert ask(shared, "GET", "/health", Host="shop.test").status == 200
    assert ask(shared, "GET", "/health", Origin="http://localhost:3000").status == 200


def test_failures_have_their_status(shared: Server, caplog: pytest.LogCaptureFixture) -> None:
    statuses = {
        "conflict": (409, "conflict"),
        "network": (503, "network"),
        "busy": (429, "rate_limited"),
        "lost": (502, "sandbox_lost"),
        "start": (502, "start_failed"),
        "later": (501, "unsupported"),
        "plain": (500, "internal"),
        "half": (404, "not_found"),
        "bug": (500, "internal"),
    }
    assert set(statuses) == set(FAILURES)
    for how, (status, error) in statuses.items():
        with caplog.at_level(logging.INFO, "aenv.web"):
            reply = ask(shared, "POST", f"/fail/{how}", X_Request_Id=f"id-{how}")
        failed(reply, status, error)
        assert reply.headers.get("retry-after") == ("1" if status in (429, 503) else None)
    assert ask(shared, "POST", "/fail/conflict").json["hint"] == "take another name"
    assert reply.json["message"] == "the service failed"
    assert b"hunter2" not in reply.body
    assert "id-bug" in reply.json["hint"]
    logged = [record for record in caplog.records if record.exc_info and "id-bug" in record.getMessage()]
    assert len(logged) == 1
    assert "t-push" not in caplog.text


def test_bodies_are_bounded(shared: Server) -> None:
    large = json.dumps({"name": "x" * 100_001}).encode()
    assert "over 100000 bytes" in failed(ask(shared, "POST", "/item", large), 413, "too_large")
    assert _chunked(shared, "POST", "/item", [large[:60_000], large[60_000:]]).status == 413
    path = "/item/a/picture"
    data = b"x" * LARGEST_UPLOAD
    assert ask(shared, "PUT", path, data).json["data"] == {"size": LARGEST_UPLOAD, "declared": LARGEST_UPLOAD}
    began = shared.shop.events.count("upload began")
    failed(ask(shared, "PUT", path, data + b"x"), 413, "too_large")
    assert shared.shop.events.count("upload began") == began  # what says that it is too large is not even begun
    part = b"x" * 200_000
    assert _chunked(shared, "PUT", path, [part]).json["data"] == {"size": 200_000, "declared": None}
    assert _chunked(shared, "PUT", path, [part, part]).status == 413
    assert shared.shop.events[-1] == "upload TooLarge"


def _chunked(server: Server, method: str, path: str, parts: list[bytes]) -> Reply:
    """The answer to a body that does not say how long it is."""
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=30)
    with contextlib.closing(connection):
        headers = {"Authorization": "Bearer t-push", "Transfer-Encoding": "chunked"}
        connection.request(method, path, iter(parts), headers, encode_chunked=True)
        response = connection.getresponse()
        return Reply(response.status, dict(response.getheaders()), response.read())


@pytest.mark.parametrize(
    ("method", "path", "body"),
    [
        ("POST", "/item", b'{"name": "\xff"}'),
        ("POST", "/item", b'{"name": "\\ud800"}'),
        ("POST", "/item", b'{"name": "\\u0000"}'),
        ("POST", "/item", b"[" * 90_000),
        ("POST", "/item", b'{"name": "a", "extra": {"x": ' + b'{"x":' * 15_000),
        ("POST", "/item", b'{"name": "a", "extra": {"x": 1' + b"0" * 90_000 + b"}}"),
        ("POST", "/item", b""),
        ("GET", "/item/%00", None),
        ("GET", "/item/%FF", None),
        ("GET", "/item/%ED%A0%80", None),
        ("GET", "/item/a%2Fb", None),
        ("GET", "/item/%2E%2E%2F", None),
        ("GET", "/item?kind=%00", None),
        ("GET", "/item?tag=%FF", None),
        ("GET", "/item?tag=%ED%A0%80", None),
        ("GET", "/item?most=1e999", None),
        ("GET", f"/item?limit={'9' * 5000}", None),
        ("GET", "/item?" + "tag=a&" * 2000, None),
        ("GET", "/item/" + "x" * 60_000 + "/%00", None),
    ],
)
def test_bad_input_is_the_callers_fault(shared: Server, method: str, path: str, body: bytes | None) -> None:
    reply = ask(shared, method, path, body)
    assert 400 <= reply.status < 500
    assert reply.json["hint"] or reply.json["message"]


@settings(max_examples=60)
@given(path=st.binary(max_size=20), query=st.binary(max_size=20), body=st.binary(max_size=50))
def test_no_bytes_make_it_fail(shared: Server, path: bytes, query: bytes, body: bytes) -> None:
    where = f"{quote_from_bytes(path)}?tag={quote_from_bytes(query)}&limit={quote_from_bytes(query)}"
    assert ask(shared, "GET", f"/item/{where}").status < 500
    assert ask(shared, "GET", f"/item?tag={quote_from_bytes(query)}").status < 500
    assert ask(shared, "POST", "/item", body).status < 500


def test_the_audit_log_sees_what_changes_something_and_what_is_refused(server: Server) -> None:
    ask(server, "GET", "/item", token="t-read")
    ask(server, "GET", "/nowhere")
    ask(server, "POST", "/nowhere")
    assert server.shop.audited == []
    ask(server, "POST", "/item", {"name": "made"}, X_Request_Id="one")
    ask(server, "DELETE", "/item/old")
    ask(server, "POST", "/item", {})
    ask(server, "POST", "/item", {"name": "a"}, token="t-read")
    ask(server, "GET", "/item/a%0Ab" + "c" * 1000, token=None)
    ask(server, "GET", "/item/a", token="t-none")
    ask(server, "GET", "/nowhere", Host="evil.com")
    ask(server, "POST", "/fail/bug")
    found = [(line.owner, line.token, line.action, line.target, line.status) for line in server.shop.audited]
    assert found == [
        ("ann", "2", "POST /item/", "made", 201),
        ("ann", "2", "DELETE /item/{name}", "old", 200),
        ("ann", "2", "POST /item/", "", 422),
        ("ann", "1", "POST /item/", "", 403),
        ("", "", "GET /item/{name}", "a?b" + "c" * 253, 401),
        ("bob", "3", "GET /item/{name}", "a", 403),
        ("", "", "GET -", "", 403),
        ("ann", "2", "POST /fail/{how}", "bug", 500),
    ]
    assert server.shop.audited[0].request_id == "one"
    assert server.shop.audited[0].at.endswith("Z")


def test_metrics(server: Server) -> None:
    ask(server, "GET", "/item/a")
    ask(server, "GET", "/item/b")
    ask(server, "GET", "/nowhere/at/all")
    reply = ask(server, "GET", "/metrics")
    assert reply.headers["content-type"].startswith("text/plain")
    lines = reply.body.decode().splitlines()
    assert 'aenv_api_requests_total{method="GET",endpoint="/item/{name}",status="200"} 2' in lines
    assert 'aenv_api_requests_total{method="-",endpoint="-",status="404"} 1' in lines
    assert 'aenv_api_request_duration_ms_count{method="GET",endpoint="/item/{name}",status="200"} 2' in lines
    assert "aenv_items 3" in lines


class _Ill:
    async def health(self, call: Call) -> None:
        """Never well."""
        raise NetworkError("the store does not answer")


async def test_a_given_route_replaces_one_of_our_own() -> None:
    app = App(
        [Route("GET", "/health", _Ill().health, None)],
        title="Ill",
        authenticate=Shop().authenticate,
        guard=Hosts(loopback=True),
    )
    loop = asyncio.get_running_loop()
    listening = await loop.create_server(Connections(app), "127.0.0.1", 0)
    try:
        reply = await asyncio.to_thread(send, listening.sockets[0].getsockname()[1], "GET", "/health")
    finally:
        listening.close()
    failed(reply, 503, "network")
