"""Help for tests of benchmarks: agents that know or do nothing, and what they are scored."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest

from aenv import Environment, rl
from aenv.client.provision import attach
from aenv.errors import Forbidden
from aenv.rl import Episode, rollouts
from tests.rl.bench import Bench

Task = dict[str, Any]


async def tasks(env: Environment, **selection: Any) -> list[Task]:
    """The tasks of a selection, each as an agent's program gets it."""
    found: list[Task] = (await env.call_function("tasks", selection))["tasks"]
    return found


async def oracle(env: Environment, task: Task) -> dict[str, Any]:
    """The reward of an agent that makes the calls of the benchmark's authors."""
    await env.reset(None, task["reset"])
    for step in await env.call_function("solution", task["reset"]):
        assert step["name"] in task["tools"], step
        result = await env.call_tool(step["name"], step["arguments"])
        assert not result.is_error, (task["id"], step, result.text)
    found: dict[str, Any] = await env.call_reward()
    return found


async def nop(env: Environment, task: Task) -> dict[str, Any]:
    """The reward of an agent that does nothing."""
    await env.reset(None, task["reset"])
    found: dict[str, Any] = await env.call_reward()
    return found


async def passed(env: Environment, agent: Any, chosen: Iterable[Task]) -> list[str]:
    """Which tasks the agent is scored 1.0 for, played one after the other."""
    return [task["id"] for task in chosen if (await agent(env, task))["score"] == 1.0]


async def rolled(bench: Bench, name: str, chosen: list[Task]) -> list[str]:
    """Which tasks the oracle is scored 1.0 for when rollouts play them, on two instances that are used again."""

    async def play(episode: Episode, task: rl.Task) -> None:
        for step in await episode.call_function("solution", task.reset):
            (await episode.call_tool(step["name"], step["arguments"])).raise_for_error()

    async with rollouts(bench.env(name), play, chosen, concurrency=2, reuse=len(chosen)) as run:
        return [trajectory.task.id async for trajectory in run if trajectory.reward == 1.0]


async def check_agent_is_kept_out(env: Environment, task: Task) -> None:
    """With what an agent is given, it gets at neither the tasks, nor the solution, nor the reward, nor the reset."""
    base, _, token = (await env.agent_url()).partition("/mcp?token=")
    agent = Environment(env.env_name, provision=attach(base, token))
    try:
        assert set(task["tools"]) <= {tool["name"].rpartition("/")[2] for tool in await agent.list_tools()}
        for asked in (
            agent.call_function("solution", task["reset"]),
            agent.call_function("tasks"),
            agent.call_reward(),
            agent.reset(None, task["reset"]),
        ):
            with pytest.raises(Forbidden):
                await asked
    finally:
        await agent.release()
