"""The MCP endpoint on the wire, both kinds of revision."""

from __future__ import annotations

import http.client
import json
import threading
from typing import Any

import pytest

from tests.runtime.wire import META, Reply, Session, lines, modern, send, send_raw
from tests.support import Sandbox


def call(name: str, arguments: dict[str, Any] | None = None, **meta: Any) -> dict[str, Any]:
    return {"name": name, "arguments": arguments or {}, "_meta": {**META, **meta}}


# 2026-07-28


def test_discover(lab: Sandbox) -> None:
    result = modern(lab.port, "server/discover").json["result"]
    assert result["supportedVersions"] == ["2026-07-28"]
    assert result["capabilities"]["tools"] == {"listChanged": True}
    assert result["_meta"]["io.modelcontextprotocol/serverInfo"] == {"name": "lab", "version": "1.2.3"}


def test_list_shows_annotations_and_schemas(lab: Sandbox) -> None:
    result = modern(lab.port, "tools/list").json["result"]
    tools = {tool["name"]: tool for tool in result["tools"]}
    assert tools["renamed"]["title"] == "A title"
    assert tools["renamed"]["annotations"] == {"readOnlyHint": True}
    assert tools["add"]["outputSchema"]["properties"]["result"] == {"type": "integer"}
    assert "$defs" in tools["search"]["inputSchema"]
    assert (result["resultType"], result["ttlMs"], result["cacheScope"]) == ("complete", 0, "private")


def test_a_call_is_json_unless_something_is_said_before_the_result(lab: Sandbox) -> None:
    quiet = modern(lab.port, "tools/call", call("steps", {"n": 2}))
    assert quiet.headers["content-type"] == "application/json"
    assert quiet.json["result"]["content"] == [{"type": "text", "text": "done"}]
    loud = modern(lab.port, "tools/call", call("steps", {"n": 2}, progressToken="p"))
    assert loud.headers["content-type"] == "text/event-stream"
    progress, last = loud.events[:-1], loud.events[-1]
    assert [event["params"] for event in progress] == [
        {"progressToken": "p", "progress": n, "total": 2, "message": f"step {n}"} for n in (1, 2)
    ]
    assert last["result"]["content"][0]["text"] == "done"


def test_logs_are_sent_to_a_client_that_asks(lab: Sandbox) -> None:
    level = "io.modelcontextprotocol/logLevel"
    reply = modern(lab.port, "tools/call", call("steps", {"n": 1}, **{level: "info"}))
    assert reply.events[0]["method"] == "notifications/message"
    assert reply.events[0]["params"] == {"level": "info", "logger": "aenv.tool.steps", "data": "at step 1"}
    above = modern(lab.port, "tools/call", call("steps", {"n": 1}, **{level: "error"}))
    assert "result" in above.json


@pytest.mark.parametrize(
    ("change", "status", "code"),
    [
        ({"method": "no/such"}, 404, -32601),
        ({"method": "initialize"}, 404, -32601),
        ({"headers": {"Mcp-Method": "tools/list"}}, 400, -32020),
        ({"headers": {"Mcp-Name": "echo"}}, 400, -32020),
        ({"headers": {"MCP-Protocol-Version": "2027-01-01"}}, 400, -32020),
        ({"params": {"name": "add", "arguments": {"a": 1}, "_meta": {}}}, 400, -32602),
        ({"params": {"_meta": META}}, 400, -32602),
        ({"params": {"name": 5, "_meta": META}}, 400, -32602),
    ],
)
def test_requests_that_are_refused(lab: Sandbox, change: dict[str, Any], status: int, code: int) -> None:
    method = change.get("method", "tools/call")
    params = change.get("params", call("add", {"a": 1}))
    headers = {"Mcp-Name": "add", **change.get("headers", {})} if method == "tools/call" else {}
    reply = send(
        lab.port,
        "POST",
        "/mcp",
        {"jsonrpc": "2.0", "id": 9, "method": method, "params": params},
        {"MCP-Protocol-Version": "2026-07-28", "Mcp-Method": method, **headers},
    )
    assert (reply.status, reply.json["error"]["code"], reply.json["id"]) == (status, code, 9)


