"""Instances that play several episodes: which are used again, which never are, and that nothing is left of them."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from typing import Any

import msgspec
import pytest

from aenv import Environment
from aenv.errors import Invalid, NotFound, RateLimited
from aenv.models import Sandbox, SandboxSpec
from aenv.rl import Episode, Rules, Stragglers, Task, Trajectory, rollouts
from tests.rl.bench import TURNS, Bench, idle, worker, write_env
from tests.rl.proofs import has_no_number, is_scored
from tests.rl.test_batches import all_of, named
from tests.support import eventually

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.xdist_group("rl-reusing")]


def instances(run: list[Trajectory]) -> Counter[str]:
    return Counter(trajectory.provenance.instance for trajectory in run)


def many(count: int, **fields: Any) -> list[dict[str, Any]]:
    return [{"id": f"task-{number}", **fields} for number in range(count)]


async def played(bench: Bench, agent: Any, tasks: Any, **options: Any) -> list[Trajectory]:
    """A run, after which nothing is left."""
    given = {"concurrency": 1, "reuse": 10, "seed": 1, **options}
    found = await all_of(rollouts(bench.env(), agent, tasks, **given))
    await bench.empty()
    return found


async def test_an_instance_plays_as_many_as_it_may_and_each_begins_anew(plain_bench: Bench) -> None:
    found = await played(plain_bench, worker, many(7), reuse=3)
    assert sorted(instances(found).values()) == [1, 3, 3]
    assert [trajectory.provenance.earlier for trajectory in found] == [0, 1, 2, 0, 1, 2, 0]
    for trajectory in found:
        is_scored(trajectory, TURNS)
        assert [call.result.structured for call in trajectory.calls if call.result] == [
            {"result": turn} for turn in range(1, TURNS + 1)
        ]
        assert trajectory.observation == {"seed": trajectory.seed}


async def test_nobody_else_is_in_an_instance_meanwhile(plain_bench: Bench) -> None:
    inside: set[str | None] = set()
    most = 0

    async def agent(env: Episode, task: Task) -> None:
        nonlocal most
        assert env.instance_id not in inside
        inside.add(env.instance_id)
        most = max(most, len(inside))
        await worker(env, task)
        inside.remove(env.instance_id)

    found = await played(plain_bench, agent, many(40), concurrency=8)
    for trajectory in found:
        is_scored(trajectory, TURNS)
    assert 1 < most <= 8
    assert len(instances(found)) < 20


async def test_without_reuse_each_has_an_instance_of_its_own(plain_bench: Bench) -> None:
    found = await played(plain_bench, worker, many(3), reuse=1)
    assert sorted(instances(found).values()) == [1, 1, 1]
    assert {trajectory.provenance.earlier for trajectory in found} == {0}


PATIENT = Rules(retries={"rate_limited": 20})


class Limited:
    """A provision with room for so many at a time."""

    def __init__(self, bench: Bench, room: int) -> None:
        self._bench = bench
        self._room = room

    @asynccontextmanager
    async def __call__(self, spec: SandboxSpec) -> AsyncIterator[Sandbox]:
        if not self._room:
            raise RateLimited("there is no room")
        self._room -= 1
        try:
            async with self._bench(spec) as sandbox:
                yield sandbox
        finally:
            self._room += 1


class Nameless:
    """A provision whose sandboxes all have the same name."""

    def __init__(self, bench: Bench) -> None:
        self._bench = bench

    @asynccontextmanager
    async def __call__(self, spec: SandboxSpec) -> AsyncIterator[Sandbox]:
        async with self._bench(spec) as sandbox:
            yield msgspec.structs.replace(sandbox, id="local")


async def handing_out(env: Episode, task: Task) -> None:
    await env.agent_url()


async def running(env: Episode, task: Task) -> None:
    await env.exec("true")


async def writing(env: Episode, task: Task) -> None:
    await env.upload("left.txt", "x")


async def prolonging(env: Episode, task: Task) -> None:
    await env.extend(60)


async def giving_up(env: Episode, task: Task) -> None:
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.05):
            await env.call_tool("pause", {"seconds": 0.3})


async def leaving_behind(env: Episode, task: Task) -> None:
    stray.append(asyncio.create_task(env.call_tool("pause", {"seconds": 30.0})))
    await asyncio.sleep(0)


async def asking_for_nothing(env: Episode, task: Task) -> None:
    with pytest.raises(NotFound):
        await env.call_function("nowhere")


stray: list[asyncio.Task[Any]] = []


@pytest.fixture
def strays() -> Iterator[None]:
    yield
    for task in stray:
        task.cancel()
    stray.clear()


@pytest.mark.parametrize("agent", [handing_out, running, writing, prolonging, giving_up, leaving_behind])
@pytest.mark.usefixtures("strays")
async def test_what_may_still_go_on_inside_keeps_an_instance_from_being_used_again(
    plain_bench: Bench, agent: Any
) -> None:
    found = await played(plain_bench, agent, many(2))
    assert sorted(instances(found).values()) == [1, 1]
    for trajectory in found:
        is_scored(trajectory, 0)


async def test_a_question_that_was_refused_is_no_harm(plain_bench: Bench) -> None:
    found = await played(plain_bench, asking_for_nothing, many(2))
    assert list(instances(found).values()) == [2]


async def test_files_of_a_task_are_not_there_for_the_next(plain_bench: Bench) -> None:
    async def agent(env: Episode, task: Task) -> list[str]:
        return (await env.exec("ls")).stdout.split()

    tasks = [{"id": "with", "files": {"left.txt": "x"}}, {"id": "without"}]
    first, second = await played(plain_bench, agent, tasks)
    assert "left.txt" in first.answer
    assert "left.txt" not in second.answer


async def test_an_instance_whose_episode_failed_is_not_used_again(plain_bench: Bench) -> None:
    async def agent(env: Episode, task: Task) -> None:
        if task.id == "task-1":
            raise ValueError("mine")
        await worker(env, task)

    found = await played(plain_bench, agent, many(4))
    has_no_number(found[1], {"agent_failed"}, {"agent"})
    assert list(instances(found).values()) == [2, 2]
    assert [trajectory.provenance.earlier for trajectory in found] == [0, 1, 0, 1]


async def test_those_that_died_while_nobody_played_cost_no_episode(plain_bench: Bench) -> None:
    """It is noticed by the reset, before the episode: that is begun in an instance that is really new, and whatever is
    tried again is not spent on it."""

    async def tasks() -> Any:
        for number, task in enumerate(many(8)):
            yield task
            if number == 3:
                while len(found) < 4:
                    await asyncio.sleep(0.01)
                for process in plain_bench.family.instances():
                    os.kill(process.pid, signal.SIGKILL)

    found: list[Trajectory] = []
    run = rollouts(*(plain_bench.env(), worker, tasks()), concurrency=4, reuse=10, seed=1, rules=Rules(retries=0))
    await all_of(run, found)
    await plain_bench.empty()
    assert len(found) == 8
    for trajectory in found:
        is_scored(trajectory, TURNS)
        assert trajectory.retried == []


SPOILT = """
from aenv import register_reset, register_reward, register_tool

