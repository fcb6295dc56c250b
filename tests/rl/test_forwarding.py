"""Episodes that go on in another sandbox when theirs is lost: the same trajectory and the same reward, or a loss."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import random
from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio

from aenv import Environment
from aenv.rl import Episode, Rules, Scored, Task, Trajectory, rollout, rollouts
from aenv.rl.recording import FORWARDS
from tests.rl.bench import Bench, benches, write_env
from tests.rl.proofs import is_scored

WALK = """
import os
import random
import signal
import time

from aenv import Context, register_reset, register_reward, register_tool

place = {"x": 0}


@register_reset
def begin(seed: int | None = None) -> int:
    place["x"] = 0
    return random.randrange(1000)


@register_tool
def step(by: int) -> dict:
    place["x"] += by * random.randrange(10)
    with open("steps.txt", "a") as steps:
        steps.write(f"{place['x']}\\n")
    return {"x": place["x"], "steps": len(open("steps.txt").readlines())}


@register_tool
def rest(seconds: float) -> None:
    time.sleep(seconds)


@register_tool
def die(context: Context) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


@register_tool
def who(context: Context) -> str:
    return context.instance_id


@register_reward
def far() -> float:
    return float(place["x"])
"""
SAVING = (
    WALK.replace("from aenv import", "from aenv import Unsupported, register_load, register_save,").replace(
        "import os\n", "import os\nimport secrets\n"
    )
    + """

@register_tool
def drift() -> dict:
    by = secrets.randbelow(10**9)
    place["x"] += by
    return {"x": place["x"], "by": by}


@register_save
def save() -> dict:
    if place["x"] < 0:
        raise Unsupported("it is below zero")
    return place


@register_load
def load(found: dict) -> None:
    place.update(found)