def test_an_unknown_revision_is_told_which_are_known(lab: Sandbox) -> None:
    meta = {**META, "io.modelcontextprotocol/protocolVersion": "2030-01-01"}
    reply = modern(lab.port, "tools/list", {"_meta": meta}, {"MCP-Protocol-Version": "2030-01-01"})
    assert (reply.status, reply.json["error"]["code"]) == (400, -32022)
    assert reply.json["error"]["data"] == {"supported": ["2026-07-28"], "requested": "2030-01-01"}


@pytest.mark.parametrize(
    ("body", "code"),
    [
        (b"{", -32700),
        (b"", -32700),
        (b"\xff\xfe", -32700),
        (b"[]", -32600),
        (b"5", -32600),
        (b'{"jsonrpc":"1.0","id":1,"method":"ping"}', -32600),
        (b'{"jsonrpc":"2.0","id":{},"method":"ping"}', -32600),
        (b'{"jsonrpc":"2.0","id":1,"result":{}}', -32600),
    ],
)
def test_bodies_that_are_no_request(lab: Sandbox, body: bytes, code: int) -> None:
    for headers in ({}, {"MCP-Protocol-Version": "2026-07-28"}):
        reply = send(lab.port, "POST", "/mcp", body, headers)
        assert reply.json["error"]["code"] == code
    assert modern(lab.port, "tools/list").status == 200


def test_nothing_acceptable(lab: Sandbox) -> None:
    assert send(lab.port, "POST", "/mcp", b"{}", {"Accept": "text/html"}).status == 406


def test_listening_for_changes(lab: Sandbox) -> None:
    params = {"notifications": {"toolsListChanged": True}, "_meta": META}
    headers = {"MCP-Protocol-Version": "2026-07-28", "Mcp-Method": "subscriptions/listen"}
    body = {"jsonrpc": "2.0", "id": 77, "method": "subscriptions/listen", "params": params}
    with send_raw(lab.port, "POST", "/mcp", body, headers) as sock:
        first = next(line for line in lines(sock) if line.startswith("data: "))
    message = json.loads(first.removeprefix("data: "))
    assert message["method"] == "notifications/subscriptions/acknowledged"
    assert message["params"]["_meta"] == {"io.modelcontextprotocol/subscriptionId": 77}


# Sessions: 2025-11-25 and older


@pytest.mark.parametrize("version", ["2025-11-25", "2025-06-18", "2025-03-26", "2024-11-05"])
def test_initialize_answers_with_the_version_asked_for(lab: Sandbox, version: str) -> None:
    assert Session(lab.port, version).result["protocolVersion"] == version


def test_initialize_offers_its_newest_to_a_stranger(lab: Sandbox) -> None:
    assert Session(lab.port, "1999-01-01").result["protocolVersion"] == "2025-11-25"


def test_a_session_from_beginning_to_end(lab: Sandbox) -> None:
    session = Session(lab.port)
    assert session.request("ping").json["result"] == {}
    assert session.request("tools/list").json["result"]["tools"]
    assert session.request("tools/call", call("add", {"a": 1})).json["result"]["structuredContent"] == {"result": 3}
    assert session.request("no/such").json["error"]["code"] == -32601
    assert session.request("logging/setLevel", {"level": "loud"}).json["error"]["code"] == -32602
    assert send(lab.port, "DELETE", "/mcp", headers=session.headers).status == 200
    assert session.request("ping").status == 404
    assert send(lab.port, "POST", "/mcp", {"jsonrpc": "2.0", "id": 1, "method": "ping"}).status == 400


def test_the_level_of_a_session(lab: Sandbox) -> None:
    session = Session(lab.port)
    events = session.request("tools/call", call("steps", {"n": 1})).events
    assert [event.get("method") for event in events] == ["notifications/message", None]
    assert session.request("logging/setLevel", {"level": "warning"}).json["result"] == {}
    assert "result" in session.request("tools/call", call("steps", {"n": 1})).json


