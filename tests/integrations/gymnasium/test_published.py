"""Gymnasium's environments published as ours, for agents that call tools."""

from __future__ import annotations

from typing import Any

import numpy
import pytest

from aenv.client.sync import wait
from aenv.errors import AEnvError, Invalid, StartFailed
from aenv.rl import Episode, Rules, Task, rollout
from tests.integrations.gymnasium.walk import Walk
from tests.rl.bench import Bench
from tests.rl.proofs import is_scored

pytestmark = pytest.mark.xdist_group("gymnasium")
STEP = {"way": 1, "push": [0.25, -0.25]}


def test_an_agent_plays_it_by_tools(bench: Bench) -> None:
    own = Walk()
    own.reset(seed=3)

    async def agent(env: Episode, task: Task) -> list[float]:
        names = [tool["name"].partition("/")[2] for tool in await env.list_tools()]
        assert names == ["reset", "step"]
        for _ in range(3):
            result = await env.call_tool("step", {"action": STEP})
            assert not result.is_error, result.text
        return [found["score"] for found in [await env.call_reward()]]

    trajectory = wait(rollout(bench.env("walk"), agent, seed=3, rules=Rules()))
    action = {"way": 1, "push": numpy.array([0.25, -0.25])}
    total = sum(own.step(action)[1] for _ in range(3))
    is_scored(trajectory, total)
    assert trajectory.answer == [total]
    assert trajectory.observation["observation"]["steps"] == 0
    assert trajectory.observation["info"] == {"drift": 0.5}


@pytest.mark.parametrize("action", [1, {"way": 1}, {"way": 5, "push": [0, 0]}, {"way": 1, "push": [2]}, None])
def test_what_is_no_action_is_told(bench: Bench, action: object) -> None:
    async def play() -> tuple[bool, str, int]:
        async with bench.env("walk") as env:
            early = await env.call_tool("step", {"action": STEP})
            assert early.is_error
            assert "call reset" in early.text
            await env.call_tool("reset", {"seed": 1})
            result = await env.call_tool("step", {"action": action})
            return result.is_error, result.text, (await env.call_reward())["steps"]

    is_error, said, steps = wait(play())
    assert (is_error, steps) == (True, 0)
    assert "is no member of" in said


def test_an_episode_that_is_over(bench: Bench) -> None:
    async def play() -> None:
        async with bench.env("short", arguments=["2"]) as env:
            await env.call_tool("reset", {"seed": 1, "options": {"place": 1.0}})
            step = [0, "step", STEP]
            found = [await env.call_function("gymnasium_play", {"moves": [step]}) for _ in range(2)]
            assert [one["truncated"] for (one,) in found] == [False, True]
            assert (await env.call_reward())["over"]
            with pytest.raises(AEnvError, match="call reset"):
                await env.call_function("gymnasium_play", {"moves": [step]})

    wait(play())


def test_several_environments_in_one_instance(bench: Bench) -> None:
    """Each has an episode of its own, and a move that cannot be made keeps no other from being made."""
    own = [Walk(), Walk()]

    async def play() -> None:
        async with bench.env("walk") as env:

            async def moved(*moves: list[object]) -> list[dict[str, Any]]:
                found: list[dict[str, Any]] = await env.call_function("gymnasium_play", {"moves": list(moves)})
                return found

            begun = await moved([0, "reset", {"seed": 1}], [5, "reset", {"seed": 2, "options": {"place": 1.0}}])
            first = [own[0].reset(seed=1)[0], own[1].reset(seed=2, options={"place": 1.0})[0]]
            assert [one["observation"]["place"] for one in begun] == [one["place"].tolist() for one in first]
            action = {"way": 1, "push": numpy.array([0.25, -0.25])}
            for _ in range(3):
                found = await moved([0, "step", STEP], [9, "step", STEP], [5, "step", 7], [5, "step", STEP])
                assert [found[at]["reward"] for at in (0, 3)] == [one.step(action)[1] for one in own]
                assert [found[at]["error"]["code"] for at in (1, 2)] == ["conflict", "invalid"]
                assert "call reset" in found[1]["error"]["message"]
            assert (await env.call_reward())["steps"] == 3
            for odd in ([-1, "reset", {}], [1024, "reset", {}], [0, "close", {}], [0, "reset"]):
                with pytest.raises(Invalid):
                    await moved(odd)

    wait(play())


def test_one_that_cannot_be_made(bench: Bench) -> None:
    with pytest.raises(StartFailed, match="division by zero"):
        wait(bench.env("broken").initialize())
