"""What instances do at the moment: the processor, memory and calls of each."""

from __future__ import annotations

import asyncio
from collections import Counter
from typing import Annotated

from aenv.api.entry import Entry
from aenv.api.gateway.places import Answered
from aenv.api.lives import Lives
from aenv.api.records import InstanceRecord
from aenv.auth.callers import Caller, Scope
from aenv.auth.tokens import checked_owner
from aenv.engines.base import Used
from aenv.errors import AEnvError, Invalid
from aenv.models import State
from aenv.web.routes import Call, Query, Route
from aenv.wire import Load, Top, timestamp

MOST = 200
"""Instances that are looked at for one answer."""
_ENGINE = 2.0
"""Seconds in which an engine must tell what all of them use."""


class Loads:
    """Counts calls, as a ``Watcher`` of the gateway, and asks the engine for the rest."""

    def __init__(self, lives: Lives) -> None:
        self._lives = lives
        self._calls: Counter[str] = Counter()
        lives.listeners.append(self._ended)

    def answered(self, call: Answered) -> None:
        if call.place is not None and call.place.id in self._lives.entries:
            self._calls[call.place.id] += 1

    def _ended(self, record: InstanceRecord) -> None:
        self._calls.pop(record.id, None)

    async def top(self, caller: Caller, owner: str | None, most: int) -> Top:
        """The caller's instances, or, for an admin, everybody's; those with the most calls are looked at."""
        if not 1 <= most <= MOST:
            raise Invalid(f"most {most} is not between 1 and {MOST}")
        if owner is not None:
            checked_owner(caller, owner, "instances")
        found = [
            entry
            for entry in self._lives.entries.values()
            if caller.owns(entry.kept.record.owner)
            and owner in (None, entry.kept.record.owner)
            and not entry.kept.record.warm
        ]
        counts = Counter(entry.kept.record.status.value for entry in found)
        found.sort(key=lambda entry: (-self._calls[entry.id], entry.id))
        running = [entry for entry in found if entry.kept.record.status is State.RUNNING]
        used = await self._used(running[:most])
        loads = [self._load(entry, used.get(entry.id)) for entry in running[:most]]
        return Top(at=timestamp(self._lives.clock.now()), counts=dict(counts), loads=loads)

    async def _used(self, entries: list[Entry]) -> dict[str, Used]:
        """What each of them uses, as far as the engine tells in time."""
        found: dict[str, Used] = {}

        async def look(id: str) -> None:
            try:
                found[id] = await self._lives.engine.used(id)
            except AEnvError:
                return  # it cannot tell, or it is gone

        looks = [asyncio.create_task(look(entry.id)) for entry in entries]
        if looks:
            _, late = await asyncio.wait(looks, timeout=_ENGINE)
            for task in late:
                task.cancel()
        return found

    def _load(self, entry: Entry, used: Used | None) -> Load:
        record = entry.kept.record
        return Load(
            id=record.id,
            env=record.env.id,
            owner=record.owner,
            experiment=record.experiment,
            service=record.service,
            status=record.status.value,
            created_at=timestamp(record.created_at),
            cpu_seconds=None if used is None else round(used.cpu, 6),
            memory=None if used is None else used.memory,
            calls=self._calls[record.id],
        )


class Handlers:
    """What the route does."""

    def __init__(self, loads: Loads) -> None:
        self._loads = loads

    async def top(
        self,
        call: Call,
        owner: Annotated[str | None, Query(about="whose instances; an admin sees everybody's")] = None,
        most: Annotated[int, Query(about=f"how many instances, {MOST} at most")] = 50,
    ) -> Top:
        """What instances do at the moment: the processor, memory and calls of each, the most called first.

        Asked twice, the differences are what was used in between. Calls are those that came through the server that
        answers.
        """
        return await self._loads.top(call.caller, owner or None, most)


def routes(loads: Loads) -> list[Route]:
    """The route of the live view."""
    return [Route("GET", "/top", Handlers(loads).top, Scope.READ)]
