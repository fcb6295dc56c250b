"""Several agents on one instance: what each sees and may do, by the runtime's word and not by its client's."""

from __future__ import annotations

import asyncio
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import pytest

from aenv import Environment, Forbidden, NotFound, StartFailed, attach
from aenv.rl import rollouts
from aenv.runtime import registry
from aenv.runtime.loader import Loaded
from aenv.runtime.tokens import agent_token, digest
from tests.platform.support import platform
from tests.rl.bench import benches
from tests.runtime.wire import modern, send
from tests.support import ROOT, Sandbox, sandbox

GAME = ROOT / "examples" / "10-tic-tac-toe"
OWNER = "the owner's"


def bearer(agent: str, *, owner: str = OWNER) -> dict[str, str]:
    return {"Authorization": f"Bearer {agent_token(digest(owner), agent)}"}


@pytest.fixture(scope="module")
def game() -> Iterator[Sandbox]:
    with sandbox(GAME, variables={"AENV_OWNER_TOKEN_SHA256": digest(OWNER)}) as running:
        yield running


@pytest.fixture
async def env(game: Sandbox) -> Any:
    async with Environment("tic-tac-toe", provision=attach(game.url, OWNER)) as found:
        await found.reset()
        yield found


def listed(game: Sandbox, headers: dict[str, str]) -> list[str]:
    tools = modern(game.port, "tools/list", headers=headers).json["result"]["tools"]
    assert tools == send(game.port, "GET", "/tools", headers=headers).data
    return [tool["name"] for tool in tools]


def test_each_agent_sees_its_own_tools(game: Sandbox) -> None:
    assert listed(game, bearer("x")) == ["place", "board", "note", "concede"]
    assert listed(game, bearer("o")) == ["place", "board", "note"]
    assert listed(game, bearer("")) == ["board"]
    assert listed(game, {"Authorization": f"Bearer {OWNER}"}) == ["place", "board", "note", "concede"]


def test_a_tool_of_another_agent_is_not_there(game: Sandbox, env: Environment) -> None:
    call = {"name": "concede", "arguments": {}}
    for agent in ("o", ""):
        result = modern(game.port, "tools/call", call, bearer(agent)).json["result"]
        assert result["isError"]
        assert "there is no tool 'concede'" in result["content"][0]["text"]
        assert "note" not in result["content"][0]["text"] or agent
        assert send(game.port, "POST", "/tools/concede", {}, bearer(agent)).status == 404


@pytest.mark.parametrize("path", ["/task/reward", "/reset", "/exec", "/functions/turn", "/history", "/openenv/schema"])
def test_an_agents_token_opens_nothing_but_its_tools(game: Sandbox, path: str) -> None:
    method = "GET" if path in ("/history", "/openenv/schema") else "POST"
    assert send(game.port, method, path, {} if method == "POST" else None, bearer("x")).status in (403, 404)


def test_a_token_is_of_one_agent_and_one_instance(game: Sandbox) -> None:
    x = agent_token(digest(OWNER), "x")
    for token in (x.replace("x.", "o.", 1), "x." + agent_token(digest(OWNER)), x[:-1], x.partition(".")[2], "x."):
        assert send(game.port, "GET", "/tools", headers={"Authorization": f"Bearer {token}"}).status == 401
    assert send(game.port, "GET", "/tools", headers=bearer("x", owner="another's")).status == 401
    assert send(game.port, "GET", "/tools", headers={**bearer("x"), "AEnv-Agent": "o"}).data
    assert listed(game, {**bearer("x"), "AEnv-Agent": "o"}) == listed(game, bearer("x"))
    assert send(game.port, "GET", "/tools", headers={**bearer(""), "AEnv-Agent": "o"}).status == 403


def test_nobody_is_an_agent_of_another_name(game: Sandbox) -> None:
    reply = send(game.port, "GET", "/tools", headers=bearer("z"))
    assert (reply.status, reply.json["hint"]) == (404, "its agents are x, o")


async def test_a_game_is_played_in_turns(env: Environment) -> None:
    x, o = env.agent("x"), env.agent("o")
    assert [tool["function"]["name"] for tool in await o.list_openai_tools()] == ["place", "board", "note"]
    early = await o.call_tool("place", {"cell": 4})
    assert (early.text, early.is_error) == ("it is x's turn", True)
    assert not (await o.call_tool("board")).is_error
    for agent, cell in ((x, 0), (o, 3), (x, 1), (o, 4), (x, 2)):
        placed = await agent.call_tool("place", {"cell": cell})
        assert not placed.is_error, placed.text
    assert placed.text == "xxx\noo.\n..."
    late = await o.call_tool("place", {"cell": 5})
    assert (late.text, late.is_error) == ("it is nobody's turn", True)
    assert (await x.call_reward(), await o.call_reward()) == (1.0, -1.0)


