"""Sandboxes on their way: each is asked of the engine once, however many ask for it, and as long as somebody does."""

from __future__ import annotations

import asyncio
from collections import OrderedDict

from aenv.cleanup import finish
from aenv.engines.base import Engine
from aenv.errors import Conflict, StartFailed
from aenv.models import Sandbox, SandboxSpec

ABANDONED = 60.0
"""Seconds for which nobody asks after a start that goes on, or how it ended, until it is taken for forgotten."""
_MOMENT = 1.0
"""Seconds in which a start should notice that its sandbox was deleted."""
_MOST_GIVEN_UP = 10_000


class Creation:
    """One sandbox on its way."""

    def __init__(self, id: str, spec: SandboxSpec, task: asyncio.Task[Sandbox], attempt: str) -> None:
        self.id = id
        self.spec = spec
        self.task = task
        self.attempt = attempt
        self.waiting = 0
        """Requests that wait for it."""
        self.timer: asyncio.TimerHandle | None = None

    async def end(self) -> None:
        """Let nothing be made of it. The engine clears up before it is back."""
        self.task.cancel()
        await asyncio.wait((self.task,))


class Creations:
    """What one engine is making."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._under_way: dict[str, Creation] = {}
        self._given_up: OrderedDict[str, None] = OrderedDict()
        """Attempts that were given up: their request may come after the news of that."""

    @property
    def specs(self) -> list[SandboxSpec]:
        """Of what is on its way."""
        return [one.spec for one in self._under_way.values() if not one.task.done()]

    def is_known(self, id: str) -> bool:
        """Whether such a sandbox is on its way, or how that ended is not told yet."""
        return id in self._under_way

    async def create(self, id: str, spec: SandboxSpec | None, patience: float, attempt: str) -> Sandbox | None:
        """The sandbox, when the engine has made it; None when that takes longer than so many seconds. Raises what the
        engine does. ``spec`` may be None when it is known. Who is cancelled gives it up, unless others wait, too."""
        if attempt in self._given_up:
            raise Conflict(f"{id} is not wanted any more: this attempt was given up")
        one = self._under_way.get(id)
        while one is not None and one.task.cancelling():
            await asyncio.wait((one.task,))
            one = self._under_way.get(id)
        if one is None:
            if spec is None:
                raise StartFailed(f"{id} was deleted while it started")
            one = self._begin(id, spec, attempt)
        if one.timer is not None:
            one.timer.cancel()
        one.waiting += 1
        try:
            await asyncio.wait((one.task,), timeout=patience)
        except asyncio.CancelledError:
            if one.waiting == 1:
                await finish(one.end())
            raise
        finally:
            one.waiting -= 1
            if not one.waiting and not one.task.done():
                one.timer = asyncio.get_running_loop().call_later(ABANDONED, one.task.cancel)
        if not one.task.done():
            return None
        self._forget(one)
        if one.task.cancelled():
            raise StartFailed(f"{id} was deleted while it started")
        return one.task.result()

    async def delete(self, id: str, attempt: str) -> None:
        """End a sandbox, also one that is on its way. ``attempt``: only this one was given up, perhaps before it
        came."""
        one = self._under_way.get(id)
        if attempt:
            self._given_up[attempt] = None
            while len(self._given_up) > _MOST_GIVEN_UP:
                self._given_up.popitem(last=False)
            if one is not None and one.attempt != attempt:
                return  # another one has begun it since
            if one is not None:
                await one.end()
        await self._engine.delete(id)
        if one is not None:
            await asyncio.wait((one.task,), timeout=_MOMENT)
            if not one.task.done():  # the engine did not know of it yet
                await one.end()
                await self._engine.delete(id)
            self._forget(one)

    async def close(self) -> None:
        """Give up what is on its way."""
        for one in list(self._under_way.values()):
            if one.timer is not None:
                one.timer.cancel()
            await one.end()

    def _begin(self, id: str, spec: SandboxSpec, attempt: str) -> Creation:
        one = Creation(id, spec, asyncio.create_task(self._engine.create(id, spec)), attempt)
        self._under_way[id] = one
        one.task.add_done_callback(lambda task: self._done(one))
        return one

    def _done(self, one: Creation) -> None:
        if not one.task.cancelled():
            one.task.exception()  # when all who asked have left, nobody hears it
        if one.timer is not None:
            one.timer.cancel()
        if one.task.cancelled():
            self._forget(one)
        elif not one.waiting:
            one.timer = asyncio.get_running_loop().call_later(ABANDONED, self._forget, one)

    def _forget(self, one: Creation) -> None:
        if one.timer is not None:
            one.timer.cancel()
        if self._under_way.get(one.id) is one:
            del self._under_way[one.id]
