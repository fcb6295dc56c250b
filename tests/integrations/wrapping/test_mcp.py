"""MCP servers as projects: the MCP project's own example, a command and an address, in an instance and by hand."""

from __future__ import annotations

import asyncio
import json
import signal
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import psutil
import pytest

from aenv import project
from aenv.engines.process.engine import ProcessEngine
from aenv.errors import NetworkError, SandboxLost
from aenv.hub import reading
from aenv.integrations.wrapping import mcp
from aenv.runtime.context import Context, Instance
from tests.integrations.wrapping.conftest import COMMAND
from tests.support import ROOT

SMALL = [sys.executable, "-m", "tests.integrations.wrapping.notes"]
"""A server in Python, for what needs no Node."""


def found(source: mcp.Source, cwd: Path = ROOT) -> Any:
    return mcp.look(source, cwd=cwd)


@asynccontextmanager
async def running(source: mcp.Source, stored: dict[str, Any], cwd: Path = ROOT) -> AsyncIterator[mcp.Server]:
    server = mcp.Server(source, stored)
    await server.start(Context(Instance(working_directory=cwd)))
    try:
        yield server
    finally:
        await server.stop()


def children() -> list[psutil.Process]:
    """The servers, among whatever other tests have begun in this process, which may end at any moment."""
    found = []
    for one in psutil.Process().children(recursive=True):
        with suppress(psutil.Error):
            if "notes" in " ".join(one.cmdline()):
                found.append(one)
    return found


@pytest.fixture(scope="module")
def small() -> dict[str, Any]:
    return found(SMALL).stored


async def test_what_a_server_answers_is_the_tools(small):
    told: list[Any] = []
    ctx = Context(notify=lambda _, given: told.append((given["progress"], given["total"])), progress_token=1)
    async with running(SMALL, small) as server:
        assert (await server.call("keep", {"title": "a", "text": "b"})).structured == {"result": 1}
        for name, arguments in (("keep", {"title": "a"}), ("raises", {}), ("unknown", {})):
            assert (await server.call(name, arguments)).is_error
        assert [block["type"] for block in (await server.call("picture")).content] == ["image"]
        await server.call("steps", {"count": 3}, ctx)
        assert told == [(1, 3), (2, 3), (3, 3)]
        assert [one["uri"] for one in await server.resources()] == ["notes://all"]
        assert (await server.resource("notes://all"))["contents"][0]["text"] == "a: b"
        await server.restart()
        assert (await server.resource("notes://all"))["contents"][0]["text"] == ""
    assert children() == []


async def test_a_call_that_is_given_up_harms_no_other(small):
    async with running(SMALL, small) as server:
        await server.call("keep", {"title": "a", "text": "b"})
        call = asyncio.create_task(server.call("hangs"))
        while not (await server.call("hanging")).structured["result"]:
            await asyncio.sleep(0.01)
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
        assert (await server.call("keep", {"title": "c", "text": "d"})).structured == {"result": 2}


async def test_a_server_that_dies_is_no_observation_and_a_reset_brings_another(small):
    async with running(SMALL, small) as server:
        call = asyncio.create_task(server.call("hangs"))
        while not (await server.call("hanging")).structured["result"]:
            await asyncio.sleep(0.01)
        assert (await server.health())["status"] == "healthy"
        for one in children():
            one.send_signal(signal.SIGKILL)
        with pytest.raises(SandboxLost, match="is gone"):
            await call
        with pytest.raises(SandboxLost, match="is gone"):
            await server.call("hanging")
        assert (await server.health())["status"] == "unhealthy"
        await server.restart()
        assert (await server.call("hanging")).structured == {"result": False}
        assert (await server.health())["status"] == "healthy"


async def test_a_reset_in_the_middle_of_a_call_is_no_observation(small):
    async with running(SMALL, small) as server:
        call = asyncio.create_task(server.call("hangs"))
        while not (await server.call("hanging")).structured["result"]:
            await asyncio.sleep(0.01)
        await server.restart()
        with pytest.raises(SandboxLost):
            await call


