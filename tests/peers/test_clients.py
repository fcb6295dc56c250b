"""The clients that others wrote, against the runtime's own endpoint."""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest

from aenv.runtime.tokens import agent_token, digest, new_owner_token
from tests.peers.support import CLIENTS, FASTMCP_4, Client, interpreter, reloading, travel
from tests.support import FIXTURES, sandbox

pytestmark = pytest.mark.peer

LAB = FIXTURES / "lab"
TOOLS = [
    *("about", "add", "big", "cancel_itself", "cancelled", "chat", "chat_history", "chat_reset", "count", "custom"),
    *("die", "echo", "fail", "hang"),
    *("leave", "leave_async", "length", "mixed", "odd", "picture", "point", "polite_fail", "renamed"),
    *("search", "sleep", "sleeping", "slow_count", "steps", "stop_iteration", "wrong"),
]
ADD = {
    "name": "add",
    "description": "Add two numbers.",
    "inputSchema": {
        "type": "object",
        "properties": {
            "a": {"type": "integer", "description": "The first."},
            "b": {"type": "integer", "description": "The second.", "default": 2},
        },
        "required": ["a"],
        "additionalProperties": False,
    },
    "outputSchema": {
        "type": "object",
        "properties": {"result": {"type": "integer"}},
        "required": ["result"],
        "x-fastmcp-wrap-result": True,
    },
}
RENAMED = {
    "name": "renamed",
    "title": "A title",
    "description": "Another text.",
    "inputSchema": {"type": "object", "properties": {}, "additionalProperties": False},
    "annotations": {"readOnlyHint": True},
}
PICTURE = {"type": "image", "data": "iVBORw0KGgpyZXN0", "mimeType": "image/png"}
BAD = "add: argument 'a': input should be a valid integer, unable to parse string as an integer, found 'x'"


SOURCE = "from aenv import register_tool\n\n@register_tool\ndef {}() -> str:\n    return 'x'\n"


class Journey(NamedTuple):
    client: Client
    report: dict[str, Any]
    left: int
    """Exit code of the sandbox it was in."""


@pytest.fixture(scope="module", params=CLIENTS, ids=str)
def journey(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Journey:
    """A client's way through everything, in one process: most of its time would go into starting."""
    client: Client = request.param
    interpreter(client.venv)
    owner = digest(new_owner_token())
    file = tmp_path_factory.mktemp("reloaded") / "tools.py"
    file.write_text(SOURCE.format("first"))
    with (
        sandbox(LAB) as lab,
        sandbox(LAB, variables={"AENV_OWNER_TOKEN_SHA256": owner}) as guarded,
        reloading(file.parent) as reloaded,
    ):
        journeys = {
            "cancelled": {"url": f"{lab.url}/mcp"},
            "tools": {"url": f"{lab.url}/mcp"},
            "content": {"url": f"{lab.url}/mcp"},
            "guarded": {"url": f"{guarded.url}/mcp", "token": agent_token(owner)},
        }
        if client != FASTMCP_4:
            journeys["reloaded"] = {"url": reloaded, "file": str(file), "text": SOURCE.format("second")}
        report = travel(client, journeys)
        return Journey(client, report, lab.stop())


def result(*content: dict[str, Any], structured: Any = None, error: bool = False) -> dict[str, Any]:
    return {"content": list(content), "structured": structured, "error": error}


def made(client: Client, given: dict[str, Any]) -> dict[str, Any]:
    """What FastMCP adds: the value itself, made of what was checked against the schema."""
    if client.script != "fastmcp_client":
        return given
    structured = given["structured"]
    return {**given, "data": structured.get("result", structured)}


def text(text: str, structured: Any = None, *, error: bool = False) -> dict[str, Any]:
    return result({"type": "text", "text": text}, structured=structured, error=error)


def test_tools(journey: Journey) -> None:
    client = journey.client
    assert journey.report["tools"] == {
        "revision": "2026-07-28" if client.modern else "2025-11-25",
        "server": "lab 1.2.3",
        "tools": TOOLS,
        "add": ADD,
        "renamed": RENAMED,
        "text": text("héllo ✓"),
        "number": made(client, text("3", {"result": 3})),
        "object": made(client, text('{"x":1,"y":2}', {"x": 1, "y": 2})),
        "nested": made(client, text('["a","a"]', {"result": ["a", "a"]})),
        "image": result(PICTURE),
        "big": 3_000_000,
        "failed": text("ValueError: broken", error=True),
        "bad": text(BAD, error=True),
        "unknown": text("there is no tool 'addd'; did you mean 'add'?", error=True),
        "progress": [[1.0, 3.0, "step 1"], [2.0, 3.0, "step 2"], [3.0, 3.0, "step 3"]],
        "logs": {"info": [["info", "at step 1"], ["info", "at step 2"]], "error": []},
        "timeout": {"raised": "McpError" if client.venv == "mcp1" else "MCPError", "soon": True, "other": "awake"},
        "many": True,
        "end": {"sessions": 0, "deleted": [], "afterwards": []}
        if client.modern
        else {"sessions": 1, "deleted": [200], "afterwards": [404]},
    }


def test_a_cancelled_call_ends_and_another_goes_on(journey: Journey) -> None:
    """Clients of the older line tell nobody that a call was given up: it ends with their session."""
    assert journey.report["cancelled"] == {
        "raised": "CancelledError",
        "other": "awake",
        "heard": "0" if journey.client.venv == "mcp1" else "1",
        "heard at the end": "1",
    }


def test_content_where_data_is_declared(journey: Journey) -> None:
    """Clients refuse a result without structured content from a tool that publishes a schema for it."""
    blocks = [{"type": "text", "text": "look:"}, PICTURE]
    expected = made(journey.client, result(*blocks, structured={"result": blocks}))
    assert journey.report["content"] == {"mixed": expected}


def test_tokens(journey: Journey) -> None:
    assert journey.report["guarded"] == {"query": True, "header": True, "none": True, "wrong": True}


def test_a_reload_reaches_the_client(journey: Journey) -> None:
    """FastMCP 4 has no way to subscribe in the newer revision; in the older one it hears."""
    expected = {"before": ["first"], "heard": True, "after": ["second"]}
    assert journey.report.get("reloaded") == (None if journey.client == FASTMCP_4 else expected)


def test_the_sandbox_stops_in_good_order(journey: Journey) -> None:
    assert journey.left == 0
