"""The clients that others wrote, against the runtime's own endpoint."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from aenv.runtime.tokens import agent_token, digest, new_owner_token
from tests.peers.support import (
    CLIENTS,
    FASTMCP_4,
    Client,
    reloading,
    travel,
)
from tests.support import FIXTURES, sandbox

pytestmark = pytest.mark.peer

each_client = pytest.mark.parametrize("client", CLIENTS, ids=str)
LAB = FIXTURES / "lab"
TOOLS = [
    *("about", "add", "big", "cancel_itself", "cancelled", "count", "custom", "die", "echo", "fail", "hang"),
    *("helper", "leave", "leave_async", "length", "mixed", "odd", "picture", "point", "polite_fail", "renamed"),
    *("search", "sleep", "slow_count", "steps", "stop_iteration", "wrong"),
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
    "outputSchema": {"type": "object", "properties": {"result": {"type": "integer"}}, "required": ["result"]},
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


def result(*content: dict[str, Any], structured: Any = None, error: bool = False) -> dict[str, Any]:
    return {"content": list(content), "structured": structured, "error": error}


def text(text: str, structured: Any = None, *, error: bool = False) -> dict[str, Any]:
    return result({"type": "text", "text": text}, structured=structured, error=error)


@each_client
def test_tools(client: Client) -> None:
    with sandbox(LAB) as running:
        report = travel(client, "tools", f"{running.url}/mcp")
        assert running.stop() == 0
    structured = {
        "number": text("3", {"result": 3}),
        "object": text('{"x":1,"y":2}', {"x": 1, "y": 2}),
        "nested": text('["a","a"]', {"result": ["a", "a"]}),
    }
    if client.script == "fastmcp_client":  # makes objects of what fits the schema, and nothing of what does not
        structured = {name: {**given, "data": given["structured"]} for name, given in structured.items()}
    assert report == {
        "revision": "2026-07-28" if client.modern else "2025-11-25",
        "server": "lab 1.2.3",
        "tools": TOOLS,
        "add": ADD,
        "renamed": RENAMED,
        "text": text("héllo ✓"),
        **structured,
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


@each_client
def test_a_cancelled_call_ends_and_another_goes_on(client: Client) -> None:
    """Clients of the older line tell nobody that a call was given up: it ends with their session."""
    with sandbox(LAB) as running:
        report = travel(client, "cancelled", f"{running.url}/mcp")
    assert report == {
        "raised": "CancelledError",
        "other": "awake",
        "heard": "0" if client.venv == "mcp1" else "1",
        "heard at the end": "1",
    }


@each_client
def test_content_where_data_is_declared(client: Client) -> None:
    """Clients refuse a result without structured content from a tool that publishes a schema for it."""
    with sandbox(LAB) as running:
        report = travel(client, "content", f"{running.url}/mcp")
    assert report["mixed"]["content"] == [{"type": "text", "text": "look:"}, PICTURE]


@each_client
def test_tokens(client: Client) -> None:
    owner = digest(new_owner_token())
    with sandbox(LAB, variables={"AENV_OWNER_TOKEN_SHA256": owner}) as running:
        report = travel(client, "guarded", f"{running.url}/mcp", token=agent_token(owner))
    assert report == {"query": "in", "header": "in", "none": True, "wrong": True}


@pytest.mark.parametrize("client", [client for client in CLIENTS if client != FASTMCP_4], ids=str)
def test_a_reload_reaches_the_client(client: Client, tmp_path: Path) -> None:
    """FastMCP 4 has no way to subscribe in the newer revision; in the older one it hears."""
    source = "from aenv import register_tool\n\n@register_tool\ndef {}() -> str:\n    return 'x'\n"
    file = tmp_path / "tools.py"
    file.write_text(source.format("first"))
    with reloading(tmp_path) as url:
        report = travel(client, "reloaded", url, file=str(file), text=source.format("second"))
    assert report == {"before": ["first"], "heard": True, "after": ["second"]}
