"""Many episodes: groups of every task, so many at a time, each given out as it ends, and nothing left behind."""

from __future__ import annotations

import asyncio
import math
import secrets
from collections import Counter
from collections.abc import AsyncIterable, AsyncIterator, Collection, Iterable, Mapping
from dataclasses import dataclass
from statistics import median
from types import TracebackType
from typing import Any, Self

from aenv.cleanup import finish
from aenv.client.environment import Environment
from aenv.errors import Forbidden, Invalid, NotFound, Unauthorized, Unsupported, from_wire
from aenv.rl.groups import Group
from aenv.rl.pacing import Pace
from aenv.rl.playing import Agent, Attempt, Draw, Plan, derived, template
from aenv.rl.reusing import Reuse
from aenv.rl.rules import Rules
from aenv.rl.tasks import Task
from aenv.rl.trajectory import Failed, Scored, Trajectory

Tasks = Iterable[Task | str | Mapping[str, Any]] | AsyncIterable[Task | str | Mapping[str, Any]]
MISTAKES = frozenset(kind.code for kind in (Invalid, NotFound, Unauthorized, Forbidden, Unsupported))
"""Failures that are the caller's, and come again with every further episode."""
FIRST = 8
"""As many episodes as must all have failed by such mistakes for a run to be stopped."""


@dataclass(frozen=True, kw_only=True)
class Stragglers:
    """When the slowest of a group are given up. They count as failed: how long an episode takes is no reward."""

    share: float = 0.75
    """Share of a group that must be done."""
    factor: float = 3.0
    """The others may take so many times as long as the median of those."""

    def __post_init__(self) -> None:
        if not 0 < self.share < 1 or not self.factor >= 1:
            raise Invalid(f"{self} makes no sense", hint="share is between 0 and 1, factor at least 1")


def rollouts(
    env: str | Environment,
    agent: Agent,
    tasks: Tasks,
    *,
    n: int = 1,
    seed: int | None = None,
    rules: Rules | None = None,
    concurrency: int = 64,
    adaptive: bool = True,
    prefetch: int = 0,
    stragglers: Stragglers | None = None,
    reuse: int = 1,
    skip: Collection[tuple[str, int]] = (),
) -> Rollouts:
    """``n`` episodes of each task, to be used as ``async with rollouts(...) as run: async for trajectory in run: ...``.

    Episodes of one task have its id as their group, and one seed that follows from ``seed``, which is drawn when none
    is given; at most ``concurrency``
    are played at a time, and fewer while the platform is congested, if ``adaptive``. ``prefetch`` more have their
    instances started meanwhile. An instance plays up to ``reuse`` episodes, one after the other, each begun by the
    environment's reset. ``skip`` are episodes that are done already, as (group, sample). Leaving the block
    ends what goes on, and gives every instance back.
    """
    if n < 1:
        raise Invalid(f"n is {n}", hint="give a number of episodes from 1 on")
    like, rules = template(env), rules or Rules()
    pace = Pace(concurrency, prefetch, adaptive=adaptive)
    plan = Plan(
        *(like, agent, rules),
        alone=concurrency + prefetch == 1,
        reuse=_reuse(reuse, like, rules, concurrency + prefetch),
    )
    return Rollouts(plan, pace, tasks, n, seed, stragglers, frozenset(skip))


def _reuse(most: int, env: Environment, rules: Rules, room: int) -> Reuse | None:
    if most < 1:
        raise Invalid(f"reuse is {most}", hint="give a number of episodes from 1 on, which an instance plays")
    if most == 1:
        return None
    if not rules.reset:
        raise Invalid(f"an instance plays {most} episodes, and the rules say that none is begun by a reset")
    return Reuse(env.provision, most, room)


