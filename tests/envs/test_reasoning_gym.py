"""Reasoning Gym in real instances: the same puzzles everywhere, scored by their own scorers, whatever the answer."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys

import pytest
import pytest_asyncio

from aenv import Invalid
from aenv.rl import Task
from tests.envs.benchmarks import needs
from tests.envs.episodes import check_agent_is_kept_out, nop, oracle, rolled

pytestmark = [
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.xdist_group("reasoning-gym"),
    needs("reasoning-gym"),
]
WITHOUT_AN_ANSWER = {"boxnet", "graph_color", "propositional_logic", "rubiks_cube", "rush_hour"}
"""Whose entries bring none, since many are right. With composite, which nobody can make by its name, they are the six
of 106 that the oracle does not solve."""
LITERALS = {"binary_matrix", "n_queens", "spiral_matrix", "string_insertion"}
EVALUATED = {
    *LITERALS,
    *("countdown", "puzzle24"),
    *("intermediate_integration", "polynomial_multiplication", "simple_integration"),
}
"""Whose scorers evaluate an answer."""
NEVER_HALTING = "game_of_life_halting"
"""Whose puzzle does not halt here, and whose scorer takes every text without the word true for a no."""
PROGRAMS = (
    "__import__('os').mkdir('/tmp/owned')",
    "exec(\"import os; os.mkdir('/tmp/owned')\")",
    "[exec(\"import os; os.mkdir('/tmp/owned')\")]",
    "(open)(S('/tmp/owned'), S('w'))",
    "sympify(\"__import__('os').mkdir('/tmp/owned')\")",
    "[[valid_solutions[0]]]",
    "[oracle_answer]",
)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def env(bench):
    async with bench.env("reasoning-gym") as env:
        yield env


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def tasks(env):
    """One of each dataset."""
    return (await env.call_function("tasks", {"domain": "all"}, timeout=300))["tasks"]


async def answered(env, task, text):
    await env.reset(1, {"task": task})
    assert (await env.call_tool("answer", {"text": text})).text == "noted"
    return await env.call_reward(timeout=120)


async def test_the_tasks(env, tasks):
    assert len(tasks) == 105
    assert len({task["id"] for task in tasks}) == 105
    found = await env.call_function("tasks", {"domain": "chain_sum", "size": 3, "dataset_seed": 7})
    assert found["source"] == {"name": "reasoning-gym", "version": "0.1.25"}
    assert [task["id"] for task in found["tasks"]] == ["chain_sum-7-0", "chain_sum-7-1", "chain_sum-7-2"]
    assert Task.of(found["tasks"][0]).metadata == {"dataset": "chain_sum", "category": "arithmetic"}
    more = await env.call_function("tasks", {"domain": "chain_sum", "dataset_seed": 7})
    assert more["tasks"][:3] == found["tasks"]
    assert len(more["tasks"]) == 50
    other = await env.call_function("tasks", {"domain": "chain_sum", "size": 1, "dataset_seed": 8})
    assert other["tasks"][0]["instruction"] != found["tasks"][0]["instruction"]
    for task in found["tasks"]:
        assert set(task) == {"id", "instruction", "system", "tools", "reset", "metadata"}


async def test_the_oracle_solves_100_datasets_and_nop_none(env, tasks):
    unsolved = set()
    for task in tasks:
        assert (await nop(env, task))["score"] == 0.0
        found = await oracle(env, task)
        if found["score"] != 1.0:
            unsolved.add(task["metadata"]["dataset"])
            assert found["reason"] == "there is no answer", task["id"]
        assert found["passed"] == (found["score"] == 1.0)
    assert unsolved == WITHOUT_AN_ANSWER


LISTING = """
import asyncio, json
from aenv import Environment

async def main():
    async with Environment("reasoning-gym") as env:
        print(json.dumps(await env.call_function("tasks", {"domain": "all"}, timeout=300)))

