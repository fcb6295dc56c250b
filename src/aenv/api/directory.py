"""Where instances are, for the gateway: from memory for those of this server, for a moment for those of others."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import suppress

from aenv.api.clock import steady
from aenv.api.gateway.failures import Busy
from aenv.api.gateway.places import Place
from aenv.api.instances import Instances
from aenv.api.records import InstanceRecord
from aenv.auth.callers import Caller
from aenv.errors import AEnvError, NetworkError, StartFailed, loss
from aenv.models import State

_FRESH = 5.0
"""Seconds for which the place of another server's instance is taken for what it was."""
_MOST = 10_000
_PATIENCE = 30.0
"""Seconds that a call waits for an instance that is just starting."""


class _Other:
    """An instance of another server."""

    __slots__ = ("fresh_until", "lease", "place", "tell_at")

    def __init__(self, place: Place, lease: float | None, tell_at: float) -> None:
        self.place = place
        self.lease = lease
        self.fresh_until = steady() + _FRESH
        self.tell_at = tell_at
        """When its use is to be written down again."""


class InstanceDirectory:
    """The gateway's ``Directory`` over the instances of a platform."""

    def __init__(self, instances: Instances, authenticate: Callable[[str | None], Awaitable[Caller]]) -> None:
        self._instances = instances
        self._entries = instances.lives.entries
        self._authenticate = authenticate
        self._others: dict[str, _Other] = {}
        self._telling: set[asyncio.Task[None]] = set()

    def known(self, id: str) -> Place | None:
        entry = self._entries.get(id)
        if entry is not None:
            return entry.place
        other = self._others.get(id)
        return other.place if other is not None and other.fresh_until > steady() else None

    async def place(self, id: str) -> Place:
        record = await self._instances.locate(id, _PATIENCE)
        lives = self._instances.lives
        failure: AEnvError | None = None
        if record.status is State.RUNNING:
            try:
                place = lives.placed(record)
            except NetworkError as exc:
                failure = Busy(exc.message, hint=exc.hint)
            else:
                if id not in self._entries:
                    self._remember(place, record.lease)
                return place
        self._others.pop(id, None)
        return Place(id, "", record.owner, lives.token(record), failure or _failure(record))

    async def caller(self, token: str) -> Caller:
        return await self._authenticate(token)

    def touched(self, id: str) -> None:
        entry = self._entries.get(id)
        if entry is not None:
            if entry.lease_until is not None:
                entry.heard(self._instances.lives.clock.now())
        elif (other := self._others.get(id)) and other.lease is not None and steady() >= other.tell_at:
            other.tell_at = steady() + other.lease / 10
            task = asyncio.create_task(self._tell(id))
            self._telling.add(task)
            task.add_done_callback(self._telling.discard)

    async def _tell(self, id: str) -> None:
        with suppress(AEnvError):  # the next call says it again
            await self._instances.heard(id)

    def _remember(self, place: Place, lease: float | None) -> None:
        if len(self._others) >= _MOST:
            self._others.clear()
        before = self._others.get(place.id)
        self._others[place.id] = _Other(place, lease, before.tell_at if before else 0.0)


def _failure(record: InstanceRecord) -> AEnvError:
    """Why an instance cannot be reached."""
    id, reason = record.id, record.reason
    if record.over:
        if record.status is State.FAILED and not record.ran:
            return StartFailed(f"{id} did not start: {reason}")
        return loss(reason)(f"{id} is gone: {reason}")
    why = f": {reason}" if reason else ""
    return NetworkError(f"{id} does not run yet{why}", hint="ask again when it is Running")
