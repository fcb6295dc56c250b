"""What a sandbox remembers of its calls, and since when nobody wants anything of it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from aenv import project
from aenv.models import to_json
from aenv.runtime import app as app_module
from aenv.runtime import loader
from aenv.runtime.access import Guard
from aenv.runtime.app import App
from aenv.runtime.context import Instance
from aenv.runtime.history import MOST_ARGUMENTS, MOST_ERROR, History, Noted
from aenv.runtime.service import Service
from aenv.runtime.tokens import Gate
from tests.runtime.test_mcp import call
from tests.runtime.wire import Session, modern, send, send_raw
from tests.support import Sandbox, sandbox


def recent(running: Sandbox, last: int) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = send(running.port, "GET", f"/history?last={last}").json["data"]
    return found


def outline(entry: dict[str, Any]) -> tuple[Any, ...]:
    return tuple(entry[key] for key in ("kind", "name", "arguments", "is_error", "error"))


def test_every_way_in_is_noted(lab: Sandbox) -> None:
    before = time.time()
    session = Session(lab.port)
    modern(lab.port, "tools/call", call("add", {"a": 1}))
    session.request("tools/call", call("echo", {"text": "ü"}))
    send(lab.port, "POST", "/tools/add", {"a": "5"})
    send(lab.port, "POST", "/tools/chat", {"message": "hi"})
    send(lab.port, "POST", "/task/reward?name=score", {"answer": "42"})
    send(lab.port, "POST", "/functions/shout", {"text": "a"})
    send(lab.port, "GET", "/custom/path?n=3")
    send(lab.port, "POST", "/reset", {"seed": 4})
    send(lab.port, "POST", "/exec", {"command": ["true"]})
    found = recent(lab, 9)
    assert [outline(entry) for entry in found] == [
        ("tool", "add", {"a": 1}, False, None),
        ("tool", "echo", {"text": "ü"}, False, None),
        ("tool", "add", {"a": 5}, False, None),
        ("tool", "chat", {"message": "hi"}, False, None),
        ("reward", "score", {"answer": "42"}, False, None),
        ("function", "shout", {"text": "a"}, False, None),
        ("function", "find", {"n": 3}, False, None),
        ("reset", "begin_again", {"seed": 4}, False, None),
        ("exec", "true", {"command": ["true"], "timeout": 60.0}, False, None),
    ]
    assert all(not entry["dropped"] and entry["seconds"] > 0 for entry in found)
    times = [before - 1, *(entry["at"] for entry in found), time.time() + 1]
    assert times == sorted(times)


def test_what_failed_says_so(lab: Sandbox) -> None:
    modern(lab.port, "tools/call", call("fail", {"message": "broken"}))
    modern(lab.port, "tools/call", call("odd", {}))
    send(lab.port, "POST", "/tools/polite_fail", {})
    send(lab.port, "POST", "/task/reward?name=nan", {})
    send(lab.port, "POST", "/exec", {"command": "exit 3"})
    send(lab.port, "POST", "/exec", {"command": "sleep 1000", "timeout": 0.1})
    found = recent(lab, 6)
    assert all(entry["is_error"] for entry in found)
    errors = [entry["error"] for entry in found]
    assert errors[0] == "ValueError: broken"
    assert "cannot be sent" in errors[1]
    assert "ask for less" in errors[2]
    assert "returned nan" in errors[3]
    assert errors[4:] == ["it returned 3", "it was killed after 0.1 s"]


def test_a_cancelled_call_says_so(lab: Sandbox) -> None:
    with send_raw(lab.port, "POST", "/tools/sleep", {"seconds": 60}, {"AEnv-Call-Id": "noted"}):
        while not send(lab.port, "DELETE", "/calls/noted").json["data"]["cancelled"]:
            continue
    deadline = time.monotonic() + 20
    while (found := recent(lab, 1)[0])["name"] != "sleep":
        assert time.monotonic() < deadline
    assert outline(found) == ("tool", "sleep", {"seconds": 60.0}, True, "the call was cancelled")


def test_what_only_looks_is_not_noted(lab: Sandbox) -> None:
    send(lab.port, "POST", "/tools/add", {"a": 77})
    for path in ("/health", "/info", "/tools", "/history", "/functions/list"):
        assert send(lab.port, "GET", path).status == 200
    assert recent(lab, 1)[0]["arguments"]["a"] == 77


def test_long_arguments_are_dropped_and_marked(lab: Sandbox) -> None:
    for size in (100, MOST_ARGUMENTS):
        send(lab.port, "POST", "/tools/length", {"text": "x" * size})
    short, long = recent(lab, 2)
    assert (short["arguments"], short["dropped"]) == ({"text": "x" * 100}, False)
    assert (long["arguments"], long["dropped"]) == (None, True)


@pytest.mark.parametrize("last", ["x", "-1", "1.5", "", "1&last=2"])
def test_a_number_that_is_none(lab: Sandbox, last: str) -> None:
    reply = send(lab.port, "GET", f"/history?last={last}")
    assert (reply.status, reply.json["code"]) == (422, "invalid")


def test_none_at_all_and_more_than_there_are(lab: Sandbox) -> None:
    assert recent(lab, 0) == []
    assert recent(lab, 10**9) == send(lab.port, "GET", "/history").json["data"]


WRAPPED = """
from aenv import register_tool
from mcp.server import MCPServer

