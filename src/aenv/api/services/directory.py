"""Where the replicas of services are, for the gateway: as they are, for those that this process looks after, and as
they were a moment ago for those of others."""

from __future__ import annotations

import asyncio
import re
from typing import NamedTuple

from aenv.api.clock import steady
from aenv.api.gateway.places import Replicas
from aenv.api.services import shares
from aenv.api.services.keeping import Keepers
from aenv.api.services.moves import is_coming
from aenv.api.services.records import ServiceRecord
from aenv.auth.keys import owner_token
from aenv.errors import NotFound

FRESH = 1.0
"""Seconds for which what another process wrote of a service is taken for what it is."""
PATIENCE = 30.0
"""Seconds that a call waits for a service that has just nobody to take it."""
_POLL = 0.2
_MOST = 10_000
_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}", re.ASCII)


class _Found(NamedTuple):
    replicas: Replicas
    record: ServiceRecord


class ServiceDirectory:
    """The gateway's ``Services`` over those of a platform."""

    def __init__(self, keepers: Keepers) -> None:
        self._keepers = keepers
        self._others: dict[str, tuple[Replicas, float]] = {}
        """Those of other processes, and until when that is fresh."""
        self._asking: dict[str, asyncio.Task[_Found | None]] = {}

    def known(self, id: str) -> Replicas | None:
        keeper = self._keepers.get(id)
        if keeper is not None:
            return keeper.replicas
        other = self._others.get(id)
        left = 0.0 if other is None else other[1] - steady()
        if other is None or left <= 0:
            return None
        if left < FRESH / 2:
            self._ask(id)  # so that who calls all the time need not wait
        return other[0]

    async def find(self, id: str) -> Replicas:
        deadline = steady() + PATIENCE
        if keeper := self._keepers.get(id):
            await keeper.look()
        while True:
            keeper = self._keepers.get(id)
            if keeper is not None:
                found, record = keeper.replicas, keeper.record
            else:
                found, record = await self._asked(id)
            left = deadline - steady()
            if found.ready or left <= 0 or record.deleted or not is_coming(record):
                return found
            if keeper is not None:
                await keeper.news(left)
            else:
                await asyncio.sleep(_POLL)

    async def _asked(self, id: str) -> _Found:
        """What the store has."""
        if not _ID.fullmatch(id):
            raise _unknown(id)
        found = await asyncio.shield(self._ask(id))
        if found is None:
            self._others.pop(id, None)
            raise _unknown(id)
        return found

    def _ask(self, id: str) -> asyncio.Task[_Found | None]:
        """Have the store asked: once, however many want to know."""
        task = self._asking.get(id)
        if task is None:
            task = self._asking[id] = asyncio.create_task(self._read(id))
            task.add_done_callback(lambda done: self._answered(id, done))
        return task

    def _answered(self, id: str, task: asyncio.Task[_Found | None]) -> None:
        del self._asking[id]
        if not task.cancelled():
            task.exception()  # when all who asked have left, nobody hears it

    async def _read(self, id: str) -> _Found | None:
        fresh_until = steady() + FRESH  # from when it was asked: the answer may be late
        kept = await self._keepers.records.get(id)
        if kept is None:
            return None
        record, before, site = kept.record, self._others.get(id), self._keepers.site
        found = shares.replicas(record, owner_token(site.key, id), site.lives.peers)
        if before is not None and before[0].ready == found.ready and before[0].leaving == found.leaving:
            found = before[0] if found.ready else found
        if len(self._others) >= _MOST:
            self._others.clear()
        self._others[id] = (found, fresh_until)
        return _Found(found, record)


def _unknown(id: str) -> NotFound:
    return NotFound(f"there is no service {id[:128]!r}", hint="it may have been deleted, or be another owner's")
