"""Agents behind the gateway: what their model says is in the trajectory, wherever the agent runs."""

from __future__ import annotations

import asyncio
import contextlib
import json
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from benchmarks.servers.model import Model

from aenv import http
from aenv.evals import agent as agent_named
from aenv.rl import Episode, Reward, Rules, Task, Turn, export, rollout
from aenv.rl.model_gateway import ModelGateway, Upstream
from aenv.rl.model_gateway.episodes import MANY
from tests.rl.bench import Bench
from tests.rl.model_gateway.support import asking, ids, post, standin, stream
from tests.rl.proofs import has_no_number, is_scored

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.xdist_group("rl-model-gateway")]
KEY = "sk-provider-4711"
PROGRAM = """
import json, os, sys, urllib.request

def ask(messages):
    url, key = os.environ["OPENAI_BASE_URL"] + "/chat/completions", os.environ["OPENAI_API_KEY"]
    body = json.dumps({"model": "stand-in", "messages": messages}).encode()
    headers = {"Authorization": "Bearer " + key, "Content-Type": "application/json"}
    with urllib.request.urlopen(urllib.request.Request(url, body, headers), timeout=60) as answer:
        return json.load(answer)["choices"][0]["message"]

messages = [{"role": "user", "content": "say first"}]
for _ in range(int(sys.argv[1])):
    messages.append(ask(messages))
    messages.append({"role": "user", "content": "say second"})
print(messages[-2]["content"], " ".join(sorted(value for value in os.environ.values() if "provider" in value)))
"""

STUBBORN = (
    PROGRAM.partition("messages =")[0]
    + """
while True:
    try:
        ask([{"role": "user", "content": "say hello"}])
    except OSError:
        pass
"""
)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def made() -> AsyncIterator[tuple[Model, ModelGateway]]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PROVIDER_KEY", KEY)
        patch.setenv("OPENAI_API_KEY", KEY)
        async with standin() as (model, url), ModelGateway([Upstream(url, key_variable="PROVIDER_KEY")]) as gateway:
            yield model, gateway


async def test_a_program_is_trainable(plain_bench: Bench, made: tuple[Model, ModelGateway], tmp_path: Path) -> None:
    (tmp_path / "agent.py").write_text(PROGRAM)
    program = agent_named(f"cmd:{sys.executable} {tmp_path / 'agent.py'} 2")
    trajectory = await rollout(plain_bench.env("words"), made[1].agent(program), rules=Rules(rewards="first"))
    is_scored(trajectory, 1.0)
    assert trajectory.answer == "second"
    assert [message["content"] for message in trajectory.messages] == ["say first", "first", "say second", "second"]
    found = [turn.generation for turn in trajectory.turns]
    assert [generation.tokens.completion for generation in found if generation and generation.tokens] == [
        ids("first"),
        ids("second"),
    ]
    assert [row["messages"] for row in export([trajectory], "openai")]
    assert trajectory.provenance.agent.startswith("cmd:")


@pytest.mark.parametrize("more", [{}, {"stream": True}])
async def test_what_a_server_read_and_wrote_is_what_is_trained_on(plain_bench: Bench, more: dict[str, Any]) -> None:
    """Token by token: the server's own, over two turns, with what came between them masked."""

    def template(messages: list[dict[str, Any]]) -> str:
        return "".join(f"<{message['role']}>{message['content']}" for message in messages) + "<assistant>"

    async def agent(env: Episode, task: Task) -> None:
        assert env.models is not None
        messages: list[dict[str, Any]] = []
        for said in ("first", "second"):
            messages.append({"role": "user", "content": f"say {said}"})
            body = {"model": "m", "messages": messages, **more}
            assert (await post(env.models, "/v1/chat/completions", body))[0] == 200
            messages.append({"role": "assistant", "content": said})

    async with standin() as (model, url), ModelGateway([url]) as gateway:
        model.template = template
        trajectory = await rollout(plain_bench.env("words"), gateway.agent(agent), rules=Rules(rewards="first"))
    (row,) = export([trajectory], "tokens")
    (read, wrote), (read_next, wrote_next) = model.tokens
    assert row["prompt_ids"] == read
    assert row["prompt_ids"] + row["completion_ids"] == read_next + wrote_next
    between = len(read_next) - len(read) - len(wrote)
    assert between == len("<user>say second<assistant>")
    assert row["loss_mask"] == [1] * len(wrote) + [0] * between + [1] * len(wrote_next)
    told = [[-id / 1000 for id in each] for each in (wrote, wrote_next)]
    assert row["logprobs"] == told[0] + [0.0] * between + told[1]


