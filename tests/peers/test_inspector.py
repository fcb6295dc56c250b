"""The MCP inspector's command line against the runtime."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from aenv.runtime.tokens import agent_token, digest, new_owner_token
from tests.conformance.test_conformance import INSTALL, NODE, PREFIX
from tests.support import FIXTURES, Sandbox, sandbox

INSPECTOR = (
    PREFIX / "node_modules" / "@modelcontextprotocol" / "inspector" / "clients" / "launcher" / "build" / "index.js"
)
OWNER = digest(new_owner_token())
HEADER = ("--header", f"Authorization: Bearer {agent_token(OWNER)}")

pytestmark = [
    pytest.mark.peer,
    pytest.mark.node,
    pytest.mark.skipif(not INSPECTOR.exists(), reason=f"the inspector is not in {PREFIX}: {INSTALL}"),
    pytest.mark.skipif(NODE is None, reason=f"Node 22 or newer was not found: {INSTALL}"),
]


@pytest.fixture(scope="module")
def guarded() -> Iterator[Sandbox]:
    with sandbox(FIXTURES / "lab", variables={"AENV_OWNER_TOKEN_SHA256": OWNER}) as running:
        yield running


def inspect(running: Sandbox, home: Path, method: str, *options: str) -> subprocess.CompletedProcess[str]:
    assert NODE is not None
    command = [NODE, str(INSPECTOR), "--cli", f"{running.url}/mcp", "--transport", "http", "--method", method, *options]
    variables = {**os.environ, "HOME": str(home), "MCP_CATALOG_PATH": str(home / "mcp.json")}
    return subprocess.run(command, capture_output=True, text=True, timeout=60, env=variables, cwd=home)


def call(running: Sandbox, home: Path, tool: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    given = ("--tool-arg", *arguments) if arguments else ()
    return inspect(running, home, "tools/call", "--tool-name", tool, *given, *HEADER)


def test_tools_are_listed(guarded: Sandbox, tmp_path: Path) -> None:
    """Also strictly: it has no fault to find with the schemas."""
    ended = inspect(guarded, tmp_path, "tools/list", "--strict", *HEADER)
    assert ended.returncode == 0, ended.stderr
    listed = {tool["name"]: tool for tool in json.loads(ended.stdout)["tools"]}
    assert len(listed) == 30
    assert listed["search"] == {
        "name": "search",
        "description": "Search with a model as argument.",
        "inputSchema": {
            "type": "object",
            "properties": {"query": {"$ref": "#/$defs/Query"}},
            "required": ["query"],
            "additionalProperties": False,
            "$defs": {
                "Query": {
                    "type": "object",
                    "title": "Query",
                    "properties": {"text": {"type": "string"}, "limit": {"type": "integer", "default": 10}},
                    "required": ["text"],
                }
            },
        },
        "outputSchema": {
            "type": "object",
            "properties": {"result": {"type": "array", "items": {"type": "string"}}},
            "required": ["result"],
            "x-fastmcp-wrap-result": True,
        },
    }
    assert listed["renamed"]["title"] == "A title"
    assert listed["renamed"]["annotations"] == {"readOnlyHint": True}


@pytest.mark.parametrize(
    ("tool", "arguments", "result"),
    [
        ("add", ("a=1", "b=5"), {"content": [{"type": "text", "text": "6"}], "structuredContent": {"result": 6}}),
        (
            "search",
            ('query={"text": "a", "limit": 2}',),
            {"content": [{"type": "text", "text": '["a","a"]'}], "structuredContent": {"result": ["a", "a"]}},
        ),
        ("picture", (), {"content": [{"type": "image", "data": "iVBORw0KGgpyZXN0", "mimeType": "image/png"}]}),
    ],
)
def test_a_tool_is_called(
    guarded: Sandbox, tmp_path: Path, tool: str, arguments: tuple[str, ...], result: dict[str, Any]
) -> None:
    ended = call(guarded, tmp_path, tool, *arguments)
    assert ended.returncode == 0, ended.stderr
    assert json.loads(ended.stdout) == {**result, "isError": False}


def test_a_tools_failure_is_told(guarded: Sandbox, tmp_path: Path) -> None:
    ended = call(guarded, tmp_path, "fail", "message=broken")
    assert ended.returncode == 5
    assert json.loads(ended.stdout) == {"content": [{"type": "text", "text": "ValueError: broken"}], "isError": True}
    assert json.loads(ended.stderr)["error"]["code"] == "tool_is_error"


def test_without_a_token_it_is_refused(guarded: Sandbox, tmp_path: Path) -> None:
    ended = inspect(guarded, tmp_path, "tools/list")
    assert ended.returncode != 0
    assert ended.stdout == ""
