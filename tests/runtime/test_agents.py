"""Agents as environments: what they are served as, whose turn it is, and what becomes of one that never ends."""

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from aenv import Conversation, Environment, TooLarge, attach
from aenv.errors import AuthorError, Conflict, Invalid, NotFound, StartFailed
from aenv.runtime import conversations, loader
from aenv.runtime.conversations import Conversations
from aenv.runtime.registry import Mark
from tests.peers.support import TALK
from tests.runtime.wire import META, modern, send
from tests.support import Sandbox, sandbox, until

HEAD = "import asyncio\nfrom aenv import *\n"


@pytest.fixture(scope="module")
def talk() -> Iterator[Sandbox]:
    with sandbox(TALK) as running:
        yield running


def project(folder: Path, source: str, **deploy: Any) -> Path:
    (folder / "src").mkdir()
    (folder / "config.json").write_text(json.dumps({"name": "made", "version": "1.0.0", "deployConfig": deploy}))
    (folder / "src" / "made.py").write_text(HEAD + source)
    return folder


def chat(port: int, message: str, session: str = "", **more: Any) -> Any:
    """What an agent answers, as the JSON-RPC result."""
    arguments = {"message": message, "session": session, **more}
    return modern(port, "tools/call", {"name": "chat", "arguments": arguments}).json["result"]


def told(port: int, session: str = "") -> list[str]:
    found = modern(port, "tools/call", {"name": "chat_history", "arguments": {"session": session}}).json["result"]
    return [said["content"] for said in found["structuredContent"]["messages"]]


def reward(port: int) -> Any:
    return send(port, "POST", "/task/reward", {}).data


# What it is served as


def test_it_is_served_as_tools(talk: Sandbox):
    tools = {tool["name"]: tool for tool in modern(talk.port, "tools/list").json["result"]["tools"]}
    assert list(tools) == ["chat", "chat_history", "chat_reset"]
    about = tools["chat"]
    assert about["description"] == "Says again what it hears, and how much that was so far."
    taken = about["inputSchema"]["properties"]
    assert [(name, taken[name].get("default")) for name in taken] == [
        ("message", None),
        ("loud", False),
        ("session", ""),
    ]
    assert taken["loud"]["description"] == "In capitals."
    assert about["inputSchema"]["required"] == ["message"]
    assert about["outputSchema"]["required"] == ["answer", "session"]


def test_each_session_is_a_conversation_of_its_own(talk: Sandbox):
    assert chat(talk.port, "one", "a")["structuredContent"] == {"answer": "one (1)", "session": "a"}
    assert chat(talk.port, "two three", "a", loud=True)["content"] == [{"type": "text", "text": "TWO THREE (3)"}]
    assert chat(talk.port, "one", "b")["structuredContent"]["answer"] == "one (1)"
    assert told(talk.port, "a") == ["one", "one (1)", "two three", "TWO THREE (3)"]
    forgotten = send(talk.port, "POST", "/tools/chat_reset", {"session": "a"}).data
    assert forgotten == {"session": "a", "forgotten": 4}
    assert chat(talk.port, "one", "a")["structuredContent"]["answer"] == "one (1)"


def test_pieces_come_as_progress(talk: Sandbox):
    call = {"name": "chat", "arguments": {"message": "to you", "session": "p"}}
    events = modern(talk.port, "tools/call", {**call, "_meta": {**META, "progressToken": "t"}}).events
    assert [event["params"]["message"] for event in events[:-1]] == ["to ", "you ", "(2)"]
    assert [event["params"]["progress"] for event in events[:-1]] == [1, 2, 3]
    assert events[-1]["result"]["structuredContent"]["answer"] == "to you (2)"


def test_a_secret_is_hidden_that_comes_in_pieces(tmp_path: Path):
    source = (
        "from collections.abc import AsyncIterator\n@register_agent\nasync def a(message: str) -> AsyncIterator[str]:\n"
        '    for piece in ("It is sk-very", "secret", ", s", "o ", "sk-v"):\n        yield piece\n'
    )
    call = {"name": "chat", "arguments": {"message": "x"}, "_meta": {**META, "progressToken": "t"}}
    with sandbox(project(tmp_path, source), variables={"AENV_SECRETS": "KEY", "KEY": "sk-verysecret"}) as running:
        *pieces, last = modern(running.port, "tools/call", call).events
    assert [piece["params"]["message"] for piece in pieces] == ["It is ", "***", ", ", "so ", "sk-v"]
    assert last["result"]["structuredContent"]["answer"] == "It is ***, so sk-v"