@pytest.mark.parametrize("dropped", ["ids", "pieces"])
async def test_an_episode_whose_tokens_are_not_all_known_is_no_row(plain_bench: Bench, dropped: str) -> None:
    async def agent(env: Episode, task: Task) -> None:
        assert env.models is not None
        body = asking('call work {"times": 2}', stream=True)
        assert (await post(env.models, "/v1/chat/completions", body))[0] == 200

    async with standin() as (model, url), ModelGateway([url]) as gateway:
        model.dropped = dropped
        trajectory = await rollout(plain_bench.env("words"), gateway.agent(agent), rules=Rules(rewards="first"))
    is_scored(trajectory, 1.0)
    found = export([trajectory], "tokens")
    assert (list(found), found.left_out) == ([], {"no token ids": 1})


async def test_turns_are_used_up(plain_bench: Bench, made: tuple[Model, ModelGateway], tmp_path: Path) -> None:
    (tmp_path / "agent.py").write_text(PROGRAM)
    program = agent_named(f"cmd:{sys.executable} {tmp_path / 'agent.py'} 5")
    rules = Rules(rewards="first", max_turns=2)
    trajectory = await rollout(plain_bench.env("words"), made[1].agent(program), rules=rules)
    is_scored(trajectory, 1.0)
    assert (trajectory.ended, len(trajectory.turns)) == ("max_turns", 2)


async def test_what_an_agent_may_have_written_down_is_bounded(
    plain_bench: Bench, made: tuple[Model, ModelGateway]
) -> None:
    """An agent that begins anew in each call ends as one whose turns are used up."""

    async def agent(env: Episode, task: Task) -> None:
        assert env.models is not None
        for number in range(100):
            await post(env.models, "/v1/chat/completions", asking(f"{number}{'x' * 1000}\nsay hello"))

    behind = made[1].agent(agent, max_bytes=20_000)
    trajectory = await rollout(plain_bench.env("words"), behind, rules=Rules(rewards="first"))
    is_scored(trajectory, 1.0)
    assert trajectory.ended == "max_turns"
    assert len(trajectory.turns) == 3


async def test_calls_belong_to_the_turn_of_what_was_said(plain_bench: Bench, made: tuple[Model, ModelGateway]) -> None:
    async def agent(env: Episode, task: Task) -> Any:
        assert env.models is not None
        for _ in range(2):
            _, answer = await post(env.models, "/v1/chat/completions", asking("call work {}"))
            await env.call_tool(answer["choices"][0]["message"]["tool_calls"][0]["function"]["name"])

    trajectory = await rollout(plain_bench.env("words"), made[1].agent(agent), rules=Rules(rewards="first"))
    is_scored(trajectory, 1.0)
    assert [(len(turn.calls), turn.generation is not None) for turn in trajectory.turns] == [(1, True), (1, True)]


async def test_a_model_that_fails_is_no_observation(plain_bench: Bench) -> None:
    async def agent(env: Episode, task: Task) -> str:
        assert env.models is not None
        status, _ = await post(env.models, "/v1/chat/completions", asking("say hello"))
        return f"I saw {status}"

    async with ModelGateway(["http://127.0.0.1:9/v1"], retries=0) as gateway:
        trajectory = await rollout(plain_bench.env("words"), gateway.agent(agent), rules=Rules(rewards="first"))
    has_no_number(trajectory, "model_failed", "model")


async def test_what_a_model_cannot_be_asked_is_the_agents_affair(
    plain_bench: Bench, made: tuple[Model, ModelGateway]
) -> None:
    async def agent(env: Episode, task: Task) -> None:
        assert env.models is not None
        assert (await post(env.models, "/v1/chat/completions", asking("fail")))[0] == 400

    trajectory = await rollout(plain_bench.env("words"), made[1].agent(agent), rules=Rules(rewards="first"))
    is_scored(trajectory, 1.0)


