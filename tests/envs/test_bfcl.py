"""The built-in bfcl on the process engine: the benchmark's own numbers, many conversations in one instance."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio

from aenv import Environment
from aenv.errors import Invalid
from tests.envs.benchmarks import needs
from tests.envs.episodes import Task, check_agent_is_kept_out, nop, oracle, passed, rolled, tasks
from tests.rl.bench import Bench

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.xdist_group("bfcl"), needs("bfcl")]
CARD = "1234567812345678"
"""One that the benchmark adds to every long conversation about travels."""


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def env(bench: Bench) -> AsyncIterator[Environment]:
    async with bench.env("bfcl") as found:
        yield found


async def begun(env: Environment, id: str) -> Task:
    category = id.rpartition("_")[0]
    [task] = [task for task in await tasks(env, domain=category) if task["id"] == id]
    await env.reset(None, task["reset"])
    return task


async def call(env: Environment, name: str, /, **arguments: Any) -> Any:
    result = await env.call_tool(name, arguments)
    assert not result.is_error, result.text
    return json.loads(result.text)


async def refused(env: Environment, name: str, /, **arguments: Any) -> str:
    result = await env.call_tool(name, arguments)
    assert result.is_error, result.text
    return result.text


async def silent(env: Environment, task: Task) -> dict[str, Any]:
    """An agent that listens to the end and calls nothing."""
    await env.reset(None, task["reset"])
    for _ in range(task["metadata"]["turns"]):
        last = await call(env, "finish_turn")
    assert last["over"]
    found: dict[str, Any] = await env.call_reward()
    return found


async def test_the_selections(env):
    everything = await tasks(env)
    assert Counter(task["metadata"]["category"] for task in everything) == {
        "multi_turn_base": 200,
        "multi_turn_miss_func": 200,
        "multi_turn_miss_param": 200,
        "multi_turn_long_context": 200,
    }
    assert len({task["id"] for task in everything}) == 800
    assert await tasks(env, domain="all") == everything
    assert await tasks(env, domain="base") == await tasks(env, domain="multi_turn_base") == everything[:200]
    source = (await env.call_function("tasks", {"domain": "base"}))["source"]
    assert source == {"name": "bfcl-eval", "version": "2026.3.23"}


async def test_the_oracle_passes_every_conversation(bench, env):
    everything = await tasks(env)
    async with bench.env("bfcl") as other:
        halves = await asyncio.gather(
            passed(env, oracle, everything[::2]),
            passed(other, oracle, reversed(everything[1::2])),
        )
    assert sorted(halves[0] + halves[1]) == sorted(task["id"] for task in everything)


async def test_nop_and_an_agent_that_calls_nothing_pass_none(env):
    everything = await tasks(env)
    assert await passed(env, nop, everything) == []
    assert await passed(env, silent, everything) == []


async def test_rollouts_play_tasks_as_they_are_given(bench, env):
    everything = (await tasks(env))[::40]
    assert sorted(await rolled(bench, "bfcl", everything)) == sorted(task["id"] for task in everything)


async def test_the_next_episode_knows_nothing_of_the_one_before(env):
    task = await begun(env, "multi_turn_base_0")
    before = await call(env, "ls")
    assert (await oracle(env, task))["score"] == 1.0
    await env.reset(None, task["reset"])
    assert await call(env, "ls") == before
    assert (await call(env, "pwd")) == {"current_working_directory": "/workspace"}


async def test_not_even_through_the_data_that_long_conversations_share(env):
    async def spend() -> tuple[float, float]:
        await begun(env, "multi_turn_long_context_150")
        names = {"user_first_name": "A", "user_last_name": "B"}
        secrets = {"client_id": "a", "client_secret": "b", "refresh_token": "c", "grant_type": "read_write"}
        token = (await call(env, "authenticate_travel", **names, **secrets))["access_token"]
        card = {"access_token": token, "card_id": CARD}
        before = (await call(env, "get_credit_card_balance", **card))["card_balance"]
        await call(env, "set_budget_limit", access_token=token, budget_limit=10)
        flight = {"travel_date": "2024-12-15", "travel_from": "SFO", "travel_to": "LAX", "travel_class": "economy"}
        assert (await call(env, "book_flight", **card, **flight))["booking_status"]
        await env.call_reward()
        return before, (await call(env, "get_credit_card_balance", **card))["card_balance"]

    first = await spend()
    assert first[0] > first[1]
    assert await spend() == first


async def test_a_function_that_is_missing_comes_with_its_turn(env):
    task = await begun(env, "multi_turn_miss_func_0")
    assert "sort" not in task["tools"]
    assert "grep" in task["tools"]
    asked = {"name": "sort", "arguments": {"file_name": "final_report.pdf"}}
    assert await refused(env, "call_added_function", **asked) == "sort is not available"
    assert await refused(env, "sort", file_name="final_report.pdf") == "sort is not available"
    for _ in range(2):
        assert "added_functions" not in await call(env, "finish_turn")
    assert await refused(env, "call_added_function", **asked) == "sort is not available"
    told = await call(env, "finish_turn")
    assert told["user"] == "I have updated some more functions you can choose from. What about now?"
    assert [function["name"] for function in told["added_functions"]] == ["sort"]
    await call(env, "cd", folder="document")
    assert "sorted_content" in await call(env, "call_added_function", **asked)
    assert "sorted_content" in await call(env, "sort", file_name="final_report.pdf")
    assert (await call(env, "finish_turn"))["user"].startswith("Move 'previous_report.pdf'")
    assert await call(env, "finish_turn") == {"over": True, "user": ""}
    assert await refused(env, "finish_turn") == "the conversation is over"
    assert await refused(env, "ls") == "the conversation is over"


async def test_what_is_wrong_in_one_turn_is_not_scored(env):
    task = await begun(env, "multi_turn_base_0")
    steps = await env.call_function("solution", task["reset"])
    for step in steps:
        if step["name"] != "sort":
            await env.call_tool(step["name"], step["arguments"])
    found = await env.call_reward()
    assert (found["score"], found["turns"]) == (0.0, found["turns_wanted"])
    assert found["error_type"] == "multi_turn:empty_turn_model_response"

    await env.reset(None, task["reset"])
    await env.call_tool("mkdir", {"dir_name": "other"})
    for step in steps:
        await env.call_tool(step["name"], step["arguments"])
    assert (await env.call_reward())["error_type"] == "multi_turn:instance_state_mismatch"

    await env.reset(None, task["reset"])
    for step in steps[:3]:
        await env.call_tool(step["name"], step["arguments"])
    assert (await env.call_reward())["error_type"] == "multi_turn:force_terminated"


async def test_the_last_turn_ends_with_the_episode(env):
    task = await begun(env, "multi_turn_base_0")
    *steps, last = await env.call_function("solution", task["reset"])
    assert last["name"] == "finish_turn"
    for step in steps:
        await env.call_tool(step["name"], step["arguments"])
    assert (await env.call_reward())["score"] == 1.0
    assert (await env.call_reward())["score"] == 1.0, "it may be taken twice"


async def test_mistakes_are_told_as_in_the_benchmark(env):
    await begun(env, "multi_turn_base_0")
    assert "Error during execution" in await refused(env, "cd", nonsense=1)
    assert "Error during execution" in await refused(env, "cd")
    assert "error" in await call(env, "cd", folder="no-such-folder")
    assert await refused(env, "startEngine", ignitionMode="START") == "startEngine is not available"


async def test_arguments_are_data_and_never_code(env):
    await begun(env, "multi_turn_base_0")
    sneaky = {"folder=__import__('os')._exit(1) or folder": "document"}
    assert "cd has no argument" in await refused(env, "cd", **sneaky)
    assert "error" in await call(env, "cd", folder="' + __import__('os')._exit(1) + '")
    assert await refused(env, "call_added_function", name="__import__", arguments={}) == "__import__ is not available"
    assert (await call(env, "pwd")) == {"current_working_directory": "/workspace"}


async def test_nothing_of_the_solutions_is_in_the_tasks_or_in_reach_of_an_agent(env):
    everything = await tasks(env)
    for task in everything:
        assert set(task) == {"id", "instruction", "system", "reset", "tools", "metadata"}
        assert set(task["metadata"]) == {"category", "classes", "turns"}
        assert task["reset"] == {"task": task["id"]}
    await check_agent_is_kept_out(env, everything[0])


async def test_an_unknown_task_is_answered_with_the_nearest(env):
    with pytest.raises(Invalid, match="no conversation 'multi_turn_base_1000'") as caught:
        await env.reset(None, {"task": "multi_turn_base_1000"})
    assert "did you mean 'multi_turn_base_1" in str(caught.value.hint)
    assert await refused(env, "finish_turn") == "no conversation has begun"
    with pytest.raises(Invalid):
        await tasks(env, domain="single_turn")