def test_several_agents_are_told_apart(tmp_path: Path):
    source = '@register_agent\ndef ann(message: str) -> str:\n    return "Ann"\n' + (
        '@register_agent(name="bob")\nasync def robert(message: str, conversation: Conversation) -> str:\n'
        '    return f"{conversation.agent} {len(conversation.messages)}"\n'
    )
    with sandbox(project(tmp_path, source)) as running:
        names = [tool["name"] for tool in send(running.port, "GET", "/tools").data]
        assert names == [f"{name}_{tool}" for name in ("ann", "bob") for tool in ("chat", "chat_history", "chat_reset")]
        answers = [send(running.port, "POST", f"/tools/{name}_chat", {"message": "x"}).data for name in ("ann", "bob")]
        assert [answer["content"][0]["text"] for answer in answers] == ["Ann", "bob 0"]


# Turns


async def test_turns_of_a_session_wait_and_a_cancelled_one_lets_the_next_go_on(talk: Sandbox):
    env = Environment(provision=attach(talk.url), env_name="talk")
    cut = reward(talk.port)["cut"]
    async with env:
        first = asyncio.create_task(env.call_tool("chat", {"message": "go on", "session": "turns"}))
        await until(lambda: reward(talk.port)["going"] == 1, "the first")
        second = asyncio.create_task(env.call_tool("chat", {"message": "then", "session": "turns"}))
        for word in ("these", "are", "answered"):
            assert (await env.call_tool("chat", {"message": word, "session": word})).text == f"{word} (1)"
        assert not second.done()
        first.cancel()
        assert (await second).text == "then (1)"
    await until(lambda: reward(talk.port)["cut"] == cut + 1, "the end of the first")
    assert told(talk.port, "turns") == ["then", "then (1)"]


def test_one_that_never_ends_is_ended_by_the_limit_of_calls(tmp_path: Path):
    source = (
        "ended = []\n@register_agent\nasync def slow(message: str) -> str:\n    try:\n"
        '        await asyncio.sleep(3600 if message == "go on" else 0)\n        return message\n'
        "    finally:\n        ended.append(message)\n"
        "@register_reward\ndef how_many() -> float:\n    return float(len(ended))\n"
    )
    with sandbox(project(tmp_path, source, timeouts={"call": "1s"})) as running:
        failed = modern(running.port, "tools/call", {"name": "chat", "arguments": {"message": "go on"}}).json["error"]
        assert failed["data"]["aenv"]["code"] == "call_timeout"
        assert reward(running.port) == 1.0
        assert chat(running.port, "hello")["structuredContent"]["answer"] == "hello"
        assert told(running.port) == ["hello", "hello"]


@pytest.mark.parametrize(("message", "said"), [("fail", "ValueError: I cannot"), ("odd", "pieces are text")])
def test_what_fails_in_it_is_a_tool_error_and_leaves_the_conversation_as_it_was(talk: Sandbox, message: str, said: str):
    chat(talk.port, "hello", message)
    failed = chat(talk.port, message, message)
    assert failed["isError"]
    assert said in failed["content"][0]["text"]
    assert chat(talk.port, "again", message)["structuredContent"]["answer"] == "again (2)"


def test_what_the_platform_fails_at_is_no_answer(talk: Sandbox):
    reply = modern(talk.port, "tools/call", {"name": "chat", "arguments": {"message": "lost", "session": "l"}}).json
    assert reply["error"]["data"]["aenv"]["code"] == "model_failed"


