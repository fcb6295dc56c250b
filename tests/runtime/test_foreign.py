"""Tools that somebody else describes and validates, and failures of what an author's function uses."""

from __future__ import annotations

from typing import Any

import pytest

from aenv import project
from aenv.errors import AEnvError, CallTimeout, Invalid, ModelError, NetworkError, SandboxLost, StartFailed
from aenv.models import ToolResult
from aenv.runtime import registry
from aenv.runtime.context import Context, Instance
from aenv.runtime.loader import Loaded
from aenv.runtime.mcp.endpoint import Endpoint
from aenv.runtime.service import Service
from tests.support import FIXTURES

LISTED = {
    "name": "theirs",
    "title": "Theirs",
    "description": "Of somebody else.",
    "inputSchema": {"type": "object", "properties": {"context": {"type": "string"}}},
    "outputSchema": {"type": "object"},
    "annotations": {"readOnlyHint": True},
}


def offering(run: Any) -> tuple[Service, Loaded]:
    with registry.collect() as marks:
        registry.register_foreign(LISTED, run)
    loaded = Loaded(marks)
    return Service(project.read(FIXTURES / "lab"), Instance(), loaded), loaded


async def test_a_tool_is_listed_and_called_as_it_is() -> None:
    came: list[Any] = []

    async def run(arguments: dict[str, Any], context: Context) -> ToolResult:
        came.append(arguments)
        return ToolResult(content=[], structured={"a": 1})

    service, loaded = offering(run)
    assert Endpoint(service).tools() == [LISTED]
    tool = loaded.tools["theirs"]
    found = await service.call_tool(tool, tool.decode(b'{"context": "mine", "more": [1]}'), Context())
    assert (came, found["isError"]) == ([{"context": "mine", "more": [1]}], False)
    with pytest.raises(Invalid, match="not a JSON object"):
        tool.decode(b"[1]")


@pytest.mark.parametrize("failure", [SandboxLost("gone"), CallTimeout("slow"), ModelError("silent")])
async def test_what_it_uses_failed_and_no_model_reads_of_it(failure: AEnvError) -> None:
    async def run(arguments: dict[str, Any], context: Context) -> ToolResult:
        raise failure

    service, loaded = offering(run)
    with pytest.raises(type(failure)):
        await service.call_tool(loaded.tools["theirs"], {}, Context())


@pytest.mark.parametrize("failure", [Invalid("wrong"), NetworkError("of the tool's own"), ValueError("wrong")])
async def test_what_it_says_itself_is_for_the_model(failure: Exception) -> None:
    async def run(arguments: dict[str, Any], context: Context) -> ToolResult:
        raise failure

    service, loaded = offering(run)
    assert (await service.call_tool(loaded.tools["theirs"], {}, Context()))["isError"]


def test_a_project_has_a_server_or_tools_of_one() -> None:
    with registry.collect() as marks:
        registry.register_foreign(LISTED, print)
    with pytest.raises(StartFailed, match="has an MCP server, and tool 'theirs' of another"):
        Loaded(marks, [object()])
