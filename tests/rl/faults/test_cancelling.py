"""A cancellation in any phase, and a run that is left early: nothing is left behind, and who cancelled is obeyed."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack
from typing import Any

import pytest

from aenv.models import Sandbox
from aenv.rl import Episode, OpenAIAgent, Rules, Task, rollout, rollouts
from tests.rl import proxies, standin
from tests.rl.bench import Bench, worker
from tests.rl.proxies import Trigger
from tests.support import eventually

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.xdist_group("rl-faults-0")]


class Halt:
    """Stops an episode in a phase, and says when it has come there."""

    def __init__(self) -> None:
        self.reached = asyncio.Event()

    async def __call__(self, sandbox: Sandbox) -> str:
        self.reached.set()
        return proxies.STALL


@pytest.mark.parametrize("catching", [False, True])
@pytest.mark.parametrize("phase", ["start", "create", "reset", "agent", "model", "tool", "reward", "retry"])
async def test_a_cancellation_leaves_nothing(bench: Bench, phase: str, catching: bool) -> None:
    halt = Halt()
    agent: Any = worker
    task: dict[str, Any] = {"arguments": ["setup=hang"] if phase == "start" else []}
    rules = Rules()

    async def waits(env: Episode, task: Task) -> None:
        halt.reached.set()
        await asyncio.Event().wait()

    async def catches(env: Episode, task: Task) -> Any:
        try:
            return await inner(env, task)
        except Exception:
            return "never mind"

    async with AsyncExitStack() as stack:
        if phase == "agent":
            agent = waits
        elif phase == "model":
            server = await stack.enter_async_context(standin.model(standin.HANG))
            halt.reached = server.hanging
            agent = OpenAIAgent("m", base_url=server.url)
        elif phase == "retry":
            rules = Rules(retries={"author_failed": 1000})
            task["reward"] = {"what": "nan"}
        elif phase != "start":
            bench.between = Trigger({"create": "tools"}.get(phase, phase), halt).between
        inner = agent
        going = asyncio.create_task(rollout(bench.env(), catches if catching else agent, task, rules=rules))
        try:
            if phase == "start":
                await eventually("the start", bench.alive)
            elif phase == "retry":
                before = len(bench.made)
                await eventually("the second attempt", lambda: len(bench.made) >= before + 2)
            else:
                await halt.reached.wait()
            going.cancel()
            with pytest.raises(asyncio.CancelledError):
                await going
        finally:
            bench.between = None
    assert await bench.alive() == []
    await bench.empty()


@pytest.mark.parametrize("how", ["break", "raise", "cancel"])
async def test_leaving_a_run_early_leaves_nothing(bench: Bench, how: str) -> None:
    others = asyncio.Semaphore(0)
    done: list[str] = []

    async def agent(env: Episode, task: Task) -> None:
        await env.call_tool("work")
        if not done:  # whichever instance was ready first
            done.append(task.id)
            return
        others.release()
        await asyncio.Event().wait()

    async def go() -> list[str]:
        tasks = [{"id": f"task-{place}"} for place in range(6)]
        found = []
        async with rollouts(bench.env(), agent, tasks, concurrency=4, prefetch=2) as run:
            async for trajectory in run:
                found.append(trajectory.task.id)
                for _ in range(3):
                    await others.acquire()
                if how == "break":
                    break
                if how == "raise":
                    raise KeyError("of the trainer")
                await asyncio.Event().wait()
        return found

    going = asyncio.create_task(go())
    if how == "break":
        assert await going == done
    elif how == "raise":
        with pytest.raises(KeyError):
            await going
    else:
        await eventually("three that play", lambda: len(bench.family.instances()) >= 3)
        going.cancel()
        with pytest.raises(asyncio.CancelledError):
            await going
    assert await bench.alive() == []
    await bench.empty()


async def test_a_failed_episode_leaves_nothing_that_goes_on(bench: Bench) -> None:
    """What an agent had begun and not waited for finds no instance, and makes none."""
    left: list[asyncio.Task[Any]] = []
    over = asyncio.Event()

    async def agent(env: Episode, task: Task) -> str:
        async def later() -> None:
            await over.wait()
            await env.call_tool("work")

        left.append(asyncio.create_task(later()))
        await env.call_tool("work")
        return "done"

    before = len(bench.made)
    trajectory = await rollout(bench.env(), agent)
    assert trajectory.reward == 1.0
    over.set()
    await asyncio.wait(left)
    assert left[0].exception() is not None
    assert len(bench.made) == before + 1
    assert len(trajectory.turns) == 1
    await bench.empty()
