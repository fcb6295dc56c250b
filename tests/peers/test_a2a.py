"""The client of a2a-sdk talks to a published agent, through the platform; and what others send there is refused."""

from __future__ import annotations

import asyncio
import json
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from aenv import config
from aenv.engines.process.venvs import interpreter_for, is_ready
from tests.peers.support import HERE, TALK
from tests.platform.support import Platform, eventually, new_home, platform

pytestmark = [
    pytest.mark.peer,
    pytest.mark.xdist_group("a2a"),
    pytest.mark.skipif(not is_ready(TALK), reason="a2a-sdk is not installed: make components"),
]
CARD = "/.well-known/agent-card.json"


class Published(NamedTuple):
    """An agent that is talked to through a platform."""

    platform: Platform
    python: str
    """Where the client is."""
    instance: dict[str, Any]

    def call(self, method: str, path: str, body: Any = None, token: str | None = "", **headers: str) -> Any:
        given = self.instance["agent_token"] if token == "" else token
        sent = {name.replace("_", "-"): value for name, value in headers.items()}
        return self.platform.call(self.instance["id"], method, path, body, token=given, headers=sent)

    def rpc(self, method: str, params: Any, **more: Any) -> Any:
        message = {"jsonrpc": "2.0", "id": 1, "method": method, "params": params}
        return self.call("POST", "/a2a", message, A2A_Version="1.0", **more).json

    def reward(self) -> Any:
        return self.platform.call(self.instance["id"], "POST", "/task/reward", {}).data

    def client(self, url: str, token: str, version: str) -> Any:
        """What the client's program found."""
        line = [self.python, str(HERE / "scripts" / "a2a_client.py"), url, token, version]
        ended = subprocess.run(line, capture_output=True, text=True, timeout=120)
        assert ended.returncode == 0, ended.stderr
        return json.loads(ended.stdout.splitlines()[-1])


@pytest.fixture(scope="module")
def published() -> Iterator[Published]:
    python = asyncio.run(interpreter_for(TALK)).executable
    with new_home() as home:
        (home / "venvs").symlink_to(config.home() / "venvs")  # where the packages are already
        with platform(home=home) as running:
            running.push(TALK)
            yield Published(running, python, running.create("talk"))


@pytest.mark.parametrize("version", ["1.0", "0.3"])
def test_its_client_streams_follows_and_cancels(published: Published, version: str):
    cut = published.reward()["cut"]
    url = published.instance["url"]
    found = published.client(url, published.instance["agent_token"], version)
    assert found["card"] == {"name": "talk", "version": "1.0.0", "urls": [f"{url}/a2a"], "schemes": ["bearer"]}
    states = ["submitted", "working"]
    assert found["streamed"] == {
        "pieces": ["hello ", "there ", "(2)"],
        "states": [*states, "completed"],
        "contexts": 1,
    }
    assert found["whole"] == {"pieces": ["again (3)"], "states": ["completed"], "contexts": 1}
    assert found["failed"] == {"pieces": [], "states": [*states, "failed"], "contexts": 1}
    assert found["lost"] == "InternalError: the model is gone"
    assert found["cancelled"] == {
        "while": ["working", "I "],
        "followed": "working",
        "after": "canceled",
        "told": ["canceled"],
        "kept": "canceled",
    }
    assert published.reward()["cut"] == cut + 1
    assert found["unknown"].startswith("TaskNotFoundError")
    assert found["over"].startswith("TaskNotFoundError")
    assert found["pushed"].startswith("PushNotificationNotSupportedError")
    assert found["silent"].startswith("InvalidParamsError")


def test_it_talks_to_a_service(published: Published):
    made = published.platform.ask("POST", "/env-service", {"envName": "talk", "replicas": 1}).data
    path = f"/env-service/{made['id']}"
    try:
        eventually("the service", lambda: published.platform.ask("GET", path).data["available_replicas"])
        found = published.client(made["service_url"], published.platform.token, "1.0")
        assert found["card"]["urls"] == [f"{made['service_url']}/a2a"]
        assert found["streamed"]["pieces"] == ["hello ", "there ", "(2)"]
    finally:
        published.platform.ask("DELETE", path)


def test_a_context_is_a_session(published: Published):
    message = {"messageId": "1", "role": "ROLE_USER", "contextId": "shared", "parts": [{"text": "by a2a"}]}
    task = published.rpc("SendMessage", {"message": message})["result"]["task"]
    assert task["status"]["state"] == "TASK_STATE_COMPLETED"
    assert [part["text"] for part in task["artifacts"][0]["parts"]] == ["by a2a (2)"]
    asked = {"message": "by mcp", "session": "shared"}
    assert published.call("POST", "/tools/chat", asked).data["content"][0]["text"] == "by mcp (4)"