asyncio.run(main())
"""


async def test_puzzles_are_the_same_in_another_program(tasks):
    """Its interpreters give texts other hashes, which several generators depend on."""
    listed = await asyncio.to_thread(subprocess.run, [sys.executable, "-c", LISTING], capture_output=True, check=True)
    assert json.loads(listed.stdout)["tasks"] == tasks


async def test_wrong_answers_get_what_the_scorer_gives_and_do_not_pass(env):
    assert await answered(env, "countdown-1-0", "1 + 1") == {
        "score": 0.05,
        "passed": False,
        "answered": True,
        "scored": True,
        "reason": "",
    }
    assert (await answered(env, "chain_sum-1-0", "xyzzy"))["score"] == 0.0


async def test_an_answer_that_makes_the_scorer_raise_gets_nothing_and_says_so(env):
    found = await answered(env, "prime_factorization-1-0", "xyzzy")
    assert found["score"] == 0.0
    assert found["scored"] is False
    assert found["answered"] is True
    assert "ValueError" in found["reason"]


async def test_formulas_and_literals_are_scored_however_they_are_written(env):
    for name in ("simple_integration", "polynomial_multiplication", "spiral_matrix", "n_queens", "puzzle24"):
        (call,) = await env.call_function("solution", {"task": f"{name}-3-1"})
        text = call["arguments"]["text"]
        assert (await answered(env, f"{name}-3-1", f" {text}"))["scored"] is True
    (call,) = await env.call_function("solution", {"task": "countdown-1-0"})
    assert (await answered(env, "countdown-1-0", f"({call['arguments']['text']})"))["score"] == 1.0


async def test_no_answer_runs_as_a_program(env, tasks):
    for task in tasks:
        name = task["metadata"]["dataset"]
        for program in PROGRAMS if name in EVALUATED else PROGRAMS[:2]:
            found = await answered(env, task["id"], program)
            assert found["passed"] == (name == NEVER_HALTING), found
            if name in LITERALS:
                assert found["score"] == 0.0, (name, program, found)
    assert (await env.exec("ls -d /tmp/owned")).returncode != 0


async def test_an_answer_that_takes_for_ever_is_given_up(env):
    found = await answered(env, "countdown-1-0", "9**9**9**9")
    assert found["score"] == 0.0
    assert found["scored"] is False
    assert (await answered(env, "chain_sum-1-0", "1"))["scored"] is True


async def test_nothing_is_left_of_an_earlier_episode(env):
    await answered(env, "chain_sum-1-0", "1")
    await env.reset(1, {"task": "chain_sum-1-1"})
    assert (await env.call_reward())["answered"] is False


async def test_the_last_answer_counts(env):
    (call,) = await env.call_function("solution", {"task": "chain_sum-1-0"})
    await env.reset(1, {"task": "chain_sum-1-0"})
    await env.call_tool("answer", {"text": "0.5"})
    await env.call_tool("answer", call["arguments"])
    assert (await env.call_reward())["score"] == 1.0


async def test_what_is_unknown_is_said(env):
    for arguments, hint in (
        ({"domain": "chain_sun"}, "chain_sum"),
        ({"domain": "composite"}, "one by one"),
        ({"size": 501}, "another dataset_seed"),
    ):
        with pytest.raises(Invalid) as caught:
            await env.call_function("tasks", arguments)
        assert hint in caught.value.hint
    for task in ("chain_sum", "chain_sum-1", "chain_sum-1-x", "nothing-1-0", "chain_sum-1-500", "chain_sum-1--1"):
        with pytest.raises(Invalid):
            await env.reset(1, {"task": task})
    with pytest.raises(Invalid, match="another puzzle"):
        await env.reset(1, {"task": "chain_sum-1-0", "question": "0" * 16})


async def test_rollouts_play_them_and_their_agents_are_kept_out(bench, env):
    listed = (await env.call_function("tasks", {"domain": "leg_counting", "size": 6}))["tasks"]
    assert sorted(await rolled(bench, "reasoning-gym", listed)) == [task["id"] for task in listed]
    await check_agent_is_kept_out(env, listed[0])