server = MCPServer("notes")

@server.tool()
def theirs(text: str) -> str:
    return text

@server.tool()
def broken() -> str:
    raise ValueError("no")

@register_tool
def ours(text: str) -> str:
    return text
"""


def test_a_servers_own_tools_are_noted_too(tmp_path: Path) -> None:
    (tmp_path / "tools.py").write_text(WRAPPED)
    json = {"Content-Type": "application/json", "Accept": "application/json, text/event-stream"}
    hello = {"protocolVersion": "2025-11-25", "capabilities": {}, "clientInfo": {"name": "test", "version": "1"}}
    calls: list[tuple[str, dict[str, str]]] = [("theirs", {"text": "a"}), ("broken", {}), ("ours", {"text": "b"})]
    with sandbox(tmp_path) as running:

        def ask(method: str, params: dict[str, Any], headers: dict[str, str], **id: int) -> Any:
            body = {"jsonrpc": "2.0", "method": method, "params": params, **id}
            return send(running.port, "POST", "/mcp", body, {**json, **headers})

        session = {"Mcp-Session-Id": ask("initialize", hello, {}, id=0).headers["mcp-session-id"]}
        session["MCP-Protocol-Version"] = "2025-11-25"
        ask("notifications/initialized", {}, session)
        for name, arguments in calls:
            ask("tools/call", call(name, arguments), session, id=1)
            modern(running.port, "tools/call", call(name, arguments), json)
            send(running.port, "POST", f"/tools/{name}", arguments)
        ask("tools/call", {"arguments": {}}, session, id=2)
        ask("tools/call", [], session, id=3)  # type: ignore[arg-type]
        found = send(running.port, "GET", "/history").json["data"]
    assert [outline(entry)[:4] for entry in found] == [
        ("tool", name, arguments, name == "broken") for name, arguments in calls for _ in range(3)
    ]
    assert all("Error executing tool broken" in entry["error"] for entry in found[3:6])


# Bounds


def test_the_number_of_calls_is_bounded() -> None:
    history = History(most=3)
    for n in range(10):
        with Noted(history, "tool", "t", {"n": n}):
            pass
    assert [msgspec.json.decode(to_json(entry["arguments"])) for entry in history.last()] == [
        {"n": 7},
        {"n": 8},
        {"n": 9},
    ]
    assert len(history.last(2)) == 2


def test_the_bytes_of_arguments_are_bounded() -> None:
    history = History(most_bytes=1000)
    for _ in range(50):
        with Noted(history, "tool", "t", {"text": "x" * 300}):
            pass
        assert history.bytes <= 1000
    assert len(history.last()) == 3


def test_an_error_is_shortened() -> None:
    history = History()
    with pytest.raises(ValueError, match="xx"), Noted(history, "tool", "t", {}):
        raise ValueError("x" * 10_000)
    assert history.last()[0]["error"] == "x" * MOST_ERROR


def test_arguments_are_noted_as_they_were_given() -> None:
    history = History()
    given = {"items": [1, 2]}
    with Noted(history, "tool", "t", given):
        given["items"].clear()
    assert msgspec.json.decode(to_json(history.last()[0]["arguments"])) == {"items": [1, 2]}


def test_arguments_without_a_json_form_harm_nobody() -> None:
    class Odd:
        def model_dump(self, **_: object) -> object:
            raise RuntimeError("not today")

    history = History()
    for value in (object(), Odd(), "\ud800"):
        with Noted(history, "tool", "t", {"value": value}):
            pass
        assert history.last(1)[0]["dropped"]


def test_an_odd_error_can_be_shown() -> None:
    history = History()
    with Noted(history, "tool", "t", {}) as note:
        note.error = "half a pair: \ud800"
    assert b"half a pair: ?" in to_json(history.last())


# Idle

IDLE = """
import asyncio
from aenv import register_tool