"""
)
TURNS = 6
pytestmark = pytest.mark.asyncio(loop_scope="module")
FORWARD = Rules(fast_forward=True)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def bench() -> AsyncIterator[Bench]:
    async with benches() as found:
        kinds = {"walk": "deterministic", "careless": "", "saving": "", "slow": "", "both": "deterministic"}
        for name, says in {**kinds, "forkable": "forkable"}.items():
            code = WALK if name in ("walk", "careless") else SAVING
            if name == "slow":
                code = code.replace("def save() -> dict:", "def save() -> dict:\n    time.sleep(3)")
            write_env(found.home, name, code)
            if name == "forkable":
                source = found.home / "envs" / name / "1.0.0" / "src" / "custom_env.py"
                source.write_text(source.read_text().replace("@register_save", "").replace("@register_load", ""))
            config = found.home / "envs" / name / "1.0.0" / "config.json"
            config.write_text(
                json.dumps({**json.loads(config.read_text()), "deployConfig": {says: True} if says else {}})
            )
        yield found


async def walk(env: Episode, task: Task) -> int:
    """Draws its own steps."""
    draws = random.Random(env.sample_seed)
    for _ in range(TURNS):
        last = await env.call_tool("step", {"by": draws.randrange(5)})
    return int(last.structured["x"])


def told(of: Trajectory) -> Any:
    """All of an episode but its times and its names."""
    calls = [(call.name, call.arguments, call.result) for call in of.calls]
    return of.group, of.sample, of.observation, len(of.turns), calls, of.answer, of.ended, of.outcome


async def _kill(bench: Bench, draws: random.Random) -> bool:
    alive = await bench.alive()
    if not alive:
        return False
    found = bench.family.instances()
    if found:
        draws.choice(found).kill()
    return bool(found)


@pytest.mark.parametrize(("name", "count"), [("walk", 100), ("saving", 40)])
async def test_instances_killed_at_random_change_no_reward_and_no_trajectory(
    bench: Bench, name: str, count: int
) -> None:
    tasks = [Task(id=f"t{number}") for number in range(count)]

    async def played(rules: Rules, killer: asyncio.Task[int] | None = None) -> dict[Any, Trajectory]:
        async with rollouts(bench.env(name), walk, tasks, n=3, seed=7, rules=rules, concurrency=8) as run:
            return {(found.group, found.sample): found async for found in run}

    async def kill(draws: random.Random) -> int:
        killed = 0
        while True:
            try:
                await asyncio.sleep(draws.uniform(0.01, 0.05))
            except asyncio.CancelledError:
                return killed
            killed += await _kill(bench, draws)

    quiet = await played(Rules())
    killing = asyncio.create_task(kill(random.Random(1)))
    try:
        found = await played(Rules(fast_forward=True, retries=50))  # killed before the first place was kept
    finally:
        killing.cancel()
    assert await killing > 10
    assert len(found) == len(quiet) == 3 * count
    forwarded = [one for one in found.values() if one.provenance.forwarded]
    assert len(forwarded) > 5, "some were killed in the middle"
    for key, one in found.items():
        assert told(one) == told(quiet[key]), one.outcome
    await bench.empty()


@pytest.mark.parametrize("name", ["saving", "forkable"])
async def test_what_comes_to_something_else_each_time_goes_on_from_where_it_was(bench: Bench, name: str) -> None:
    async def agent(env: Episode, task: Task) -> None:
        for _ in range(3):
            await env.call_tool("drift")
            await _lost(bench, env)

    found = await rollout(bench.env(name), agent, seed=1, rules=FORWARD)
    assert isinstance(found.outcome, Scored), found.outcome
    seen = [call.result.structured for call in found.calls if call.result]
    assert [one["x"] for one in seen] == list(itertools.accumulate(one["by"] for one in seen))
    assert found.reward == seen[-1]["x"]
    assert found.provenance.forwarded == 3
    await bench.empty()


async def test_what_cannot_be_kept_is_said_where_it_is_lost(bench: Bench) -> None:
    async def agent(env: Episode, task: Task) -> None:
        await env.call_tool("step", {"by": -1000})
        await _lost(bench, env)
        await env.call_tool("step", {"by": 1})

    found = await rollout(bench.env("saving"), agent, seed=1, rules=Rules(fast_forward=True, retries=0, reset=False))
    assert found.failure is not None
    assert "it is below zero" in found.failure.reason
    await bench.empty()


async def test_it_is_told_and_the_instance_is_the_last(bench: Bench) -> None:
    async def agent(env: Episode, task: Task) -> str | None:
        await env.call_tool("step", {"by": 1})
        before = env.instance_id
        (await bench.family.runtime(bench.engine, before)).kill()  # type: ignore[arg-type]
        await asyncio.gather(*(env.call_tool("step", {"by": 1}) for _ in range(3)))
        assert env.instance_id != before
        return env.instance_id

    found = await rollout(bench.env("walk"), agent, seed=1, rules=FORWARD)
    assert isinstance(found.outcome, Scored), found.outcome
    assert (found.provenance.forwarded, found.provenance.instance) == (1, found.answer)
    assert max(call.result.structured["steps"] for call in found.calls if call.result) == len(found.calls) == 4
    assert found.retried == []
    await bench.empty()


async def test_a_loss_between_the_agent_and_its_reward(bench: Bench) -> None:
    async def agent(env: Episode, task: Task) -> None:
        await env.call_tool("step", {"by": 1})
        (await bench.family.runtime(bench.engine, env.instance_id)).kill()  # type: ignore[arg-type]

    quiet = await rollout(bench.env("walk"), walk, seed=1)
    assert quiet.ok
    found = await rollout(bench.env("walk"), agent, seed=1, rules=FORWARD)
    assert isinstance(found.outcome, Scored), found.outcome
    assert found.calls[0].result is not None
    assert found.reward == found.calls[0].result.structured["x"]


@pytest.mark.parametrize(
    ("name", "tool", "why"),
    [
        ("careless", "step", "does not say that the same calls always come to the same"),
        ("walk", "who", "tool who, came to something else than before"),
    ],
)
async def test_what_cannot_be_gone_on_with_is_lost_and_says_why(bench: Bench, name: str, tool: str, why: str) -> None:
    async def agent(env: Episode, task: Task) -> None:
        await env.call_tool(tool, {"by": 1} if tool == "step" else {})
        (await bench.family.runtime(bench.engine, env.instance_id)).kill()  # type: ignore[arg-type]
        await env.call_tool("step", {"by": 1})

    rules = Rules(fast_forward=True, retries=0)
    found = await rollout(bench.env(name), agent, seed=1, rules=rules)
    assert found.failure is not None
    assert (found.failure.kind, found.failure.phase) == ("sandbox_lost", "tool")
    assert why in found.failure.reason
    await bench.empty()


async def test_a_call_that_was_cut_short_is_not_forgotten(bench: Bench) -> None:
    """Nobody knows what it did, so there is no place to go on from."""

    async def agent(env: Episode, task: Task) -> None:
        await env.call_tool("step", {"by": 1})
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(0.5):
                await env.call_tool("rest", {"seconds": 60})
        await _lost(bench, env)
        await env.call_tool("step", {"by": 1})

    found = await rollout(bench.env("saving"), agent, seed=1, rules=Rules(fast_forward=True, retries=0))
    assert found.failure is not None
    assert found.failure.kind == "sandbox_lost"
    assert "a call was cut short" in found.failure.reason
    await bench.empty()


@pytest.mark.parametrize("name", ["saving", "forkable", "walk"])
async def test_what_an_agent_went_back_from_is_left_there(bench: Bench, name: str) -> None:
    async def agent(env: Episode, task: Task) -> list[Any]:
        await env.call_tool("step", {"by": 1})
        place = await env.checkpoint()
        drawn = (await env.call_tool("step", {"by": 100})).text
        await env.restore(place)
        await _lost(bench, env)
        return [drawn, (await env.call_tool("step", {"by": 0})).text]

    found = await rollout(bench.env(name), agent, seed=1, rules=FORWARD)
    assert found.ok, found.outcome
    further, back = (json.loads(text)["x"] for text in found.answer)
    assert further > 99
    is_scored(found, float(back))
    assert back < 10
    assert found.provenance.forwarded == 1
    await bench.empty()


async def test_a_place_that_takes_long_to_keep_is_not_kept_and_that_is_all(bench: Bench) -> None:
    async def agent(env: Episode, task: Task) -> None:
        for _ in range(2):
            await env.call_tool("step", {"by": 1})

    found = await rollout(bench.env("slow", timeout=1.0), agent, seed=1, rules=FORWARD)
    assert found.ok, found.outcome
    await bench.empty()


async def test_what_promises_more_is_kept_no_less(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """A journal that does not tell all is no way to any place, but what the author's code says is."""
    monkeypatch.setenv("AENV_JOURNAL", "1000")

    async def agent(env: Episode, task: Task) -> None:
        for _ in range(8):
            await env.call_tool("step", {"by": 1})
        assert env.journal.gap
        await _lost(bench, env)
        await env.call_tool("step", {"by": 1})

    found = await rollout(bench.env("both"), agent, seed=1, rules=FORWARD)
    assert found.ok, found.outcome
    assert found.provenance.forwarded == 1
    await bench.empty()