async def test_a_server_that_is_another_now_is_not_asked(small):
    other = json.loads(json.dumps(small))
    other["tools"][0]["inputSchema"]["properties"]["more"] = {"type": "string"}
    other["tools"].append({"name": "vanished", "inputSchema": {"type": "object"}})
    async with running(SMALL, other) as server:
        with pytest.raises(SandboxLost, match=f"vanished gone; {small['tools'][0]['name']} changed") as raised:
            await server.call("hanging")
    assert "--update" in (raised.value.hint or "")


@pytest.mark.parametrize(
    ("source", "said"),
    [
        (["no-such-program"], "there is no program 'no-such-program'"),
        (["sh", "-c", "echo not today >&2; exit 3"], "not today"),
        (["cat"], "is no MCP server"),
        ("http://127.0.0.1:9/mcp", "cannot be reached"),
    ],
)
def test_what_is_no_server_says_so(source, said):
    with pytest.raises(NetworkError) as raised:
        mcp.look(source)
    assert said in str(raised.value)
    assert raised.value.hint


# An address


@pytest.fixture
def remote() -> Iterator[tuple[subprocess.Popen[str], str]]:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = str(free.getsockname()[1])
    process = subprocess.Popen([*SMALL, port], cwd=ROOT, stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    assert "running" in next(line for line in process.stderr if "running on" in line or "error" in line.lower())
    try:
        yield process, f"http://127.0.0.1:{port}/mcp"
    finally:
        process.kill()
        process.wait()
        process.stderr.close()


async def test_a_remote_server_that_dies_in_a_call_is_no_observation(remote):
    process, url = remote
    stored = (await asyncio.to_thread(mcp.look, url)).stored
    async with running(url, stored) as server:
        assert (await server.call("keep", {"title": "a", "text": "b"})).structured == {"result": 1}
        assert (await server.call("raises")).is_error
        call = asyncio.create_task(server.call("hangs"))
        while not (await server.call("hanging")).structured["result"]:
            await asyncio.sleep(0.01)
        process.kill()
        with pytest.raises(SandboxLost):
            await call
        with pytest.raises(SandboxLost):
            await server.call("hanging")


class Proxied(BaseHTTPRequestHandler):
    """A server of one tool, before which a proxy has begun to answer calls by itself."""

    kind, said = "", ""

    def do_POST(self) -> None:
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        offers = {"protocolVersion": "2025-11-25", "capabilities": {"tools": {}}}
        answers = {
            "initialize": {"result": {**offers, "serverInfo": {"name": "proxied", "version": "1"}}},
            "tools/list": {"result": {"tools": [LISTED]}},
        }
        kind, body = "application/json", ""
        if asked["method"] == "tools/call":
            kind, body = self.kind, self.said.replace("ID", str(asked["id"]))
        elif "id" in asked:
            other = {"error": {"code": -32601, "message": "unknown"}}
            body = json.dumps({"jsonrpc": "2.0", "id": asked["id"], **answers.get(asked["method"], other)})
        self.send_response(200 if body else 202)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body.encode())

    def do_GET(self) -> None:
        self.send_error(405)

    def log_message(self, *_: Any) -> None:
        pass


LISTED = {"name": "look", "inputSchema": {"type": "object"}}


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        ("text/html", "<h1>Log in</h1>"),
        ("application/json", '{"error": "upstream"}'),
        ("application/json", '{"jsonrpc": "2.0", "id": ID, "result": {"content": "no list"}}'),
    ],
)
async def test_an_answer_that_is_no_mcp_is_no_observation(monkeypatch, kind, said):
    monkeypatch.setattr(Proxied, "kind", kind)
    monkeypatch.setattr(Proxied, "said", said)
    with ThreadingHTTPServer(("127.0.0.1", 0), Proxied) as proxied:
        Thread(target=proxied.serve_forever, daemon=True).start()
        try:
            async with running(f"http://127.0.0.1:{proxied.server_port}/mcp", {"tools": [LISTED]}) as server:
                for _ in range(2):
                    with pytest.raises(SandboxLost):
                        await server.call("look")
                assert (await server.health())["status"] == "unhealthy"
        finally:
            proxied.shutdown()


