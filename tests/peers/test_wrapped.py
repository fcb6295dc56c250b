"""Projects that bring a server of another library: our SDK and routes against it, and its own clients through us."""

from __future__ import annotations

import asyncio
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from aenv import CallTimeout, Environment, ToolResult, attach
from aenv.runtime.tokens import agent_token, digest, new_owner_token
from tests.peers.support import (
    FASTMCP_3,
    FASTMCP_4,
    LIBRARY,
    OFFICIAL_1,
    OFFICIAL_2,
    OFFICIAL_2_LEGACY,
    Client,
    command,
    interpreter,
    travel,
)
from tests.runtime.wire import META, modern, send
from tests.support import Sandbox, sandbox

pytestmark = pytest.mark.peer

NAMES = [
    "about",
    "cancelled",
    "fail",
    "greet",
    "late",
    "leave",
    "picture",
    "point",
    "refuse",
    "shout",
    "sleep",
    "tally",
]
NAMES += ["work"]
PICTURE = {"type": "image", "data": "iVBORw0KGgpyZXN0", "mimeType": "image/png"}
TOLD = {"instance_id": "local", "arguments": ["--verbose", "x"], "seed": 7}
JSON = {"Content-Type": "application/json"}
GRACE = 10.0
"""Seconds that calls in flight get when a sandbox stops, unless it is told otherwise."""


class Project(NamedTuple):
    """A project, the environment it runs in, and clients: the first keeps a stream open when it stops."""

    name: str
    venv: str
    clients: tuple[Client, ...]
    failure: str
    """How its library words what ``fail`` raises."""

    def __str__(self) -> str:
        return self.name


CASES = [
    Project("fastmcp4", "mcp2", (OFFICIAL_2_LEGACY, FASTMCP_4), "Error calling tool 'fail': broken"),
    Project("mcpserver2", "mcp2", (OFFICIAL_2, OFFICIAL_1), "Error executing tool fail"),
    Project("fastmcp3", "mcp1", (FASTMCP_3,), "Error calling tool 'fail': broken"),
    Project("fastmcp1", "mcp1", (OFFICIAL_1, OFFICIAL_2), "Error executing tool fail: broken"),
]


class Served:
    """A project's sandbox, guarded by tokens."""

    def __init__(self, project: Project, running: Sandbox, owner: str) -> None:
        self.project = project
        self.running = running
        self.port = running.port
        self.agent = agent_token(digest(owner))
        self.owner = owner
        self.headers = {"Authorization": f"Bearer {owner}", **JSON}
        self.mcp = f"{running.url}/mcp?token={self.agent}"

    def environment(self, **options: float) -> Environment:
        return Environment(self.project.name, provision=attach(self.running.url, self.owner), **options)  # type: ignore[arg-type]

    def post(self, path: str, body: Any, **headers: str) -> tuple[int, Any]:
        reply = send(self.port, "POST", path, body, {**self.headers, **headers})
        return reply.status, reply.json


@pytest.fixture(scope="module", params=CASES, ids=str)
def served(request: pytest.FixtureRequest) -> Iterator[Served]:
    project: Project = request.param
    owner = new_owner_token()
    variables = {"AENV_OWNER_TOKEN_SHA256": digest(owner), "AENV_SEED": "7", "LIBRARY": project.name}
    python = interpreter(project.venv)
    with sandbox(LIBRARY, arguments=["--verbose", "x"], variables=variables, python=python) as running:
        yield Served(project, running, owner)


def text(text: str) -> list[dict[str, Any]]:
    return [{"type": "text", "text": text}]


@pytest.mark.parametrize("project", CASES, ids=str)
def test_a_name_taken_twice_is_an_error(project: Project, tmp_path: Path) -> None:
    source = (LIBRARY / "src" / "custom_env.py").read_text()
    (tmp_path / "twice.py").write_text(source.replace("def shout(", "def greet("))
    with pytest.raises(RuntimeError, match=r"tool 'greet' is registered twice: .*twice\.py:\d+ and in the MCP"):
        with sandbox(tmp_path, python=interpreter(project.venv), variables={"LIBRARY": project.name}):
            pass