@pytest.mark.parametrize("more", [{}, {"stream": True}])
async def test_an_agent_that_does_not_take_no_for_an_answer_ends_there(
    plain_bench: Bench, made: tuple[Model, ModelGateway], more: dict[str, Any]
) -> None:
    seen: list[int] = []

    async def agent(env: Episode, task: Task) -> None:
        assert env.models is not None
        while True:
            with contextlib.suppress(Exception):
                seen.append((await post(env.models, "/v1/chat/completions", asking("say hello", **more)))[0])

    behind = made[1].agent(agent, max_calls=2)
    trajectory = await rollout(plain_bench.env("words"), behind, rules=Rules(rewards="first"))
    is_scored(trajectory, 1.0)
    assert (trajectory.ended, len(trajectory.turns)) == ("max_turns", 2)
    assert seen[:3] == [200, 200, 429]
    async with ModelGateway(["http://127.0.0.1:9/v1"], retries=0) as gateway:
        trajectory = await rollout(plain_bench.env("words"), gateway.agent(agent), rules=Rules(rewards="first"))
    has_no_number(trajectory, "model_failed", "model")


async def test_an_agent_that_asks_for_something_else_each_time_ends_as_well(
    plain_bench: Bench, made: tuple[Model, ModelGateway]
) -> None:
    seen: list[int] = []

    async def agent(env: Episode, task: Task) -> None:
        assert env.models is not None
        while True:
            with contextlib.suppress(Exception):
                seen.append((await post(env.models, "/v1/chat/completions", asking(f"say {len(seen)}")))[0])

    behind, rules = made[1].agent(agent, max_calls=1), Rules(rewards="first", episode_timeout=60)
    trajectory = await rollout(plain_bench.env("words"), behind, rules=rules)
    is_scored(trajectory, 1.0)
    assert (seen.count(200), trajectory.ended) == (1, "max_turns")
    assert seen.count(429) <= MANY + 1


async def test_a_program_that_asks_again_for_ever_is_ended(
    plain_bench: Bench, made: tuple[Model, ModelGateway], tmp_path: Path
) -> None:
    (tmp_path / "agent.py").write_text(f"import os\nopen('pid', 'w').write(str(os.getpid()))\n{STUBBORN}")
    program = agent_named(f"cmd:env --chdir={tmp_path} {sys.executable} agent.py")
    behind = made[1].agent(program, max_calls=1)
    trajectory = await rollout(plain_bench.env("words"), behind, rules=Rules(rewards="first"))
    is_scored(trajectory, 1.0)
    assert (trajectory.ended, len(trajectory.turns)) == ("max_turns", 1)
    assert not Path("/proc", (tmp_path / "pid").read_text()).exists()


async def test_a_model_that_does_not_answer_in_time_is_not_the_agents_fault(
    plain_bench: Bench, made: tuple[Model, ModelGateway]
) -> None:
    async def agent(env: Episode, task: Task) -> None:
        assert env.models is not None
        await post(env.models, "/v1/chat/completions", asking("hang"))

    rules = Rules(rewards="first", episode_timeout=0.5)
    trajectory = await rollout(plain_bench.env("words"), made[1].agent(agent), rules=rules)
    failed = has_no_number(trajectory, ("episode_timeout",), ("model",))
    assert not failed.by_agent


@pytest.mark.parametrize("score_late", [False, True])
async def test_a_time_that_is_over_while_a_model_fails_is_its_failure(plain_bench: Bench, score_late: bool) -> None:
    async def agent(env: Episode, task: Task) -> None:
        assert env.models is not None
        await post(env.models, "/v1/chat/completions", asking("say hello"))

    rules = Rules(rewards="first", episode_timeout=0.5, score_late=score_late)
    async with ModelGateway(["http://127.0.0.1:9/v1"], retries=50) as gateway:
        trajectory = await rollout(plain_bench.env("words"), gateway.agent(agent), rules=rules)
    failed = has_no_number(trajectory, ("model_failed",), ("model",))
    assert not failed.by_agent


