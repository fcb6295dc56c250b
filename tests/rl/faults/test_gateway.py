"""A platform that is killed while episodes go on, or ends their instances: what is scored is scored rightly."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from aenv import Environment
from aenv.client.api import ApiClient
from aenv.models import State
from aenv.rl import Episode, Rules, Task, rollout, rollouts
from tests.platform.support import Platform, platform
from tests.rl.bench import SABOTEUR, TURNS
from tests.rl.proofs import has_no_number, is_scored
from tests.support import eventually

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.xdist_group("rl-faults-1")]
HONEST = {"network", "sandbox_lost", "call_timeout", "start_failed"}


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Platform, str]]:
    """A platform with the saboteur in its hub."""
    project = tmp_path_factory.mktemp("project") / "saboteur"
    shutil.copytree(SABOTEUR, project, ignore=shutil.ignore_patterns("__pycache__"))
    with platform(AENV_GRACE="30") as found:
        yield found, found.push(project)


@pytest.fixture
def env(served: tuple[Platform, str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., Environment]:
    """Environments of the platform, through its gateway, as from another machine."""
    server, ref = served
    if not server.alive:
        server.start()
    monkeypatch.setenv("AENV_HOME", str(tmp_path))

    async def elsewhere(instance: Any) -> bool:
        return False

    monkeypatch.setattr("aenv.client.platform._is_here", elsewhere)

    def make(**options: Any) -> Environment:
        return Environment(ref, aenv_url=server.control, api_key=server.token, **{"timeout": 60.0, **options})

    return make


async def restarted(server: Platform) -> None:
    await asyncio.to_thread(server.kill)
    await asyncio.to_thread(server.start)


async def gone(server: Platform) -> None:
    """Nothing of an episode is left."""

    api = ApiClient(server.control, server.token)

    async def look() -> bool:
        found, _ = await api.list(status=[State.PENDING, State.CREATING, State.RUNNING])
        return not found

    await eventually("the end of every instance", look, 60.0)


async def test_one_that_goes_well(served: tuple[Platform, str], env: Callable[..., Environment]) -> None:
    async def agent(env: Episode, task: Task) -> None:
        for _ in range(TURNS):
            await env.call_tool("work")

    trajectory = await rollout(env(), agent, seed=1)
    is_scored(trajectory, TURNS)
    assert trajectory.provenance.digest
    await gone(served[0])


@pytest.mark.parametrize("when", ["between turns", "in a call"])
@pytest.mark.parametrize("swallow", [False, True])
async def test_a_gateway_that_is_killed_and_comes_back(
    served: tuple[Platform, str], env: Callable[..., Environment], when: str, swallow: bool
) -> None:
    """Either it goes on where it was, and every call has been done once, or there is no number."""
    server, _ = served

    async def agent(env: Episode, task: Task) -> int:
        for turn in range(TURNS):
            try:
                if turn == 1 and when == "between turns":
                    await restarted(server)
                if turn == 1 and when == "in a call":
                    waiting = asyncio.create_task(env.call_tool("pause", {"seconds": 1.0}))
                    await asyncio.sleep(0.2)
                    await restarted(server)
                    await waiting
                await env.call_tool("work")
            except Exception:
                if not swallow:
                    raise
        return TURNS

    trajectory = await rollout(env(), agent, rules=Rules(retries=0))
    if trajectory.ok:
        is_scored(trajectory, TURNS)
    else:
        has_no_number(trajectory, HONEST, {"tool", "agent", "reward"})
    await gone(server)


async def test_a_gateway_that_is_killed_in_a_run(served: tuple[Platform, str], env: Callable[..., Environment]) -> None:
    server, _ = served
    killed = False

    async def agent(env: Episode, task: Task) -> None:
        nonlocal killed
        for turn in range(TURNS):
            await env.call_tool("work")
            if turn == 1 and task.id == "t1" and not killed:
                killed = True
                await restarted(server)

    tasks = [{"id": f"t{place}"} for place in range(6)]
    async with rollouts(env(), agent, tasks, concurrency=3) as run:
        found = [trajectory async for trajectory in run]
    assert sorted(trajectory.task.id for trajectory in found) == [task["id"] for task in tasks]
    for trajectory in found:
        if trajectory.ok:
            is_scored(trajectory, TURNS)
        else:
            has_no_number(trajectory, HONEST, {"create", "reset", "tool", "reward"})
    await gone(server)


@pytest.mark.parametrize("reward", ["of the environment", "of the trainer"])
async def test_an_instance_that_was_deleted_behind_the_clients_back(
    served: tuple[Platform, str], env: Callable[..., Environment], reward: str
) -> None:
    """An agent that catches everything goes on, and a reward that asks no sandbox would know no better."""
    server, _ = served

    async def agent(env: Episode, task: Task) -> None:
        for turn in range(TURNS):
            try:
                await env.call_tool("work")
            except Exception:
                await asyncio.sleep(0)
            if turn == 0:
                await asyncio.to_thread(server.ask, "DELETE", f"/env-instance/{env.instance_id}")

    rewards: Any = None if reward == "of the environment" else lambda trajectory: len(trajectory.calls)
    trajectory = await rollout(env(), agent, rules=Rules(retries=0, rewards=rewards))
    has_no_number(trajectory, {"sandbox_lost", "not_found", "expired"}, {"tool"})
    await gone(server)


async def test_a_key_that_is_refused(served: tuple[Platform, str], env: Callable[..., Environment]) -> None:
    async def agent(env: Episode, task: Task) -> None:
        await env.call_tool("work")

    server, ref = served
    wrong = Environment(ref, aenv_url=server.control, api_key="wrong")
    has_no_number(await rollout(wrong, agent), {"unauthorized"}, {"create"})