async def test_agents_that_ask_each_other_for_ever_come_to_an_end(tmp_path: Path):
    source = (
        "@register_agent\nasync def asks(message: str) -> str:\n"
        "    mine, theirs = message.split()\n"
        '    async with Environment(provision=attach(theirs), env_name="made") as other:\n'
        '        found = await other.call_tool("chat", {"message": f"{theirs} {mine}", "session": f"{id(other)}"})\n'
        "    return found.text\n"
    )
    root = project(tmp_path, source)
    with sandbox(root) as one, sandbox(root) as two:
        async with Environment(provision=attach(one.url), env_name="made") as env:
            found = await env.call_tool("chat", {"message": f"{one.url} {two.url}"})
    assert "call sandboxes are over 16 deep" in found.text


# Sessions


def test_a_session_that_is_not_there_and_a_name_that_is_too_long(talk: Sandbox):
    chat(talk.port, "hello", "known")
    for tool in ("chat_history", "chat_reset"):
        found = modern(talk.port, "tools/call", {"name": tool, "arguments": {"session": "knowm"}}).json["result"]
        assert found["isError"]
        assert "there is no conversation 'knowm'" in found["content"][0]["text"]
    assert "at most 255" in chat(talk.port, "hello", "x" * 256)["content"][0]["text"]
    assert told(talk.port) == []


