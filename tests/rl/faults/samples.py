"""A few faults for engines whose sandboxes take seconds to start: each is run on every such engine."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

from aenv.rl import Episode, Rules, Task, Trajectory, rollout
from tests.rl.bench import TURNS, Bench, worker
from tests.rl.proofs import has_no_number, is_scored
from tests.support import eventually

LOST = {"sandbox_lost", "network"}
SMALL = {"memory": "256Mi"}
ONCE = Rules(retries=0)


async def goes_well(bench: Bench) -> None:
    trajectory = await rollout(bench.env(), worker, seed=4, rules=ONCE)
    is_scored(trajectory, TURNS)
    assert trajectory.observation == {"seed": 4}


async def reward_is_no_number(bench: Bench) -> None:
    trajectory = await rollout(bench.env(), worker, {"reward": {"what": "nan"}}, rules=ONCE)
    has_no_number(trajectory, {"author_failed"}, {"reward"})


async def out_of_memory(bench: Bench) -> None:
    async def agent(env: Episode, task: Task) -> None:
        try:
            await env.call_tool("work", {"what": "memory"})
        except Exception:
            await env.call_tool("work")

    trajectory = await rollout(bench.env(resources=SMALL), agent, rules=ONCE)
    has_no_number(trajectory, {"out_of_memory"}, {"tool"})


async def time_to_live_over(bench: Bench) -> None:
    async def agent(env: Episode, task: Task) -> None:
        await env.extend(1.0)
        while True:
            await env.call_tool("pause", {"seconds": 0.2})

    trajectory = await rollout(bench.env(ttl=600.0), agent, rules=ONCE)
    has_no_number(trajectory, {"expired"}, {"tool"})


async def struck(bench: Bench, strike: Callable[[str], Awaitable[Any]], *, swallow: bool) -> None:
    """It is ended in a call, from outside, by what gets the name of its instance."""

    async def agent(env: Episode, task: Task) -> None:
        await env.call_tool("work")
        striking = asyncio.create_task(strike(env.instance_id or ""))
        try:
            await env.call_tool("pause", {"seconds": 300})
        except Exception:
            if not swallow:
                raise
        finally:
            await asyncio.wait((striking,))
        striking.result()

    trajectory: Trajectory = await rollout(bench.env(timeout=120.0), agent, rules=ONCE)
    has_no_number(trajectory, LOST, {"tool"})


async def empty(bench: Bench) -> None:
    """Nothing is alive any more."""

    async def look() -> bool:
        return not await bench.alive()

    await eventually("the end of every instance", look)