async def test_a_tool_that_calls_exit_ends_nothing(served: Served) -> None:
    async with served.environment() as env:
        result = await env.call_tool("leave")
        assert result.is_error
        assert (await env.call_tool("greet", {"name": "Ada"})).text == "Hello, Ada!"
    assert served.post("/tools/leave", {})[0] == 500
    assert served.post("/tools/greet", {"name": "Ada"})[0] == 200


async def test_a_call_limit_is_the_platforms_failure(served: Served) -> None:
    async with served.environment() as env:
        with pytest.raises(CallTimeout, match="late\\(\\) took longer than 2 s"):
            await env.call_tool("late")


async def test_the_sdk_sees_both_kinds_of_tools(served: Served) -> None:
    async with served.environment() as env:
        listed = {tool["name"].partition("/")[2]: tool for tool in await env.list_tools()}
        assert sorted(listed) == NAMES
        assert listed["greet"]["description"] == "Greet somebody."
        assert listed["greet"]["inputSchema"]["required"] == ["name"]
        assert listed["shout"]["description"] == "Make it loud."
        assert set(listed["shout"]["inputSchema"]["properties"]) == {"text", "mark"}
        assert listed["about"]["inputSchema"]["properties"] == {}
        assert (await env.get_env_info())["tools"] == list(dict.fromkeys([*_ours(), *listed]))


def _ours() -> list[str]:
    return ["shout", "picture", "about", "refuse", "late"]


async def test_the_sdk_calls_the_servers_tools(served: Served) -> None:
    async with served.environment() as env:
        assert (await env.call_tool("greet", {"name": "Ann"})).content == text("Hello, Ann!")
        assert (await env.call_tool("point", {"x": 1, "y": 2})).structured == {"x": 1, "y": 2}
        assert (await env.call_tool("work", {"n": 2})).content == text("worked")
        assert await env.call_tool("fail") == ToolResult(content=text(served.project.failure), is_error=True)
        bad = await env.call_tool("greet", {"name": []})
        assert (bad.is_error, "name" in bad.text) == (True, True)
        assert (await env.call_tool("nothing")).is_error


async def test_the_sdk_calls_our_tools_beside_them(served: Served) -> None:
    async with served.environment() as env:
        assert (await env.call_tool("shout", {"text": "hey"})).content == text("HEY!")
        assert (await env.call_tool("picture")).content == [PICTURE]
        assert (await env.call_tool("about")).structured == TOLD
        assert await env.call_tool("refuse") == ToolResult(content=text("ask for less"), is_error=True)
        assert await env.call_reward({"answer": "42"}) == 1.0
        assert await env.check_health() == {"status": "success"}


async def test_many_calls_at_once(served: Served) -> None:
    async with served.environment() as env:
        names = [f"caller {n}" for n in range(50)]
        found = await asyncio.gather(*(env.call_tool("greet", {"name": name}) for name in names))
    assert [result.text for result in found] == [f"Hello, {name}!" for name in names]


async def test_a_call_that_is_given_up_ends_in_the_server(served: Served) -> None:
    async with served.environment() as env:
        before = int((await env.call_tool("cancelled")).text)
        with pytest.raises(CallTimeout):
            await env.call_tool("sleep", {"seconds": 600}, timeout=0.3)
    assert served.post("/tools/cancelled", {})[1]["data"]["content"] == text(str(before + 1))


def test_plain_http(served: Served) -> None:
    reply = send(served.port, "GET", "/tools", headers=served.headers)
    assert sorted(tool["name"] for tool in reply.json["data"]) == NAMES
    status, greeted = served.post("/tools/greet", {"name": "Bo"})
    assert (status, greeted["data"]["content"]) == (200, text("Hello, Bo!"))
    assert served.post("/tools/work", {"n": 1})[1]["data"]["content"] == text("worked")
    status, failed = served.post("/tools/fail", {})
    assert (status, failed["success"]) == (500, False)
    assert failed["error"].endswith(served.project.failure)
    assert served.post("/tools/shout", {"text": "hey"}) == (200, {"success": True, "data": "HEY!"})
    assert served.post("/tools/shout", {})[0] == 422
    assert served.post("/tools/nothing", {})[0] == 404
    assert served.post("/task/reward", {"answer": "41"}) == (200, {"success": True, "data": 0.0})


