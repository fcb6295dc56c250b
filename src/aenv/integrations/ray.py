"""Rollouts by actors of Ray's: instances are started, held and given back on as many machines as there are.

What there is of a run, its order and its retries, stays with whoever asks for it; an actor plays attempts.
"""

from __future__ import annotations

import asyncio
import functools
import logging
from collections.abc import Callable, Collection, Mapping
from types import TracebackType
from typing import Any, Self

import ray
from ray.exceptions import ObjectLostError, RayActorError

from aenv.cleanup import finish
from aenv.client.environment import Environment
from aenv.errors import Invalid, SandboxLost
from aenv.integrations.checking import ENV, TASK, CheckFailed, lose
from aenv.rl.batches import Race, Rollouts, Tasks
from aenv.rl.pacing import Pace
from aenv.rl.playing import Agent, Attempt, Draw, Plan, template
from aenv.rl.recording import Episode
from aenv.rl.rules import Rules
from aenv.rl.tasks import Task
from aenv.rl.trajectory import Failed, Trajectory

log = logging.getLogger("aenv.integrations")
log.addHandler(logging.NullHandler())
_DEFAULT = {"num_cpus": 1, "scheduling_strategy": "SPREAD"}
"""Options of an actor."""


def rollouts(
    env: str | Environment,
    agent: Agent,
    tasks: Tasks,
    *,
    actors: int,
    each: int = 16,
    options: Mapping[str, Any] | None = None,
    n: int = 1,
    seed: int | None = None,
    rules: Rules | None = None,
    adaptive: bool = True,
    skip: Collection[tuple[str, int]] = (),
) -> Rollouts:
    """``aenv.rl.rollouts``, whose episodes are played by so many ``actors``, up to ``each`` at a time by every one.

    ``options`` are those of an actor, as Ray's ``.options`` takes them; without any it takes a processor, and actors
    are spread over the nodes. An actor that is lost is replaced; the attempts that it played have failed as
    ``sandbox_lost``, and are made again elsewhere as often as ``rules`` say. Leaving the block ends the actors, once
    they have given their instances back.
    """
    if actors < 1 or each < 1 or n < 1:
        raise Invalid(f"{actors} actors, {each} episodes each, n is {n}", hint="give numbers from 1 on")
    plan = Plan(template(env), agent, rules or Rules(), alone=False)
    pace = Pace(actors * each, 0, adaptive=adaptive)
    kind: Any = ray.remote(**{**_DEFAULT, **(options or {}), "max_concurrency": each + 1})(_Actor)
    make = functools.partial(kind.remote, plan.env, agent, plan.rules)
    return _Spread(make, actors, each, plan, pace, tasks, n, seed, None, frozenset(skip))


class _Actor:
    """Plays attempts at episodes, each in an instance that is its own, and ends with this process."""

    def __init__(self, env: Environment, agent: Agent, rules: Rules) -> None:
        self._plan = Plan(env, agent, rules, alone=False)
        self._playing: set[asyncio.Task[Any]] = set()

    async def ready(self) -> None:
        """Answer, once there is an actor."""

    async def play(self, draw: Draw, retried: list[Failed]) -> Trajectory:
        """One attempt at an episode."""
        playing = asyncio.create_task(self._plan.attempt(draw, retried))
        self._playing.add(playing)
        try:
            return await playing
        finally:
            self._playing.discard(playing)

    async def close(self) -> None:
        """Give all instances back."""
        for playing in self._playing:
            playing.cancel()
        await asyncio.gather(*self._playing, return_exceptions=True)


class _Spread(Rollouts):
    """A run whose attempts are made by actors."""

    def __init__(self, make: Callable[[], Any], actors: int, each: int, *run: Any) -> None:
        super().__init__(*run)
        self._make = make
        self._actors = actors
        self._each = each
        self._starting: set[asyncio.Task[None]] = set()
        self._ready: set[Any] = set()
        self._free: asyncio.Queue[Any] = asyncio.Queue()
        """An actor is in it as often as it may be given another episode. One that is lost may be, too."""

    async def __aenter__(self) -> Self:
        for _ in range(self._actors):
            self._start()
        await super().__aenter__()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            await super().__aexit__(kind, error, trace)
        finally:
            await finish(self._end())

    async def _attempt(self, draw: Draw, race: Race, retried: list[Failed], *, fresh: bool) -> Trajectory:
        await self.pace.playing.enter()
        try:
            actor = await self._taken()
            try:
                played: Trajectory = await actor.play.remote(draw, retried)
                return played
            except (RayActorError, ObjectLostError) as exc:
                self._lost(actor)
                attempt = Attempt(self.plan, draw)
                attempt.outcome = Failed(
                    kind=SandboxLost.code, phase="agent", reason=f"the actor is gone: {exc}"[:1000]
                )
                return attempt.trajectory(retried)
            finally:
                self._free.put_nowait(actor)
        finally:
            self.pace.playing.leave()

    async def _taken(self) -> Any:
        while True:
            actor = await self._free.get()
            if isinstance(actor, Exception):
                self._free.put_nowait(actor)  # for all the others
                raise actor
            if actor in self._ready:
                return actor

    def _start(self) -> None:
        starting = asyncio.create_task(self._started())
        self._starting.add(starting)
        starting.add_done_callback(self._starting.discard)

    async def _started(self) -> None:
        """Have one more actor, however long it takes until there is room for it."""
        try:
            actor = self._make()
            await actor.ready.remote()
        except Exception as exc:  # also of what cannot be sent to it
            if isinstance(exc, RayActorError) and not exc.actor_init_failed:
                log.warning("an actor was lost before it was ready: %s", exc)
                self._start()
            else:
                self._free.put_nowait(Invalid(f"no actor can be made: {exc}"))
        else:
            self._ready.add(actor)
            for _ in range(self._each):
                self._free.put_nowait(actor)

    def _lost(self, actor: Any) -> None:
        """Have another one instead. Of several who find it lost, the first sees to that."""
        if actor in self._ready:
            self._ready.remove(actor)
            ray.kill(actor)  # where it only cannot be reached, nobody waits for what it plays
            self._start()

    async def _end(self) -> None:
        for starting in self._starting:
            starting.cancel()
        await asyncio.gather(*self._starting, return_exceptions=True)
        await asyncio.gather(*(actor.close.remote() for actor in self._ready), return_exceptions=True)
        for actor in self._ready:
            ray.kill(actor)


def check() -> str:
    """Play an episode in an actor, which loses its instance on the way."""
    ray.init("local", num_cpus=1, include_dashboard=False, log_to_driver=False, logging_level=logging.ERROR)
    try:
        found = asyncio.run(_played())
    finally:
        ray.shutdown()
    if [failed.kind for failed in found.retried] != [SandboxLost.code]:
        raise CheckFailed(f"an instance was ended, and what is known of it is {found.retried}")
    if found.failure is not None:
        raise CheckFailed(f"an episode lost its instance, and was not played again: {found.failure}")
    if found.reward != 1.0:
        raise CheckFailed(f"an episode that did its task was scored {found.reward:g}, not 1")
    return "an episode lost its instance, was played again in another, and was scored 1"


async def _played() -> Trajectory:
    async with rollouts(ENV, _Loser(), [TASK], actors=1) as run:
        return await anext(run)


class _Loser:
    """Does the task, in the second instance that it gets."""

    def __init__(self) -> None:
        self._has_lost = False

    async def __call__(self, env: Episode, task: Task) -> None:
        if not self._has_lost:
            self._has_lost = True
            await lose(env)
        await env.call_tool("execute_command", {"command": "echo hello > note"})