held = asyncio.Event()

@register_tool
async def hold() -> str:
    await held.wait()
    return "held"
"""


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    found = Clock()
    monkeypatch.setattr(app_module, "monotonic", found)
    return found


@pytest.fixture
def served(tmp_path: Path, clock: Clock) -> Iterator[App]:
    (tmp_path / "idle_tools.py").write_text(IDLE)
    found = project.read(tmp_path, config_required=False)
    service = Service(found, Instance(working_directory=tmp_path), loader.load(found))
    yield App(service, Guard(Gate(None), loopback=True), max_body=1000)
    loader.unload(found)


async def ask(app: App, method: str, path: str, headers: dict[str, str] | None = None, body: bytes = b"") -> int:
    """The status of a request whose client waits for the answer."""
    pairs = [(b"host", b"localhost"), *((k.lower().encode(), v.encode()) for k, v in (headers or {}).items())]
    path, _, query = path.partition("?")
    scope = {"type": "http", "method": method, "path": path, "query_string": query.encode(), "headers": pairs}

    async def receive() -> AsyncIterator[dict[str, Any]]:
        yield {"type": "http.request", "body": body}
        await asyncio.get_running_loop().create_future()

    messages, sent = receive(), []

    async def send(message: Any) -> None:
        sent.append(message)

    await app(scope, messages.__anext__, send)
    return int(sent[0]["status"])


async def begun(app: App, asking: asyncio.Task[int]) -> None:
    while not app.calls:
        assert not asking.done(), asking
        await asyncio.sleep(0)
    await asyncio.sleep(0)  # its own first step


async def test_idle_begins_with_the_last_request(served: App, clock: Clock) -> None:
    clock.now += 5
    assert served.idle_seconds == 5
    assert await ask(served, "GET", "/info") == 200
    assert served.idle_seconds == 0
    clock.now += 7
    assert served.idle_seconds == 7


async def test_health_checks_do_not_count(served: App, clock: Clock) -> None:
    clock.now += 5
    assert await ask(served, "GET", "/health") == 200
    assert served.idle_seconds == 5


async def test_whoever_is_refused_does_not_count(served: App, clock: Clock) -> None:
    clock.now += 5
    assert await ask(served, "GET", "/nowhere") == 404
    assert await ask(served, "GET", "/info", {"Origin": "http://evil.example.com"}) == 403
    assert served.idle_seconds == 5


async def test_nobody_is_idle_while_a_call_runs(served: App, clock: Clock) -> None:
    calling = asyncio.create_task(ask(served, "POST", "/tools/hold"))
    await begun(served, calling)
    clock.now += 100
    assert served.idle_seconds == 0
    tool = served.service.loaded.tools["hold"].mark.function
    tool.__globals__["held"].set()  # type: ignore[attr-defined]
    assert await calling == 200
    assert served.idle_seconds == 0
    clock.now += 3
    assert served.idle_seconds == 3


async def test_listening_does_not_count(served: App, clock: Clock) -> None:
    meta = {
        "io.modelcontextprotocol/protocolVersion": "2026-07-28",
        "io.modelcontextprotocol/clientCapabilities": {},
    }
    params = {"notifications": {"toolsListChanged": True}, "_meta": meta}
    body = to_json({"jsonrpc": "2.0", "id": 1, "method": "subscriptions/listen", "params": params})
    headers = {"Mcp-Method": "subscriptions/listen", "MCP-Protocol-Version": "2026-07-28", "Accept": "*/*"}
    listening = asyncio.create_task(ask(served, "POST", "/mcp", headers, body))
    await begun(served, listening)
    clock.now += 50
    assert served.idle_seconds == 50
    served.close_streams()
    assert await listening == 200
    assert served.idle_seconds == 50