class Rollouts:
    """A run of episodes: an async context manager, and an async iterator over trajectories as they come.

    No more episodes are begun than there is room for until others are taken out of it.
    """

    def __init__(
        self,
        plan: Plan,
        pace: Pace,
        tasks: Tasks,
        n: int,
        seed: int | None,
        stragglers: Stragglers | None,
        skip: frozenset[tuple[str, int]],
    ) -> None:
        self.plan = plan
        self.pace = pace
        self._tasks = tasks
        self._n = n
        self._seed = secrets.randbits(32) if seed is None else seed
        self._stragglers = stragglers
        self._skip = skip
        self._races: dict[str, Race] = {}
        self._results: asyncio.Queue[Trajectory | None] = asyncio.Queue()
        self._running: asyncio.Task[None] | None = None
        self._failure: BaseException | None = None
        self._mistakes: Counter[tuple[str, str, str]] | None = Counter()
        """How many have failed by a mistake of the caller's, by kind, phase and task, as long as none ended
        otherwise."""

    async def __aenter__(self) -> Self:
        self._running = asyncio.create_task(self._run(), name="aenv rollouts")
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._running is not None:
            self._running.cancel()
            await finish(_ended(self._running))

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Trajectory:
        if self._running is None:
            raise Invalid("the run is not begun", hint="use it as 'async with rollouts(...) as run'")
        found = await self._results.get()
        if found is not None:
            self.pace.begun.leave()
            return found
        self._results.put_nowait(None)  # for whoever asks after the end
        if self._failure is not None:
            raise self._failure
        raise StopAsyncIteration

    async def groups(self) -> AsyncIterator[Group]:
        """Groups, each when its last episode has ended."""
        if self._skip:
            hint = "read the run's file when it is done, and use aenv.rl.grouped"
            raise Invalid("groups of a run that goes on have members that it does not play", hint=hint)
        waiting: dict[str, list[Trajectory]] = {}
        async for trajectory in self:
            members = waiting.setdefault(trajectory.group, [])
            members.append(trajectory)
            if len(members) == self._n:
                yield Group(trajectory.group, waiting.pop(trajectory.group))

    # Inside

    async def _run(self) -> None:
        try:
            async with asyncio.TaskGroup() as group:
                async for draw in self._draws():
                    await self.pace.begun.enter()
                    group.create_task(self._play(draw))
                await self._end_idle()
        except BaseExceptionGroup as failures:
            self._failure = failures.exceptions[0]
        except Exception as exc:
            self._failure = exc
        finally:
            self._results.put_nowait(None)
            await finish(self._end_idle())

    async def _end_idle(self) -> None:
        """Nobody is left who would take an idle instance."""
        if self.plan.reuse is not None:
            await asyncio.sleep(0)  # who was drawn last takes one
            await self.plan.reuse.close()

    async def _draws(self) -> AsyncIterator[Draw]:
        seen: set[str] = set()
        async for given in _each(self._tasks):
            task = Task.of(given)
            if task.id in seen:
                raise Invalid(f"two tasks are called {task.id!r}", hint="give each an id of its own, or n= for more")
            seen.add(task.id)
            seed = derived(self._seed, task.id)
            for sample in range(self._n):
                draw = Draw(task, seed, task.id, sample)
                if draw.key not in self._skip:
                    yield draw

    async def _play(self, draw: Draw) -> None:
        loop = asyncio.get_running_loop()
        race = self._race(draw)
        retried: list[Failed] = []
        fresh = False
        while True:
            began = loop.time()
            trajectory = await self._attempt(draw, race, retried, fresh=fresh)
            fresh = True
            self.pace.ended(trajectory.failure, began)
            if not await self.plan.again(trajectory, retried):
                break
        if race.ended() == self._n:
            self._races.pop(draw.group, None)
        self._results.put_nowait(trajectory)
        self._count(trajectory)

    async def _attempt(self, draw: Draw, race: Race, retried: list[Failed], *, fresh: bool) -> Trajectory:
        """One attempt at an episode, after those that ended so; ``fresh`` is one in an instance of its own."""
        attempt = Attempt(self.plan, draw, fresh=fresh)
        try:
            await attempt.open()
            await self.pace.playing.enter()
            try:
                race.join(attempt)
                await attempt.run()
            finally:
                race.leave(attempt)
                self.pace.playing.leave()
        finally:
            await attempt.close()
        return attempt.trajectory(retried)

    def _race(self, draw: Draw) -> Race:
        if self._stragglers is None or self._n == 1:
            return Race(Stragglers(), math.inf)
        return self._races.setdefault(draw.group, Race(self._stragglers, self._n))

    def _count(self, trajectory: Trajectory) -> None:
        """Stop a run that cannot succeed: its first episodes, of several tasks, have all failed alike, by a mistake of
        the caller's."""
        failed, mistakes = trajectory.failure, self._mistakes
        if mistakes is None:
            return
        if failed is not None and failed.kind in MISTAKES:
            mistakes[failed.kind, failed.phase, trajectory.task.id] += 1
        if failed is None or failed.kind not in MISTAKES or len({place[:2] for place in mistakes}) > 1:
            self._mistakes = None
        elif mistakes.total() >= FIRST and len(mistakes) > 1:
            words = f"the first {mistakes.total()} episodes failed alike: {failed.reason} (task {trajectory.task.id})"
            raise from_wire({"code": failed.kind, "message": words, "hint": failed.hint})


class Race:
    """The episodes of a group that are under way, and what the others took."""

    def __init__(self, rule: Stragglers, n: float) -> None:
        self._rule = rule
        self._needed = rule.share * n
        self._under_way: dict[Attempt, float] = {}
        self._took: list[float] = []
        self._done = 0

    def join(self, attempt: Attempt) -> None:
        self._under_way[attempt] = asyncio.get_running_loop().time()
        self._look()

    def leave(self, attempt: Attempt) -> None:
        began = self._under_way.pop(attempt, None)
        if began is not None and isinstance(attempt.outcome, Scored):
            self._took.append(asyncio.get_running_loop().time() - began)

    def ended(self) -> int:
        """An episode has ended, and is not begun anew; how many have."""
        self._done += 1
        self._look()
        return self._done

    def _look(self) -> None:
        if self._done < self._needed or not self._took:
            return
        usual = median(self._took)
        why = f"it took more than {self._rule.factor:g} times the {usual:.3g} s of others of its group"
        for attempt, began in self._under_way.items():
            attempt.give_up(began + self._rule.factor * usual, why)


async def _each(tasks: Tasks) -> AsyncIterator[Task | str | Mapping[str, Any]]:
    if isinstance(tasks, AsyncIterable):
        async for task in tasks:
            yield task
    else:
        for task in tasks:
            yield task


async def _ended(task: asyncio.Task[None]) -> None:
    await asyncio.wait((task,))