def test_progress_in_the_newer_revision(served: Served) -> None:
    """Also where the library does not speak it."""
    parameters = {"name": "work", "arguments": {"n": 2}, "_meta": {**META, "progressToken": "p"}}
    reply = modern(served.port, "tools/call", parameters, served.headers)
    *notes, result = reply.events
    progress = [note["params"] for note in notes if note["method"] == "notifications/progress"]
    assert [(p["progressToken"], p["progress"], p["total"], p["message"]) for p in progress] == [
        ("p", 1, 2, "step 1"),
        ("p", 2, 2, "step 2"),
    ]
    assert result["result"]["content"] == text("worked")


@pytest.mark.parametrize("path", ["/mcp", "/tools/tally"])
def test_a_call_id_is_answered_once(served: Served, path: str) -> None:
    def call(id: str) -> bytes:
        headers = {**served.headers, "AEnv-Call-Id": id}
        if path == "/mcp":
            return modern(served.port, "tools/call", {"name": "tally", "arguments": {}}, headers).body
        return send(served.port, "POST", path, {}, headers).body

    first = call(f"{path}-1")
    assert call(f"{path}-1") == first
    assert call(f"{path}-2") != first
    assert call(f"{path}-1") == first


def test_tokens_guard_it(served: Served) -> None:
    hello = {"jsonrpc": "2.0", "id": 1, "method": "initialize", "params": {}}
    assert send(served.port, "POST", "/mcp", hello, JSON).status == 401
    assert send(served.port, "GET", "/mcp").status == 401
    assert modern(served.port, "tools/list", headers=JSON).status == 401
    assert modern(served.port, "tools/list", headers={"Authorization": "Bearer wrong", **JSON}).status == 401
    assert send(served.port, "POST", f"/task/reward?token={served.agent}", {"answer": "42"}).status == 401
    agent = {"Authorization": f"Bearer {served.agent}", **JSON}
    assert send(served.port, "POST", "/task/reward", {"answer": "42"}, agent).status == 403
    assert modern(served.port, "tools/list", headers=agent).status == 200
    assert send(served.port, "GET", "/health").json == {"success": True, "data": {"status": "success"}}


def test_its_clients(served: Served) -> None:
    for client in served.project.clients:
        orders = {
            "wrapped": {"url": served.mcp},
            "guarded": {"url": f"{served.running.url}/mcp", "token": served.agent},
        }
        report = travel(client, orders)
        single = client.modern and served.project.venv == "mcp2"
        assert report["wrapped"] == {
            "revision": "2026-07-28" if single else "2025-11-25",
            "tools": NAMES,
            "worked": "worked",
            "progress": [[1.0, 2.0, "step 1"], [2.0, 2.0, "step 2"]],
            "point": {"x": 1, "y": 2},
            "failed": True,
            "shout": text("HEY?"),
            "picture": [PICTURE],
            "about": TOLD,
            "ours": [[1.0, 1.0, "told"]],
            "refused": [True, True],
            "resources": ["data://greeting", "data://item/{id}"],
            "read": ["Hello from a resource", "item 7"],
            "prompts": ["ask"],
            "prompt": "Tell me about rain.",
            "second": "Hello, Bo!",
            "slow": [False, "awake"],
            "end": {"sessions": 0, "deleted": [], "afterwards": []}
            if single
            else {"sessions": 1, "deleted": [200], "afterwards": [404]},
        }
        assert report["guarded"] == {"query": True, "header": True, "none": True, "wrong": True}


def test_it_stops_at_once_beside_an_open_stream(served: Served) -> None:
    """The last test: it ends the sandbox."""
    run = command(served.project.clients[0], {"hold": {"url": served.mcp}})
    client = subprocess.Popen(run, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    try:
        assert client.stdout is not None
        begun = time.monotonic()
        assert client.stdout.readline() == "listening\n"
        assert time.monotonic() - begun < GRACE, "the stream was slow to begin"
        begun = time.monotonic()
        assert served.running.stop() == 0
        assert time.monotonic() - begun < GRACE / 2
    finally:
        client.kill()
        client.communicate()