@pytest.mark.parametrize("token", [None, "nonsense"])
def test_without_its_token_nothing_is_told(published: Published, token: str | None):
    for method, path in (("POST", "/a2a"), ("GET", CARD)):
        assert published.call(method, path, {} if method == "POST" else None, token).status == 401


def test_its_token_opens_no_more_than_the_agent(published: Published):
    assert published.call("GET", CARD).status == 200
    assert published.call("POST", "/task/reward", {}).status == 403
    assert published.call("GET", "/a2a").status == 405
    assert published.call("GET", "/a2a/nobody/.well-known/agent-card.json").status == 404
    assert published.call("GET", "/a2a/parrot/.well-known/agent-card.json").json["name"] == "talk"


def test_nobody_else_says_where_it_is(published: Published):
    card = published.call("GET", CARD, AEnv_Base="http://evil.example.com").json
    assert {one["url"] for one in card["supportedInterfaces"]} == {f"{published.instance['url']}/a2a"}


SAID = {"messageId": "1", "role": "ROLE_USER", "parts": [{"text": "hello"}]}


@pytest.mark.parametrize(
    ("body", "code"),
    [
        (b"", -32700),
        (b"{", -32700),
        (b"\xff\xfe", -32700),
        (b"[]", -32600),
        (b"5", -32600),
        (b'[{"jsonrpc": "2.0", "id": 1, "method": "GetTask"}]', -32600),
        (b'{"jsonrpc": "1.0", "id": 1, "method": "GetTask", "params": {}}', -32600),
        (b'{"jsonrpc": "2.0", "id": 1, "method": "Reboot", "params": {}}', -32601),
        (b'{"jsonrpc": "2.0", "id": 1, "method": "SendMessage", "params": []}', -32602),
        (b'{"jsonrpc": "2.0", "id": 1, "method": "SendMessage", "params": {"message": 5}}', -32602),
        (b'{"jsonrpc": "2.0", "id": 1, "method": "SendMessage", "params": {}}', -32602),
        (b'{"jsonrpc": "2.0", "id": 1, "method": "GetTask", "params": {"id": "nobody"}}', -32001),
        (b"[" * 50_000, -32603),
    ],
    ids=repr,
)
def test_what_is_not_the_protocol_is_an_error_of_it(published: Published, body: bytes, code: int):
    reply = published.call("POST", "/a2a", body, A2A_Version="1.0")
    assert reply.status == 200
    assert reply.json["error"]["code"] == code


@pytest.mark.parametrize(
    ("message", "code"),
    [
        ({**SAID, "contextId": "x" * 256}, -32602),
        ({**SAID, "parts": [{"url": "http://192.0.2.1/a.png", "mediaType": "image/png"}]}, -32005),
        ({**SAID, "parts": [{"raw": "aGVsbG8="}]}, -32602),
        ({**SAID, "taskId": "nobody"}, -32001),
    ],
)
def test_messages_that_nothing_can_be_done_with(published: Published, message: Any, code: int):
    assert published.rpc("SendMessage", {"message": message})["error"]["code"] == code


def test_nobody_is_dialled_whom_a_caller_names(published: Published):
    hook = {"url": "http://127.0.0.1:1/hook"}
    sent = {"message": SAID, "configuration": {"taskPushNotificationConfig": hook}}
    assert published.rpc("SendMessage", sent)["error"]["code"] == -32003
    given = {"taskId": "1", "url": hook["url"]}
    assert published.rpc("CreateTaskPushNotificationConfig", given)["error"]["code"] == -32003


def test_the_environment_at_the_platform(published: Published, tmp_path: Path):
    script = """
import asyncio, json
from aenv import Environment

async def main():
    async with Environment("talk@1.0.0") as env:
        said = await env.call_tool("chat", {"message": "hello"})
        async with await env.fork(2) as both:
            more = [(await one.call_tool("chat", {"message": "again"})).text for one in both]
        await env.reset()
        print(json.dumps([said.text, more, (await env.call_tool("chat", {"message": "hello"})).text]))

asyncio.run(main())
"""
    found = json.loads(published.platform.run(script).splitlines()[-1])
    assert found == ["hello (1)", ["again (2)", "again (2)"], "hello (1)"]