async def test_two_calls_at_once_are_not_both_in_turn(env: Environment) -> None:
    x = env.agent("x")
    placed = await asyncio.gather(*(x.call_tool("place", {"cell": cell}) for cell in range(8)))
    assert sorted(one.is_error for one in placed) == [False] + [True] * 7
    assert {one.text for one in placed if one.is_error} == {"it is o's turn"}


async def test_what_one_agent_is_told_is_not_the_others(env: Environment) -> None:
    x, o = env.agent("x"), env.agent("o")
    await x.call_tool("note", {"text": "take the middle"})
    assert (await o.call_tool("note", {"text": "wait"})).text == "wait"
    assert (await x.call_tool("note", {"text": "again"})).text == "take the middle\nagain"


async def test_a_url_is_one_agents(env: Environment) -> None:
    found = urlsplit(await env.agent("o").agent_url())
    (token,) = parse_qs(found.query)["token"]
    async with Environment("tic-tac-toe", provision=attach(f"http://{found.netloc}", token)) as theirs:
        names = [tool["name"].partition("/")[2] for tool in await theirs.list_tools()]
        assert names == ["place", "board", "note"]
        assert (await theirs.call_tool("place", {"cell": 0})).text == "it is x's turn"
        with pytest.raises(Forbidden):
            await theirs.call_reward()


async def test_an_agent_that_is_not_there(env: Environment) -> None:
    with pytest.raises(NotFound, match="there is no agent 'z'"):
        await env.agent("z").list_tools()


async def test_without_tokens_an_agent_is_known_all_the_same() -> None:
    """As ``aenv run`` serves it."""
    with sandbox(GAME) as running:
        url = running.url
        async with Environment("tic-tac-toe", provision=attach(url)) as env:
            await env.reset()
            (token,) = parse_qs(urlsplit(await env.agent("o").agent_url()).query)["token"]
            assert (await env.agent("o").call_tool("place", {"cell": 0})).text == "it is x's turn"
        async with Environment("tic-tac-toe", provision=attach(url, token)) as theirs:
            assert len(await theirs.list_tools()) == 3


def test_blocking(game: Sandbox) -> None:
    with Environment.sync("tic-tac-toe", provision=attach(game.url, OWNER)) as env:
        env.reset()
        x = env.agent("x")
        assert x.call_tool("place", {"cell": 0}).text == "x..\n...\n..."
        assert len(x.list_tools()) == len(x.list_openai_tools()) == 4
        assert x.call_reward() == 0.0
        assert "token=x." in x.agent_url()


@pytest.mark.parametrize("agents", ["white", ["white", ""], ["a.b"], ["wei\u00df"], [3]])
def test_names_of_agents_fit_a_token(agents: Any) -> None:
    with registry.collect() as marks:
        registry.register_tool(agents=agents)(work)
    with pytest.raises(StartFailed, match=r"agents of work\(\) are"):
        Loaded(marks)


def test_a_turn_is_somebodys() -> None:
    with registry.collect() as marks:
        registry.register_tool(work)
        registry.register_turn(work)
    with pytest.raises(StartFailed, match="no tool has agents"):
        Loaded(marks)


def work() -> str:
    return "x"


def test_through_a_platform(tmp_path: Path) -> None:
    """The gateway lets each agent's token in, and leaves it to the sandbox what it opens."""
    with platform() as served:
        made = served.create(served.push(GAME))
        assert served.call(made["id"], "POST", "/reset", {}).status == 200
        known = digest(made["owner_token"])
        for agent, tools in (("x", 4), ("o", 3), ("", 1)):
            token = agent_token(known, agent)
            assert len(served.call(made["id"], "GET", "/tools", token=token).data) == tools
            assert served.call(made["id"], "POST", "/task/reward", {}, token=token).status == 403
        assert served.call(made["id"], "GET", "/tools", token="x.guess").status == 401
        early = served.call(made["id"], "POST", "/tools/place", {"cell": 0}, token=agent_token(known, "o"))
        assert "it is x's turn" in json.dumps(early.json)
        acting = {"AEnv-Agent": "o"}
        assert len(served.call(made["id"], "GET", "/tools", headers=acting).data) == 3


async def test_an_episode_has_one_agent() -> None:
    async def play(env: Environment, task: Any) -> None:
        env.agent("x")

    async with benches() as bench:
        shutil.copytree(GAME, bench.home / "envs" / "tic-tac-toe" / "1.0.0")
        async with rollouts(bench.env("tic-tac-toe"), play, [""]) as run:
            (found,) = [one async for one in run]
        await bench.empty()
    assert found.failure is not None
    assert "an episode has one agent" in found.failure.reason