def test_two_clients_with_the_same_request_ids_never_cancel_each_other(lab: Sandbox) -> None:
    first, second = Session(lab.port), Session(lab.port)
    replies: dict[str, Reply] = {}

    def sleep(name: str, session: Session) -> None:
        replies[name] = session.request("tools/call", call("sleep", {"seconds": 2}), id=7)

    threads = [threading.Thread(target=sleep, args=pair) for pair in (("first", first), ("second", second))]
    for thread in threads:
        thread.start()
    for session, thread in zip((first, second), threads, strict=True):
        while "error" not in session.request("tools/call", call("echo", {"text": "x"}), id=7).json:
            assert thread.is_alive()  # until id 7 of that session is known to be in flight
    assert second.notify("notifications/cancelled", {"requestId": 7}).status == 202
    for thread in threads:
        thread.join(30)
    assert replies["first"].json["result"]["content"][0]["text"] == "awake"
    assert replies["second"].json["error"]["code"] == -32800


def test_a_cut_connection_does_not_cancel_and_its_stream_can_be_resumed(lab: Sandbox) -> None:
    session = Session(lab.port)
    params = {"name": "steps", "arguments": {"n": 3}, "_meta": {"progressToken": "t"}}
    last = ""
    with session.raw("tools/call", params) as sock:
        for line in lines(sock):
            if line.startswith("id: "):
                last = line.removeprefix("id: ")
            if line.startswith("data: {"):
                break  # and cut
    resumed = send_raw(
        lab.port, "GET", "/mcp", None, {**session.headers, "Accept": "text/event-stream", "Last-Event-ID": last}
    )
    with resumed as sock:
        rest = [json.loads(line[6:]) for line in _until_result(sock)]
    assert rest[-1]["result"]["content"][0]["text"] == "done"
    assert sum(message.get("method") == "notifications/progress" for message in rest) == 2
    gone = {**session.headers, "Accept": "text/event-stream", "Last-Event-ID": "nope.3"}
    assert send(lab.port, "GET", "/mcp", headers=gone).status == 404


def _until_result(sock: Any) -> list[str]:
    found = []
    for line in lines(sock):
        if line.startswith("data: {"):
            found.append(line)
            if '"result"' in line:
                break
    return found


def test_closing_the_connection_cancels_in_2026(lab: Sandbox) -> None:
    def count(tool: str) -> int:
        result = modern(lab.port, "tools/call", call(tool)).json["result"]
        return int(result["structuredContent"]["result"])

    before, sleeping = count("cancelled"), count("sleeping")
    headers = {"MCP-Protocol-Version": "2026-07-28", "Mcp-Method": "tools/call", "Mcp-Name": "sleep"}
    body = {"jsonrpc": "2.0", "id": 1, "method": "tools/call", "params": call("sleep", {"seconds": 30})}
    sock = send_raw(lab.port, "POST", "/mcp", body, headers)
    while count("sleeping") == sleeping:
        continue
    sock.close()
    while count("sleeping") > sleeping:
        continue
    assert count("cancelled") == before + 1


def test_many_new_sessions_leave_a_busy_one_alone(lab: Sandbox) -> None:
    busy = Session(lab.port)
    with busy.raw("tools/call", call("sleep", {"seconds": 600}), id=7) as sock:
        while "error" not in busy.request("tools/call", call("echo", {"text": "x"}), id=7).json:
            continue  # until it is known to be in flight
        body = {"jsonrpc": "2.0", "id": 1, "method": "initialize", "params": {"protocolVersion": "2025-11-25"}}
        connection = http.client.HTTPConnection("127.0.0.1", lab.port)
        for _ in range(4200):
            connection.request("POST", "/mcp", json.dumps(body))
            assert connection.getresponse().read()
        connection.close()
        assert busy.request("ping").json["result"] == {}
        sock.setblocking(False)
        with pytest.raises(BlockingIOError):  # no answer yet: it was not cancelled
            sock.recv(1)
        busy.notify("notifications/cancelled", {"requestId": 7})
        sock.setblocking(True)
        assert sock.recv(65536)