@pytest.mark.parametrize("more", [{}, {"stream": True}])
async def test_turns_are_kept_to_by_calls_at_the_same_time(
    plain_bench: Bench, made: tuple[Model, ModelGateway], more: dict[str, Any]
) -> None:
    seen: list[int] = []

    async def agent(env: Episode, task: Task) -> None:
        assert env.models is not None
        models, path = env.models, "/v1/chat/completions"
        found = await asyncio.gather(*(post(models, path, asking(f"say {n}", **more)) for n in range(5)))
        seen.extend(sorted(status for status, _ in found))

    before = len(made[0].asked)
    rules = Rules(rewards="first", max_turns=2)
    trajectory = await rollout(plain_bench.env("words"), made[1].agent(agent), rules=rules)
    is_scored(trajectory, 1.0)
    assert (trajectory.ended, len(trajectory.turns)) == ("max_turns", 2)
    assert seen == [200, 200, 429, 429, 429]
    assert len(made[0].asked) == before + 2
    roles = [message["role"] for message in trajectory.messages]
    assert roles == ["user", "assistant"] * 2


async def test_an_agent_that_samples_may_use_what_it_has(plain_bench: Bench, made: tuple[Model, ModelGateway]) -> None:
    """The same request several times at once is none that is asked again."""

    async def agent(env: Episode, task: Task) -> str:
        assert env.models is not None
        models = env.models
        found = await asyncio.gather(*(post(models, "/v1/chat/completions", asking("say one")) for _ in range(4)))
        await env.call_tool("work")
        return str(sorted(status for status, _ in found))

    for limits, rules in (({"max_calls": 1}, {}), ({}, {"max_turns": 1})):
        behind = made[1].agent(agent, **limits)
        trajectory = await rollout(plain_bench.env("words"), behind, rules=Rules(rewards="first", **rules))
        is_scored(trajectory, 1.0)
        assert [len(turn.calls) for turn in trajectory.turns] == [1]


async def test_a_client_that_leaves_while_its_turn_is_scored(
    plain_bench: Bench, made: tuple[Model, ModelGateway]
) -> None:
    """What the model said has come, and is in the trajectory."""
    scoring, go_on = asyncio.Event(), asyncio.Event()

    async def slow(turn: Turn) -> float:
        scoring.set()
        await go_on.wait()
        return 1.0

    async def agent(env: Episode, task: Task) -> None:
        assert env.models is not None
        await post(env.models, "/v1/chat/completions", asking("say one"))
        second = asyncio.create_task(post(env.models, "/v1/chat/completions", asking("say two")))
        await scoring.wait()
        second.cancel()
        await asyncio.wait((second,))
        asyncio.get_running_loop().call_later(0.05, go_on.set)

    reward = Reward(name="slow", function=slow, every_turn=True)
    trajectory = await rollout(plain_bench.env("words"), made[1].agent(agent), rules=Rules(rewards=[reward]))
    is_scored(trajectory, 2.0)
    said = [message["content"] for message in trajectory.messages if message["role"] == "assistant"]
    assert said == ["one", "two"]


async def test_a_stream_that_is_left_early_is_a_turn(plain_bench: Bench, made: tuple[Model, ModelGateway]) -> None:
    async def agent(env: Episode, task: Task) -> None:
        assert env.models is not None
        async with stream(env.models, "/v1/chat/completions", asking("say forever", stream=True)) as pieces:
            assert b"fore" in await anext(pieces)

    trajectory = await rollout(plain_bench.env("words"), made[1].agent(agent), rules=Rules(rewards="first"))
    is_scored(trajectory, 1.0)
    (turn,) = trajectory.turns
    assert turn.generation is not None
    assert turn.generation.tokens is not None
    assert turn.generation.tokens.completion == ids("fore")


