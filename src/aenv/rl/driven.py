"""An episode that somebody else's loop drives: a trainer that calls tools by itself, and takes the reward at the end.

It is the episode of ``rollout``, whose agent waits until that loop is done. So limits, failures and what is written
down are the same.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import replace
from typing import Any, TypeVar

from aenv.cleanup import finish
from aenv.client.environment import Environment
from aenv.errors import Abandoned, Conflict, EpisodeError, from_wire
from aenv.models import ToolResult
from aenv.rl.playing import Draw, Plan, template
from aenv.rl.recording import Episode, Over
from aenv.rl.rules import Rules
from aenv.rl.tasks import Task
from aenv.rl.trajectory import Trajectory

R = TypeVar("R")
RULES = Rules(fast_forward=True)
"""Of an episode that is given none."""


class Driven:
    """One episode, driven from outside: ``begin``, calls of tools, ``end``.

    Every failure of the platform is raised as an ``AEnvError``, from ``begin`` and from calls, and once more from
    whatever is called after it. ``end`` raises none: it gives the trajectory, scored or failed. After ``abandon`` there
    is none, and everything raises ``Abandoned``.
    """

    def __init__(
        self,
        env: str | Environment,
        task: Task | str | Mapping[str, Any] | None = None,
        seed: int | None = None,
        *,
        rules: Rules | None = None,
        group: str = "",
        sample: int = 0,
    ) -> None:
        """As in ``rollout``. Without ``rules`` it goes on in another instance when its own is lost, if that can be."""
        self.task = Task.of(task)
        self.trajectory: Trajectory | None = None
        """What there is of it, once it is over."""
        self._plan = Plan(template(env), self._hold, replace(rules or RULES, once=True), alone=False)
        self._draw = Draw(self.task, seed, group, sample)
        self._playing: asyncio.Task[Trajectory] | None = None
        self._episode: Episode | None = None
        self._begun = asyncio.Event()
        self._done = asyncio.Event()
        """Nothing may be called any more."""
        self._stopped = False
        """Whether it was for want of turns."""
        self._answer: Any = None
        self._asking: set[asyncio.Task[Any]] = set()

    @property
    def episode(self) -> Episode:
        """The environment as an agent has it, for all that there is no method of here."""
        if self._episode is None:
            raise Conflict("no episode is under way", hint="call begin first")
        return self._episode

    async def begin(self) -> Any:
        """Start an instance and reset it; what the reset returned. Tried again as the rules say."""
        if self._playing is not None:
            raise Conflict("the episode has begun", hint="make another Driven for another episode")
        self._playing = asyncio.create_task(self._plan.play(self._draw))
        waiting = asyncio.create_task(self._begun.wait())
        try:
            await asyncio.wait((self._playing, waiting), return_when=asyncio.FIRST_COMPLETED)
        except BaseException:
            await self.abandon()
            raise
        finally:
            waiting.cancel()
        if self._episode is None:
            self._check(await self.end())
        return self.episode.observation

    async def list_openai_tools(self) -> list[dict[str, Any]]:
        """What a model is offered."""

        async def ask() -> list[dict[str, Any]]:
            return await self.episode.list_openai_tools()

        return await self._asked(ask)

    async def call_tool(self, name: str, arguments: Mapping[str, Any] | None = None, *, id: str = "") -> ToolResult:
        """Call a tool; ``id`` is what the model called the call."""
        return await self._asked(lambda: self.episode.call_tool(name, arguments, id=id))

    async def end(self, answer: Any = None) -> Trajectory:
        """Score the episode and give the instance back. ``answer`` is what the agent says in the end."""
        if self._playing is None:
            raise Conflict("the episode has not begun", hint="call begin first")
        if not self._done.is_set():
            self._answer = answer
            self._done.set()
        try:
            await asyncio.wait((self._playing,))
        except asyncio.CancelledError:
            await self.abandon()
            raise
        if self._playing.cancelled():
            raise Abandoned("the episode was given up, and has no score")
        self.trajectory = self._playing.result()
        return self.trajectory

    async def abandon(self) -> None:
        """Give the instance back without a score. Nothing happens where the episode is over."""
        if self._playing is not None and not self._playing.done():
            self._done.set()
            self._playing.cancel()
            await finish(_ended(self._playing))

    async def _hold(self, env: Episode, task: Task) -> Any:
        """The agent: it lets the others play."""
        self._episode = env
        self._begun.set()
        try:
            await self._done.wait()
        finally:
            self._done.set()  # also when its time is over
            for asked in self._asking:
                asked.cancel()
            if self._asking:
                await finish(_ended(*self._asking))
        if self._stopped:
            raise Over
        return self._answer

    async def _asked(self, ask: Callable[[], Coroutine[Any, Any, R]]) -> R:
        """What comes of it, unless nothing may be asked any more."""
        if not self._done.is_set():
            asked = asyncio.create_task(self._guarded(ask))
            self._asking.add(asked)
            asked.add_done_callback(self._asking.discard)
            try:
                await asyncio.wait((asked,))
            except asyncio.CancelledError:
                asked.cancel()
                await finish(_ended(asked))
                raise
            if not asked.cancelled():
                return asked.result()
        self._check(await self.end())
        raise EpisodeError("the episode is over")

    async def _guarded(self, ask: Callable[[], Coroutine[Any, Any, R]]) -> R:
        try:
            return await ask()
        except Over:
            if (broken := self.episode.broken) is not None:
                raise broken.error from None
            if self.episode.turns_left == 0:
                self._stopped = True
                hint = "end it, for what it is worth"
                raise EpisodeError("the turns of the episode are used up", hint=hint) from None
            raise asyncio.CancelledError from None  # its time is over

    @staticmethod
    def _check(over: Trajectory) -> None:
        if failed := over.failure:
            raise from_wire({"code": failed.kind, "message": failed.reason, "hint": failed.hint})


async def _ended(*tasks: asyncio.Task[Any]) -> None:
    await asyncio.wait(tasks)
