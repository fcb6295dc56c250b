"""Many episodes: groups and their seeds, how many go on at a time, and how a run ends."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest

from aenv.errors import Invalid, NetworkError, NotFound, RateLimited
from aenv.models import Sandbox, SandboxSpec
from aenv.rl import Episode, Rules, Stragglers, Task, Trajectory, rollouts
from aenv.rl.batches import FIRST
from aenv.rl.playing import derived
from tests.rl.bench import TURNS, Bench, idle, worker
from tests.rl.proofs import has_no_number, is_scored
from tests.support import eventually

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.xdist_group("rl-batches")]


async def all_of(run: Any, found: list[Trajectory] | None = None) -> list[Trajectory]:
    """All that a run gives; ``found`` has those that came before it failed, too."""
    found = [] if found is None else found
    async with run as going:
        async for trajectory in going:
            found.append(trajectory)
    return found


def named(*ids: str) -> list[dict[str, Any]]:
    return [{"id": id} for id in ids]


# Groups and seeds


async def test_groups_have_one_seed_and_samples_differ(plain_bench: Bench) -> None:
    async def agent(env: Episode, task: Task) -> int | None:
        return env.sample_seed

    tasks = [*named("a", "b"), {"id": "c", "seed": 5}]
    found = await all_of(rollouts(plain_bench.env(), agent, tasks, n=3, seed=1))
    assert Counter(trajectory.group for trajectory in found) == {"a": 3, "b": 3, "c": 3}
    seeds = {trajectory.group: trajectory.seed for trajectory in found}
    assert seeds == {"a": derived(1, "a"), "b": derived(1, "b"), "c": 5}
    assert {(trajectory.group, trajectory.seed) for trajectory in found} == set(seeds.items())
    assert all(trajectory.observation == {"seed": trajectory.seed} for trajectory in found)
    assert len({trajectory.answer for trajectory in found}) == 9
    assert all(trajectory.answer == derived(trajectory.seed, trajectory.sample) for trajectory in found)
    again = await all_of(rollouts(plain_bench.env(), agent, tasks, n=3, seed=1))

    def drawn(run: list[Trajectory]) -> set[tuple[Any, ...]]:
        return {(one.group, one.sample, one.seed, one.answer) for one in run}

    assert drawn(again) == drawn(found)


async def test_without_a_seed_one_is_drawn_for_every_group(plain_bench: Bench) -> None:
    found = await all_of(rollouts(plain_bench.env(), idle, named("a", "b"), n=2))
    seeds = {trajectory.group: trajectory.seed for trajectory in found}
    assert seeds["a"] != seeds["b"]
    assert None not in seeds.values()
    assert all((one.seed, one.observation) == (seeds[one.group], {"seed": seeds[one.group]}) for one in found)


async def test_groups_come_when_they_are_whole(plain_bench: Bench) -> None:
    async def agent(env: Episode, task: Task) -> None:
        if task.id == "bad" and env.sample_seed == derived(derived(0, "bad"), 1):
            raise ValueError("one of them")
        await env.call_tool("work")

    async with rollouts(plain_bench.env(), agent, named("good", "bad"), n=3, seed=0) as run:
        groups = {group.id: group async for group in run.groups()}
    assert groups["good"].rewards == [1.0, 1.0, 1.0]
    assert groups["bad"].rewards == [1.0, None, 1.0]
    assert groups["bad"].mask == [True, False, True]
    assert [trajectory.sample for trajectory in groups["bad"]] == [0, 1, 2]


async def test_what_is_done_is_skipped(plain_bench: Bench) -> None:
    skip = {("a", 0), ("a", 2), ("b", 1)}
    async with rollouts(plain_bench.env(), idle, named("a", "b"), n=3, skip=skip) as run:
        with pytest.raises(Invalid, match="members that it does not play"):
            await anext(run.groups())
        played = sorted([(trajectory.group, trajectory.sample) async for trajectory in run])
    assert played == [("a", 1), ("b", 0), ("b", 2)]


async def test_tasks_of_every_kind(plain_bench: Bench) -> None:
    async def given() -> AsyncIterator[Any]:
        yield "an instruction"
        yield {"id": "mapping"}
        yield Task(id="task")

    found = await all_of(rollouts(plain_bench.env(), idle, given()))
    assert {trajectory.task.instruction or trajectory.task.id for trajectory in found} == {
        "an instruction",
        "mapping",
        "task",
    }
    assert await all_of(rollouts(plain_bench.env(), idle, [])) == []


# How they come


async def test_each_is_given_out_as_it_ends(plain_bench: Bench) -> None:
    doors = {id: asyncio.Event() for id in ("a", "b", "c")}

    async def agent(env: Episode, task: Task) -> None:
        await doors[task.id].wait()

    seen = []
    doors["b"].set()
    async with rollouts(plain_bench.env(), agent, named("a", "b", "c")) as run:
        async for trajectory in run:
            seen.append(trajectory.task.id)
            for id in {"b": "c", "c": "a"}.get(trajectory.task.id, ""):
                doors[id].set()
    assert seen == ["b", "c", "a"]


async def test_no_more_are_begun_than_there_is_room_for_until_some_are_taken(plain_bench: Bench) -> None:
    begun: list[str] = []

    def tasks() -> Any:
        for place in range(20):
            begun.append(f"t{place}")
            yield {"id": f"t{place}"}

    before = len(plain_bench.made)

    def made() -> int:
        return len(plain_bench.made) - before

    async with rollouts(plain_bench.env(), idle, tasks(), concurrency=2, prefetch=1) as run:
        await eventually("all that there is room for", lambda: run._results.qsize() == 3)
        assert made() == 3
        assert len(begun) == 4  # the one that waits to be begun
        for taken in range(1, 4):
            await anext(run)
            await eventually("as many again", lambda taken=taken: made() == 3 + taken)
    await plain_bench.empty()


async def test_so_many_play_and_so_many_have_their_instances_started(plain_bench: Bench) -> None:
    playing: set[str] = set()
    most = 0
    door = asyncio.Event()

    async def agent(env: Episode, task: Task) -> None:
        nonlocal most
        playing.add(task.id)
        most = max(most, len(playing))
        await door.wait()
        playing.discard(task.id)

    async with rollouts(plain_bench.env(), agent, named(*"abcdefgh"), concurrency=2, prefetch=3) as run:
        await eventually("instances ahead of their turn", lambda: run.pace.begun.inside == 5)

        async def five() -> bool:
            return len(await plain_bench.alive()) == 5

        await eventually("five instances", five)
        await eventually("two that play", lambda: most == 2)
        door.set()
        assert len([trajectory async for trajectory in run]) == 8
    assert most == 2


# Congestion


class Crowded(Bench):
    """An engine that refuses as long as a test says so."""

    def __init__(self, bench: Bench) -> None:
        super().__init__(bench.engine, bench.home)
        self.refuse: Callable[[int], Exception | None] = lambda number: None
        self.asked = 0

    @asynccontextmanager
    async def _provided(self, spec: SandboxSpec) -> AsyncIterator[Sandbox]:
        self.asked += 1
        if error := self.refuse(self.asked):
            raise error
        async with super()._provided(spec) as sandbox:
            yield sandbox


@pytest.mark.parametrize("kind", [RateLimited, NetworkError])
async def test_the_pace_shrinks_with_congestion_and_grows_back(plain_bench: Bench, kind: type[Exception]) -> None:
    crowded = Crowded(plain_bench)
    limits = []

    async def tasks() -> AsyncIterator[Any]:
        for place in range(60):
            yield {"id": f"t{place}"}

    crowded.refuse = lambda number: kind("not now") if number in (1, 6) else None
    scored = 0
    async with rollouts(crowded.env(), idle, tasks(), concurrency=6, rules=Rules(retries=2)) as run:
        async for trajectory in run:
            limits.append(run.pace.playing.limit)
            scored += trajectory.ok
        assert run.pace.playing.limit == 6
    assert scored == 60
    assert min(limits) < 6
    assert max(limits) == 6


async def test_the_pace_is_kept_where_it_is_not_adaptive(plain_bench: Bench) -> None:
    crowded = Crowded(plain_bench)
    crowded.refuse = lambda number: RateLimited("not now") if number < 4 else None
    async with rollouts(crowded.env(), idle, named(*"abcd"), concurrency=2, adaptive=False) as run:
        found = [(run.pace.playing.limit, trajectory.ok) async for trajectory in run]
    assert {limit for limit, _ in found} == {2}


async def test_failures_of_the_policy_are_no_congestion(plain_bench: Bench) -> None:
    async def agent(env: Episode, task: Task) -> None:
        raise ValueError("of its own")

    async with rollouts(plain_bench.env(), agent, named(*"abcdef"), concurrency=3) as run:
        assert [run.pace.playing.limit async for _ in run] == [3] * 6


# Stragglers


async def test_the_slowest_of_a_group_are_given_up(plain_bench: Bench) -> None:
    async def agent(env: Episode, task: Task) -> None:
        await env.call_tool("work")
        if task.id == "slow" and env.sample_seed == derived(derived(0, "slow"), 3):
            await asyncio.Event().wait()

    rule = Stragglers(share=0.75, factor=2.0)
    async with rollouts(plain_bench.env(), agent, named("slow", "quick"), n=4, seed=0, stragglers=rule) as run:
        groups = {group.id: group async for group in run.groups()}
    assert groups["slow"].rewards[3] is None
    failed = has_no_number(groups["slow"].trajectories[3], {"abandoned"}, {"agent"})
    assert "others of its group" in failed.reason
    assert sum(reward is not None for reward in groups["slow"].rewards) >= 3
    await plain_bench.empty()


async def test_given_up_is_failed_also_where_late_ones_are_scored(plain_bench: Bench) -> None:
    async def agent(env: Episode, task: Task) -> None:
        if env.sample_seed == derived(derived(0, "slow"), 1):
            await asyncio.Event().wait()

    rule, rules = Stragglers(share=0.5, factor=1.0), Rules(score_late=True, episode_timeout=600.0)
    run = rollouts(plain_bench.env(), agent, named("slow"), n=2, seed=0, stragglers=rule, rules=rules)
    found = sorted(await all_of(run), key=lambda one: one.sample)
    is_scored(found[0], 0.0)
    has_no_number(found[1], {"abandoned"}, {"agent"})


@pytest.mark.parametrize("wrong", [{"share": 0.0}, {"share": 1.0}, {"factor": 0.5}])
async def test_stragglers_that_make_no_sense(wrong: dict[str, float]) -> None:
    with pytest.raises(Invalid):
        Stragglers(**wrong)


# How a run ends


async def test_a_run_that_cannot_succeed_is_stopped(plain_bench: Bench) -> None:
    tasks = named(*(f"t{place}" for place in range(100)))
    seen: list[Trajectory] = []
    with pytest.raises(NotFound, match="the first 8 episodes failed alike"):
        await all_of(rollouts(plain_bench.env("no-such-env"), idle, tasks, concurrency=2), seen)
    for trajectory in seen:
        has_no_number(trajectory, {"not_found"}, {"create"})
    assert FIRST <= len(seen) < 20


async def test_one_that_went_well_keeps_a_run_going(plain_bench: Bench) -> None:
    async def agent(env: Episode, task: Task) -> None:
        if task.id != "first":
            raise Invalid("of the caller")

    tasks = named("first", *(f"t{place}" for place in range(12)))
    found = await all_of(rollouts(plain_bench.env(), agent, tasks, concurrency=1))
    assert (len(found), sum(trajectory.ok for trajectory in found)) == (13, 1)


async def test_two_tasks_of_one_id(plain_bench: Bench) -> None:
    seen: list[Trajectory] = []
    with pytest.raises(Invalid, match="two tasks are called 'a'"):
        await all_of(rollouts(plain_bench.env(), idle, named("a", "a")), seen)
    assert len(seen) <= 1
    await plain_bench.empty()


async def test_tasks_that_raise(plain_bench: Bench) -> None:
    def tasks() -> Any:
        yield {"id": "a"}
        raise OSError("the disk of the tasks")

    with pytest.raises(OSError, match="the disk of the tasks"):
        await all_of(rollouts(plain_bench.env(), idle, tasks()))
    await plain_bench.empty()


@pytest.mark.parametrize("concurrency", [1, 4])
async def test_no_episode_is_lost_whatever_its_agent_does(plain_bench: Bench, concurrency: int) -> None:
    """An agent that ends in a way that tasks usually end when they are cancelled, and one that ends as a group."""

    async def agent(env: Episode, task: Task) -> None:
        if task.id.startswith("cancelled"):
            waiting = asyncio.ensure_future(asyncio.Event().wait())
            waiting.cancel()
            await waiting
        if task.id.startswith("group"):
            async with asyncio.TaskGroup() as group:
                for _ in range(TURNS + 2):
                    group.create_task(env.call_tool("work"))
        await worker(env, task)

    ids = ["cancelled-1", "good-1", "group-1", "cancelled-2", "good-2", "group-2"]
    async with asyncio.timeout(120):
        run = rollouts(plain_bench.env(), agent, named(*ids), concurrency=concurrency, rules=Rules(max_turns=TURNS))
        found = {trajectory.task.id: trajectory for trajectory in await all_of(run)}
    assert sorted(found) == sorted(ids)
    for id, trajectory in found.items():
        if id.startswith("cancelled"):
            has_no_number(trajectory, {"agent_failed"}, {"agent"})
        else:
            assert trajectory.ok, trajectory.outcome


async def test_a_run_is_begun_by_its_block(plain_bench: Bench) -> None:
    run = rollouts(plain_bench.env(), idle, named("a"))
    with pytest.raises(Invalid, match="not begun"):
        await anext(run)
    async with run:
        assert (await anext(run)).ok
        for _ in range(2):
            with pytest.raises(StopAsyncIteration):
                await anext(run)


@pytest.mark.parametrize("wrong", [{"n": 0}, {"concurrency": 0}, {"prefetch": -1}])
async def test_numbers_that_make_no_sense(plain_bench: Bench, wrong: dict[str, int]) -> None:
    with pytest.raises(Invalid, match=next(iter(wrong))):
        rollouts(plain_bench.env(), idle, [], **wrong)  # type: ignore[arg-type]
