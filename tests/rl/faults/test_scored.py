"""What is no failure: tools that fail, mistakes of a model, a reward of zero, turns that are used up, and what a retry
gets over. All of these are scored, and rightly."""

from __future__ import annotations

from typing import Any

import pytest

from aenv.rl import Episode, OpenAIAgent, Rules, Task, rollout
from tests.rl import proxies, standin
from tests.rl.bench import TURNS, Bench, worker
from tests.rl.faults.table import TABLE, run
from tests.rl.proofs import is_scored
from tests.rl.proxies import Trigger

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.xdist_group("rl-faults-1")]


async def test_one_that_goes_well(bench: Bench) -> None:
    trajectory = await rollout(bench.env(), worker, "Work.", seed=7)
    is_scored(trajectory, TURNS)
    assert (trajectory.ended, trajectory.answer, trajectory.retried) == ("done", "finished", [])
    assert trajectory.observation == {"seed": 7}
    assert len(trajectory.turns) == len(trajectory.calls) == TURNS
    await bench.empty()


@pytest.mark.parametrize(
    ("tool", "arguments", "said"),
    [
        ("work", {"what": "raise"}, "broken on purpose"),
        ("work", {"what": 7}, "what"),
        ("work", {"unknown": 1}, "unknown"),
        ("wrok", {}, "wrok"),
    ],
)
async def test_a_tool_that_fails_is_an_observation(
    bench: Bench, tool: str, arguments: dict[str, Any], said: str
) -> None:
    async def agent(env: Episode, task: Task) -> bool:
        await env.call_tool("work")
        found = await env.call_tool(tool, arguments)
        assert said in found.text
        return found.is_error

    trajectory = await rollout(bench.env(), agent)
    is_scored(trajectory, 1.0)
    assert trajectory.answer is True


@pytest.mark.parametrize(("reward", "score"), [({"value": 0.0}, 0.0), ({"value": -2.5}, -2.5), ({}, 0.0)])
async def test_a_reward_of_zero_is_a_reward(bench: Bench, reward: dict[str, Any], score: float) -> None:
    async def agent(env: Episode, task: Task) -> None:
        pass

    is_scored(await rollout(bench.env(), agent, {"reward": reward}), score)


@pytest.mark.parametrize(
    "answer",
    [
        standin.calling("work", "{broken"),
        standin.calling("work", "[1]"),
        standin.calling("work", '{"unknown": 1}'),
        standin.calling("wrok"),
        standin.calling("", ""),
        standin.calling("work", '{"what": "raise"}'),
    ],
    ids=["broken JSON", "no object", "wrong arguments", "unknown tool", "no name", "raises"],
)
async def test_a_mistake_of_a_model_is_told_to_it(bench: Bench, answer: Any) -> None:
    async with standin.model(answer, standin.calling(), standin.saying("done")) as server:
        trajectory = await rollout(bench.env(), OpenAIAgent("m", base_url=server.url, retries=0))
    is_scored(trajectory, 1.0)
    assert trajectory.answer == "done"
    told = [message for message in trajectory.messages if message["role"] == "tool"]
    assert len(told) == 2
    assert told[0]["content"]
    assert told[1]["content"] == "1"


@pytest.mark.parametrize("what", [proxies.CUT, proxies.CUT_LATE, proxies.HALF])
@pytest.mark.parametrize("exchange", ["tools", "reset", "tool", "reward"])
async def test_what_is_cut_once_is_asked_again_and_done_once(bench: Bench, exchange: str, what: str) -> None:
    trigger = Trigger(exchange, what, times=1)
    bench.between = trigger.between
    try:
        trajectory = await rollout(bench.env(), worker, rules=Rules(retries=0))
    finally:
        bench.between = None
    assert trigger.fired == 1
    is_scored(trajectory, TURNS)
    assert trajectory.retried == []


@pytest.mark.parametrize(
    "name",
    ["evicted, create", "evicted, reset", "evicted, tool", "evicted, reward", "killed from outside, tool"],
)
async def test_what_happens_once_is_got_over_by_a_retry(bench: Bench, name: str) -> None:
    case = TABLE[name]
    trajectory = await run(bench, case, retries=2, times=1)
    is_scored(trajectory, TURNS)
    assert [(found.kind in case.kinds, found.phase) for found in trajectory.retried] == [(True, case.phase)]
    assert len(trajectory.turns) == TURNS
    await bench.empty()


@pytest.mark.parametrize("name", ["time to live over, tool", "tool hangs"])
async def test_what_the_policy_may_have_caused_is_not_tried_again(bench: Bench, name: str) -> None:
    before = len(bench.made)
    trajectory = await run(bench, TABLE[name], retries=2)
    assert trajectory.failure is not None
    assert trajectory.retried == []
    assert len(bench.made) == before + 1


async def test_kinds_are_retried_as_the_rules_say(bench: Bench) -> None:
    before = len(bench.made)
    rules = Rules(retries={"author_failed": 1})
    trajectory = await rollout(bench.env(), worker, {"reward": {"what": "nan"}}, rules=rules)
    assert [found.kind for found in trajectory.retried] == ["author_failed"]
    assert len(bench.made) == before + 2
    assert trajectory.failure is not None
    rules = Rules(retries={"author_failed": 1})
    lost = await rollout(bench.env(), worker, {"arguments": ["reset=kill"]}, rules=rules)
    assert (lost.failure is not None, lost.retried) == (True, [])
