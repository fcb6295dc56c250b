"""Benchmarks in the middle of an episode: a sibling has the state of the moment, and plays on to the same reward."""

from __future__ import annotations

from typing import Any

import pytest

from aenv import Environment
from tests.envs.benchmarks import needs
from tests.rl.bench import Bench

pytestmark = pytest.mark.asyncio(loop_scope="module")
CASES: dict[str, dict[str, Any]] = {
    "tau2": {"domain": "retail"},
    "bfcl": {},
    "agentdojo": {},
    "reasoning-gym": {},
}


def _case(name: str) -> Any:
    return pytest.param(name, marks=[needs(name), pytest.mark.xdist_group(name)])


async def _step(env: Environment, step: dict[str, Any]) -> None:
    if "function" in step:
        await env.call_function(step["function"], step["arguments"])
    else:
        await env.call_tool(step["name"], step["arguments"])


@pytest.mark.parametrize("name", [_case(name) for name in CASES])
async def test_siblings_in_the_middle_of_an_episode(bench: Bench, name: str) -> None:
    async with bench.env(name, startup_timeout=600.0, seed=7) as env:
        found = (await env.call_function("tasks", CASES[name]))["tasks"]
        steps: list[dict[str, Any]] = []
        for task in found:
            if len(steps) < 3:
                await env.reset(7, task["reset"])
                steps = await env.call_function("solution", task["reset"])
        half = len(steps) // 2
        for step in steps[:half]:
            await _step(env, step)
        place = await env.checkpoint()
        async with await env.fork(2) as siblings:
            assert [sibling.forked.how for sibling in siblings] == ["live", "live"], siblings[0].forked.why
            for step in steps[half:]:
                await _step(siblings[0], step)
            rewards = [(await found.call_reward())["score"] for found in (*siblings, env)]
        assert rewards[0] == 1.0
        assert rewards[1] == rewards[2] != 1.0, "the others are where they were"
        for step in steps[half:]:
            await _step(env, step)
        assert (await env.call_reward())["score"] == 1.0
        await env.restore(place)
        assert (await env.call_reward())["score"] == rewards[1]
