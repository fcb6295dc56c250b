"""A2A agents as projects: one of a2a-sdk's own server, talked to by hand, and by an agent in an instance."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from typing import Any

import pytest

from aenv.errors import SandboxLost
from aenv.integrations.wrapping import a2a
from aenv.runtime.context import Context


async def talking(url: str) -> a2a.Agent:
    found = await asyncio.to_thread(a2a.look, url)
    agent = a2a.Agent(found.stored)
    await agent.start()
    return agent


@pytest.mark.parametrize("kind", ["streaming", "whole"])
async def test_a_conversation(service, kind):
    agent = await talking(service("agent", kind).url)
    heard: list[str] = []
    ctx = Context(notify=lambda _, told: heard.append(told["message"]), progress_token=1)
    try:
        assert (await agent.chat("hello big world", ctx=ctx)).text.split() == ["hello", "big", "world"]
        assert heard == (["hello ", "big ", "world "] if kind == "streaming" else [])
        assert (await agent.chat("quick yes", ctx=ctx)).text == "yes"
        failed = await agent.chat("fail badly", ctx=ctx)
        assert (failed.is_error, "badly" in failed.text) == (True, True)
        assert (await agent.chat("reject this", ctx=ctx)).is_error
        asked = await agent.chat("ask which?", session="other", ctx=ctx)
        assert (asked.text, asked.structured) == ("which?", {"state": "input-required"})
        task = agent._conversations["other"].task
        assert task
        assert (await agent.chat("blue", session="other", ctx=ctx)).structured == {"state": "completed"}
        assert [one["text"].strip() for one in agent.history("other")] == ["ask which?", "which?", "blue", "blue"]
        await agent.chat_reset("other")
        assert agent.history("other") == []
        assert len(agent.history()) == 8
    finally:
        await agent.stop()


@pytest.mark.parametrize("kind", ["streaming", "whole"])
async def test_a_call_that_is_given_up_cancels_its_task_there(service, kind):
    agent = await talking(service("agent", kind).url)
    try:
        call = asyncio.create_task(agent.chat("wait", session="long", ctx=Context()))
        while "long" not in agent._conversations or not agent._conversations["long"].context:
            await asyncio.sleep(0.01)
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
        await asyncio.wait(agent._farewells)
        cancelled = await agent.chat("cancelled?", ctx=Context())
        assert cancelled.text == agent._conversations["long"].context
    finally:
        await agent.stop()


async def test_a_call_that_is_given_up_at_the_end_is_cancelled(service):
    agent = await talking(service("agent", "whole").url)
    call = asyncio.create_task(agent.chat("wait", session="long", ctx=Context()))
    while "long" not in agent._conversations or not agent._conversations["long"].context:
        await asyncio.sleep(0.01)
    call.cancel()
    await agent.stop()
    with pytest.raises(asyncio.CancelledError):
        await call


async def test_an_agent_that_dies_is_no_observation(service):
    agent = await talking(service("agent", "streaming").url)
    try:
        for said in ("die", "hello"):
            with pytest.raises(SandboxLost, match="the agent Parrot is gone"):
                await agent.chat(said, ctx=Context())
    finally:
        await agent.stop()


class Mumbler(BaseHTTPRequestHandler):
    """An agent that answers whatever is asked of it with ``said``."""

    said: Any = None

    def do_POST(self) -> None:
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        answer = json.dumps({"jsonrpc": "2.0", "id": asked["id"], "result": self.said})
        streams = asked["method"] == "SendStreamingMessage"
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream" if streams else "application/json")
        self.end_headers()
        if self.said is not None:
            self.wfile.write((f"data: {answer}\n\n" if streams else answer).encode())

    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture
def mumbler() -> Iterator[str]:
    with ThreadingHTTPServer(("127.0.0.1", 0), Mumbler) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


def card(url: str, streaming: bool) -> dict[str, Any]:
    interface = {"url": url, "protocolBinding": "JSONRPC", "protocolVersion": "1.0"}
    return {"name": "Mumbler", "supportedInterfaces": [interface], "capabilities": {"streaming": streaming}}


PIECE = {"taskId": "t", "contextId": "c", "artifact": {"artifactId": "a", "parts": [{"text": "half of"}]}}


@pytest.mark.parametrize("streaming", [True, False])
@pytest.mark.parametrize("said", [None, {"something": "else"}, {"artifactUpdate": PIECE}])
async def test_an_agent_that_breaks_off_has_answered_nothing(mumbler, monkeypatch, streaming, said):
    monkeypatch.setattr(Mumbler, "said", said)
    agent = a2a.Agent(card(mumbler, streaming))
    await agent.start()
    try:
        with pytest.raises(SandboxLost):
            await agent.chat("hello", ctx=Context())
        assert agent.history() == []
    finally:
        await agent.stop()


@pytest.mark.parametrize("streaming", [True, False])
async def test_an_answer_is_bounded(mumbler, monkeypatch, streaming):
    monkeypatch.setattr(a2a, "MOST_ANSWER", 1024**2)
    monkeypatch.setattr(Mumbler, "said", {"message": {"messageId": "m", "parts": [{"text": "x" * 2 * 1024**2}]}})
    agent = a2a.Agent(card(mumbler, streaming))
    await agent.start()
    try:
        with pytest.raises(SandboxLost, match="larger than 1 MiB"):
            await agent.chat("hello", ctx=Context())
    finally:
        await agent.stop()


AGENT = """
async def play(env, task):
    first = await env.call_tool("chat", {"message": "nice weather"})
    await env.call_tool("chat", {"message": "die" if task.id == "lost" else "quick bye"})
    return [first.text, (await env.call_tool("chat_history")).structured["result"]]
"""


def test_an_episode_is_recorded_and_one_whose_agent_dies_has_no_score(service, aenv, played, here):
    parrot = service("agent", "streaming")
    made = aenv("add", "a2a", parrot.url, "-o", "json")
    assert made.code == 0, made.err
    assert (made.data["name"], made.data["network"]) == ("parrot", [parrot.host])
    assert json.loads((here / "parrot" / "src" / "agent-card.json").read_text())["name"] == "Parrot"
    reward = {"expected": "nice weather"}
    scored, lost = played(
        "parrot", AGENT, {"id": "good", "reward": reward}, {"id": "lost", "reward": reward}, options=["-c", "1"]
    )
    assert scored.reward == 1.0
    assert scored.answer[0] == "nice weather "
    assert [one["role"] for one in scored.answer[1]] == ["user", "agent", "user", "agent"]
    assert lost.outcome.kind == "sandbox_lost"
    assert "nothing has changed" not in aenv("add", "a2a", parrot.url, "--update").err


@pytest.mark.parametrize(
    ("line", "said"),
    [
        (["http://127.0.0.1:9"], "All connection attempts failed"),
        (["SHOP"], "HTTP 404"),
        (["not-a-url"], "no http or https URL"),
        (["SHOP", "--bearer", "NO_SUCH_TOKEN"], "the secret NO_SUCH_TOKEN is not set"),
    ],
)
def test_what_cannot_be_added_says_why(aenv, shop, line, said):
    answer = aenv("add", "a2a", *(word.replace("SHOP", shop.url) for word in line))
    assert answer.code == 1
    assert said in answer.err
    assert "hint:" in answer.err