async def test_a_hub_reads_a_project_whose_server_it_cannot_reach(remote, aenv, here):
    process, url = remote
    made = await asyncio.to_thread(aenv, "add", "mcp", url, "-o", "json")
    assert (made.data["name"], made.data["network"]) == ("notes", [url.split("/")[2]])
    process.kill()
    async with ProcessEngine() as engine:
        contents = await reading.read(engine, project.read(here / "notes"), owner="ann", stamp="1")
    assert {tool.name for tool in contents.tools} == set(made.data["tools"])
    assert contents.tools[0].input_schema["type"] == "object"
    assert [reward.name for reward in contents.rewards] == ["answers"]


LOUD = """
import json, sys
for line in sys.stdin:
    asked = json.loads(line)
    offers = {"protocolVersion": "2025-11-25", "capabilities": {"tools": {}}}
    offers["serverInfo"] = {"name": "loud", "version": "1"}
    tools = {"tools": [{"name": "look\\x1b[2J", "inputSchema": {"type": "object"}}]}
    answer = {"initialize": {"result": offers}, "tools/list": {"result": tools}}.get(asked["method"])
    if "id" in asked:
        answer = answer or {"error": {"code": -32601, "message": "unknown"}}
        print(json.dumps({"jsonrpc": "2.0", "id": asked["id"], **answer}), flush=True)
"""


def test_names_of_others_tell_a_terminal_nothing(aenv, here):
    (here / "loud.py").write_text(LOUD)
    line = ["add", "mcp", "--", "python", str(here / "loud.py")]
    made = aenv(*line)
    assert (made.code, "look\\x1b[2J" in made.err, "\x1b[2J" in made.err) == (0, True, False), made.err
    stored = here / "loud" / "src" / "server.json"
    stored.write_text(json.dumps({"tools": []}))
    changed = aenv("add", "mcp", "--update", "--", "python", str(here / "loud.py"))
    assert (changed.code, "added: look\\x1b[2J" in changed.err, "\x1b[2J" in changed.err) == (0, True, False)


# The whole way

AGENT = """
async def play(env, task):
    said = await env.call_tool("echo", {"message": "hi"})
    wrong = await env.call_tool("echo", {"message": 3})
    picture = await env.call_tool("get-tiny-image")
    if task.id == "lost":
        await env.exec("pkill -9 node")
        await env.call_tool("echo", {"message": "are you there?"})
    return [said.text, wrong.is_error, [block["type"] for block in picture.content]]
"""


@pytest.mark.node
@pytest.mark.usefixtures("everything")
def test_an_episode_with_the_servers_own_example(aenv, played):
    made = aenv("add", "mcp", "--name", "everything", "--force", "-o", "json", "--", *COMMAND)
    assert made.code == 0, made.err
    assert {"echo", "get-sum", "get-tiny-image"} <= set(made.data["tools"])
    good = {"id": "good", "reward": {"tool": "echo", "expected": "Echo: x", "arguments": {"message": "x"}}}
    scored, lost = played("everything", AGENT, good, {**good, "id": "lost"}, options=["-c", "1"])
    assert scored.reward == 1.0
    assert scored.answer == ["Echo: hi", True, ["text", "image", "text"]]
    assert (lost.outcome.kind, lost.answer) == ("sandbox_lost", None)
    assert "nothing has changed" in aenv("add", "mcp", "--name", "everything", "--update", "--", *COMMAND).err
    assert "is not empty" in aenv("add", "mcp", "--name", "everything", "--", *COMMAND).err