@pytest.mark.parametrize(
    "said",
    [
        {"content": [{"type": "text", "text": "first"}]},
        {"content": "first", "tool_calls": []},
        {"content": "first", "tool_calls": None},
    ],
    ids=str,
)
async def test_a_conversation_goes_on_however_it_is_written(
    plain_bench: Bench, made: tuple[Model, ModelGateway], said: dict[str, Any]
) -> None:
    async def agent(env: Episode, task: Task) -> None:
        assert env.models is not None
        await post(env.models, "/v1/chat/completions", asking("say first"))
        given = [{"role": "user", "content": "say first"}, {"role": "assistant", **said}]
        body = {"model": "m", "messages": [*given, {"role": "user", "content": "say second"}]}
        assert (await post(env.models, "/v1/chat/completions", body))[0] == 200

    trajectory = await rollout(plain_bench.env("words"), made[1].agent(agent), rules=Rules(rewards="first"))
    is_scored(trajectory, 1.0)
    assert [message["content"] for message in trajectory.messages] == ["say first", "first", "say second", "second"]


@pytest.mark.parametrize(
    "call",
    [3, {"id": "c1"}, {"id": "c1", "function": "work"}, {"id": "c1", "function": {"name": "w", "arguments": {"n": 1}}}],
    ids=str,
)
async def test_calls_that_an_agent_writes_oddly_are_its_own_affair(
    plain_bench: Bench, made: tuple[Model, ModelGateway], call: Any
) -> None:
    async def agent(env: Episode, task: Task) -> None:
        assert env.models is not None
        await post(env.models, "/v1/chat/completions", asking("say first"))
        odd = {"role": "assistant", "content": "first", "tool_calls": [call]}
        body = {"model": "m", "messages": [odd, {"role": "user", "content": "say second"}]}
        for _ in range(2):
            assert (await post(env.models, "/v1/chat/completions", body))[0] == 200

    trajectory = await rollout(plain_bench.env("words"), made[1].agent(agent), rules=Rules(rewards="first"))
    is_scored(trajectory, 1.0)
    assert len(trajectory.turns) == 3


async def test_what_a_limit_refuses_may_be_told_to_several_that_ask(
    plain_bench: Bench, made: tuple[Model, ModelGateway]
) -> None:
    """An agent that asks for different things at a time can still do what is left to do."""

    async def agent(env: Episode, task: Task) -> None:
        assert env.models is not None
        models, path = env.models, "/v1/chat/completions"
        await post(models, path, asking("say hello"))
        for status, _ in await asyncio.gather(*(post(models, path, asking(f"say {n}")) for n in range(3))):
            assert status == 429
        await env.call_tool("work")

    behind = made[1].agent(agent, max_calls=1)
    trajectory = await rollout(plain_bench.env("words"), behind, rules=Rules(rewards="first"))
    is_scored(trajectory, 1.0)
    assert [len(turn.calls) for turn in trajectory.turns] == [1]


async def test_an_agent_inside_a_sandbox_has_no_key_of_the_provider(
    plain_bench: Bench, made: tuple[Model, ModelGateway]
) -> None:
    """It reaches the gateway, and nothing else of this machine, by the sandbox's allow-list."""
    root = plain_bench.home / "envs" / "shut-in" / "1.0.0"
    (root / "src").mkdir(parents=True)
    (root / "src" / "custom_env.py").write_text((plain_bench.home / "envs/words/1.0.0/src/custom_env.py").read_text())
    network = {"allow": [f"127.0.0.1:{made[1].port}"]}
    about = {"name": "shut-in", "version": "1.0.0", "deployConfig": {"network": network}}
    (root / "config.json").write_text(json.dumps(about))

    async def inside(env: Episode, task: Task) -> str:
        assert env.models is not None
        given = [f"{name}={value}" for name, value in env.models.variables.items()]
        done = await env.exec(["env", *given, "python3", "-c", PROGRAM, "2"])
        assert done.returncode == 0, done.stderr
        return done.stdout.strip()

    trajectory = await rollout(plain_bench.env("shut-in"), made[1].agent(inside), rules=Rules(rewards="first"))
    is_scored(trajectory, 1.0)
    assert trajectory.answer == "second"
    assert len(trajectory.turns) == 2
    assert made[0].keys[-1] == f"Bearer {KEY}"
    await http.close()