async def test_what_kills_its_sandbox_each_time_is_given_up(bench: Bench) -> None:
    async def agent(env: Episode, task: Task) -> None:
        await env.call_tool("die")

    made = len(bench.made)
    found = await rollout(bench.env("walk"), agent, seed=1, rules=Rules(fast_forward=True, retries=0))
    assert found.failure is not None
    assert f"it was lost {FORWARDS} times before" in found.failure.reason
    assert len(bench.made) - made == FORWARDS + 1
    await bench.empty()


async def test_it_is_off_unless_asked_for(bench: Bench) -> None:
    async def agent(env: Episode, task: Task) -> None:
        await env.call_tool("die")

    found = await rollout(bench.env("walk"), agent, seed=1, rules=Rules(retries=0))
    assert found.failure is not None
    assert found.failure.kind == "sandbox_lost"
    assert found.provenance.forwarded == 0


async def _lost(bench: Bench, env: Episode) -> None:
    (await bench.family.runtime(bench.engine, env.instance_id)).kill()  # type: ignore[arg-type]


async def test_a_loss_while_tools_are_listed(bench: Bench) -> None:
    async def agent(env: Episode, task: Task) -> list[str]:
        await env.call_tool("step", {"by": 1})
        await _lost(bench, env)
        return [tool["name"] for tool in await env.list_tools()]

    found = await rollout(bench.env("walk"), agent, seed=1, rules=FORWARD)
    assert found.ok, found.outcome
    assert "walk/step" in found.answer
    assert found.provenance.forwarded == 1


async def test_what_the_platform_takes_to_go_on_is_no_time_of_the_agents(bench: Bench) -> None:
    async def agent(env: Episode, task: Task) -> None:
        for _ in range(2):
            await env.call_tool("rest", {"seconds": 0.8})
        await _lost(bench, env)
        await env.call_tool("rest", {"seconds": 0.8})

    found = await rollout(bench.env("walk"), agent, seed=1, rules=Rules(fast_forward=True, turn_timeout=1.5, retries=0))
    assert found.ok, found.outcome
    assert found.provenance.forwarded == 1


async def test_siblings_end_with_the_episode_of_the_agent_that_left_them(bench: Bench) -> None:
    async def agent(env: Episode, task: Task) -> None:
        siblings = await env.fork(2)
        assert [type(found) for found in siblings] == [Environment] * 2
        raise ValueError("and it leaves them")

    found = await rollout(bench.env("walk"), agent, seed=1)
    assert found.failure is not None
    assert found.failure.kind == "agent_failed"
    await bench.empty()