spoilt = False

@register_reset
def begin() -> None:
    if spoilt:
        raise RuntimeError("nobody can clean this")

@register_tool
def spoil() -> None:
    global spoilt
    spoilt = True

@register_reward
def clean() -> float:
    return float(not spoilt)
"""


async def test_a_reset_that_fails_by_what_an_earlier_episode_left_fails_no_other(plain_bench: Bench) -> None:
    async def agent(env: Episode, task: Task) -> None:
        if task.id == "task-1":
            await env.call_tool("spoil")

    write_env(plain_bench.home, "spoilt", SPOILT)
    run = rollouts(plain_bench.env("spoilt"), agent, many(4), concurrency=1, reuse=10, seed=1)
    found = await all_of(run)
    await plain_bench.empty()
    assert [trajectory.reward for trajectory in found] == [1.0, 0.0, 1.0, 1.0]
    assert [trajectory.provenance.earlier for trajectory in found] == [0, 1, 0, 0]


async def test_another_environment_that_an_agent_makes_is_a_new_one(plain_bench: Bench) -> None:
    async def agent(env: Episode, task: Task) -> Any:
        await worker(env, task)
        async with Environment.like(env) as other:
            return (await other.call_tool("work")).structured

    found = await played(plain_bench, agent, many(5), concurrency=2)
    assert [trajectory.answer for trajectory in found] == [{"result": 1}] * 5


async def test_idle_ones_give_way_where_there_is_no_room_for_more(plain_bench: Bench) -> None:
    """The platform has room for two, and the run may have four."""
    limited = Limited(plain_bench, 2)
    tasks = [{"id": f"{kind}-{number}", "arguments": [kind]} for kind in "ab" for number in range(6)]
    env = Environment("saboteur", provision=limited)
    run = rollouts(env, worker, tasks, concurrency=2, prefetch=2, reuse=100, seed=1, adaptive=False, rules=PATIENT)
    found = await all_of(run)
    await plain_bench.empty()
    for trajectory in found:
        is_scored(trajectory, TURNS)


async def test_no_idle_one_waits_for_the_last_episode(plain_bench: Bench) -> None:
    async def agent(env: Episode, task: Task) -> int:
        if task.id != "task-11":
            return 0
        await eventually("the end of those that nobody needs", alone)
        return len(await plain_bench.alive())

    async def alone() -> bool:
        return len(await plain_bench.alive()) == 1

    found = await played(plain_bench, agent, many(12), concurrency=4)
    assert {trajectory.answer for trajectory in found} == {0, 1}


async def test_sandboxes_need_no_names(plain_bench: Bench) -> None:
    env = Environment("saboteur", provision=Nameless(plain_bench))
    run = rollouts(env, worker, many(12), concurrency=3, reuse=4, seed=1)
    found = await all_of(run)
    await plain_bench.empty()
    for trajectory in found:
        is_scored(trajectory, TURNS)
    assert max(trajectory.provenance.earlier for trajectory in found) > 0


async def test_instances_of_other_kinds_make_room(plain_bench: Bench) -> None:
    """Each task wants an instance of its own kind, and there are never more of them than may be begun."""

    async def agent(env: Episode, task: Task) -> int:
        await worker(env, task)
        return len(await plain_bench.alive())

    tasks = [{"id": f"{kind}-{number}", "arguments": [kind]} for number in range(3) for kind in "abcd"]
    found = await played(plain_bench, agent, tasks, concurrency=2)
    for trajectory in found:
        is_scored(trajectory, TURNS)
    assert max(trajectory.answer for trajectory in found) <= 2
    kinds = {(trajectory.provenance.instance, tuple(trajectory.task.arguments)) for trajectory in found}
    assert len({instance for instance, _ in kinds}) == len(kinds)


async def test_an_episode_has_the_time_to_live_of_a_new_instance(plain_bench: Bench) -> None:
    """Ten episodes of half a second each in one instance that may live for two."""

    async def agent(env: Episode, task: Task) -> float:
        await env.call_tool("pause", {"seconds": 0.5})
        found = await plain_bench.engine.get(env.instance_id or "")
        assert found.expires_at is not None
        return found.expires_at - time.time()

    run = rollouts(plain_bench.env(ttl=2.0), agent, many(6), concurrency=1, reuse=10, seed=1)
    found = await all_of(run)
    await plain_bench.empty()
    assert len(instances(found)) == 1
    for trajectory in found:
        is_scored(trajectory, 0)
        assert trajectory.answer > 0


async def test_a_run_that_is_left_leaves_no_idle_instance(plain_bench: Bench) -> None:
    async with rollouts(plain_bench.env(), worker, many(50), concurrency=4, reuse=5, seed=1) as run:
        async for _ in run:
            break
    await plain_bench.empty()


async def test_stragglers_are_not_used_again(plain_bench: Bench) -> None:
    async def agent(env: Episode, task: Task) -> None:
        await env.call_tool("pause", {"seconds": 120.0 if env.sample_seed == slow else 0.01})

    async def looking(env: Episode, task: Task) -> int | None:
        return env.sample_seed

    slow = (await played(plain_bench, looking, named("a"), n=4))[0].answer
    rule = Stragglers(share=0.5, factor=50)
    found = await played(plain_bench, agent, named("a", "b", "c"), n=4, concurrency=4, stragglers=rule)
    failed = [trajectory for trajectory in found if trajectory.failure]
    assert [one.failure.kind for one in failed if one.failure] == ["abandoned"]
    last = failed[0].provenance
    assert all(one.provenance.earlier <= last.earlier for one in found if one.provenance.instance == last.instance)


async def test_reuse_needs_a_reset(plain_bench: Bench) -> None:
    run = rollouts(plain_bench.env("words"), idle, many(20), reuse=2, rules=Rules(rewards="first"), concurrency=2)
    with pytest.raises(Invalid, match="reset"):
        await all_of(run)
    with pytest.raises(Invalid, match="reset"):
        rollouts(plain_bench.env(), idle, many(2), reuse=2, rules=Rules(reset=False))
    with pytest.raises(Invalid, match="reuse is 0"):
        rollouts(plain_bench.env(), idle, many(2), reuse=0)
    await plain_bench.empty()