async def test_conversations_are_bounded_in_number(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(conversations, "MOST", 2)
    kept = Conversations()
    for session in ("a", "b"):
        async with kept.turn("agent", session) as conversation:
            kept.keep(conversation, "hello", "hello")
    with pytest.raises(Conflict, match="there are 2 conversations"):
        await kept.turn("agent", "c").__aenter__()
    async with kept.turn("agent", "a"):
        pass
    monkeypatch.setattr(conversations, "IDLE", 0.0)  # nobody went on with them
    async with kept.turn("agent", "c") as conversation:
        kept.keep(conversation, "hello", "hello")
    assert [one.session for one in kept] == ["a", "c"]


async def test_conversations_are_bounded_in_size(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(conversations, "MOST_BYTES", 20)
    kept = Conversations()
    async with kept.turn("agent", "") as conversation:
        kept.keep(conversation, "12345", "12345")
        with pytest.raises(TooLarge, match="over 20 bytes"):
            kept.keep(conversation, "12345", "12345")
        conversation.state["more"] = "12345"
        with pytest.raises(TooLarge):
            kept.keep(conversation, "", "")
        with pytest.raises(TooLarge):
            kept.check(conversation, "123456789")
        conversation.state["more"] = {object()}
        with pytest.raises(AuthorError, match="state of the conversation"):
            kept.keep(conversation, "", "")
    assert kept.get("agent", "").messages == [
        {"role": "user", "content": "12345"},
        {"role": "assistant", "content": "12345"},
    ]


async def test_conversations_are_bounded_together(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(conversations, "MOST_TOGETHER", 25)
    kept = Conversations()
    async with kept.turn("agent", "a") as conversation:
        kept.keep(conversation, "12345", "12345")
    async with kept.turn("agent", "b") as conversation:
        with pytest.raises(TooLarge, match="over 25 bytes together"):
            kept.keep(conversation, "123456", "123456")
        kept.keep(conversation, "1234", "1234")
    await kept.forget("agent", "a")
    async with kept.turn("agent", "c") as conversation:
        kept.keep(conversation, "12345", "12345")


async def test_a_turn_that_nothing_came_of_leaves_no_conversation():
    kept = Conversations()
    with pytest.raises(NotFound):
        async with kept.turn("agent", "a"):
            raise NotFound("no")
    with pytest.raises(NotFound):
        kept.get("agent", "a")
    with pytest.raises(Invalid):
        await kept.turn("agent", "x" * 256).__aenter__()


async def test_what_is_forgotten_in_a_turn_stays_so():
    kept = Conversations()
    async with kept.turn("agent", "a") as conversation:
        kept.clear()
        kept.keep(conversation, "hello", "hello")
    assert list(kept) == []


# Rewards, and an environment that begins anew


def test_the_reward_sees_what_was_said_and_a_reset_forgets_it(tmp_path: Path):
    source = (
        '@register_agent\ndef echo(message: str) -> str:\n    return message + "!"\n'
        "@register_reward\ndef all_of_them(found: list[Conversation]) -> float:\n    return float(len(found))\n"
        "@register_reward\ndef the_only_one(conversation: Conversation, ctx: Context) -> dict:\n"
        '    return {"score": len(conversation.messages), "same": ctx.conversation.messages == conversation.messages}\n'
    )

    def score(name: str) -> Any:
        return send(running.port, "POST", f"/task/reward?name={name}", {})

    with sandbox(project(tmp_path, source)) as running:
        assert score("the_only_one").data == {"score": 0, "same": True}
        chat(running.port, "hello")
        assert score("the_only_one").data == {"score": 2, "same": True}
        chat(running.port, "hello", "another")
        assert score("all_of_them").data == 2.0
        assert "there are 2 conversations" in score("the_only_one").json["error"]
        assert send(running.port, "POST", "/reset", {"seed": 3}).data is None
        assert score("all_of_them").data == 0.0
        assert send(running.port, "POST", "/reset", {"arguments": {"task": 1}}).status == 501
        assert send(running.port, "GET", "/info").data["saves"] is True


# What cannot be an agent


def agent(function: Any, name: str = "it") -> loader.Loaded:
    return loader.Loaded([Mark("agent", function, name, {})])


def no_message(text: str) -> str:
    return text


def too_much(message: str, more: int) -> str:
    return message


def with_session(message: str, session: str = "") -> str:
    return message


@pytest.mark.parametrize(
    ("function", "said"),
    [
        (no_message, "is given a message alone"),
        (too_much, "is given a message alone"),
        (with_session, "takes a session"),
        (object(), "is a object, which nobody here knows how to ask"),
    ],
)
def test_what_is_no_agent_does_not_start(function: Any, said: str):
    with pytest.raises(StartFailed, match=said):
        agent(function)


def test_names_are_taken_once():
    with pytest.raises(StartFailed, match="agent 'it' is registered twice"):
        loader.Loaded([Mark("agent", with_state, "it", {}), Mark("agent", no_message, "it", {})])
    with pytest.raises(StartFailed, match="'chat' is registered twice"):
        loader.Loaded([Mark("agent", with_state, "it", {}), Mark("tool", no_message, "chat", {})])


def with_state(message: str, conversation: Conversation) -> str:
    return message


# A2A, where it is not spoken


def test_without_the_package_it_says_what_is_missing(tmp_path: Path):
    code = "import sys\nsys.modules['a2a'] = None\n@register_agent\ndef a(message: str) -> str:\n    return ''\n"
    with sandbox(project(tmp_path, code)) as running:
        for method, path in (("POST", "/a2a"), ("GET", "/.well-known/agent-card.json")):
            reply = send(running.port, method, path, {} if method == "POST" else None)
            assert reply.status == 501
            assert "requirements.txt" in reply.json["hint"]


def test_a_body_that_is_too_large():
    with sandbox(TALK, variables={"AENV_MAX_BODY": "1000"}) as running:
        assert send(running.port, "POST", "/a2a", b"x" * 1001).status == 413


async def test_tasks_that_are_over_are_remembered_within_bounds(monkeypatch: pytest.MonkeyPatch):
    from a2a.helpers import new_text_artifact
    from a2a.server.context import ServerCallContext
    from a2a.types import Task, TaskState, TaskStatus

    from aenv.runtime import a2a

    monkeypatch.setattr(a2a, "MOST_BYTES", 10_000)
    tasks, context = a2a._Tasks(), ServerCallContext()
    over = TaskStatus(state=TaskState.TASK_STATE_COMPLETED)
    for number, size in enumerate((4_000, 4_000, 4_000, 20_000)):
        artifact = new_text_artifact(name="answer", text="x" * size)
        task = Task(id=str(number), context_id="c", status=over, artifacts=[artifact])
        for _ in range(2):  # saved again, it counts once
            await tasks.save(task, context)
        found = [str(id) for id in range(number + 1) if await tasks.get(str(id), context)]
        assert found == {0: ["0"], 1: ["0", "1"], 2: ["1", "2"], 3: ["3"]}[number]


def test_an_environment_without_agents_has_no_card(tmp_path: Path):
    with sandbox(project(tmp_path, "@register_tool\ndef t() -> str:\n    return ''\n")) as running:
        for method, path in (("POST", "/a2a"), ("GET", "/.well-known/agent-card.json")):
            assert send(running.port, method, path, {} if method == "POST" else None).status == 404
