"""Which instances a caller sees, and how they are shown. Other people's are not there.

What lives here is known from memory, as long as no other server is there that could have changed it; the store has
the rest.
"""

from __future__ import annotations

import re
from urllib.parse import urlsplit

from aenv.api.gateway.places import Place
from aenv.api.lives import Entry, Lives
from aenv.api.records import InstanceRecord
from aenv.auth.callers import Caller, Scope
from aenv.errors import Conflict, NotFound
from aenv.models import State
from aenv.runtime.tokens import agent_token, digest
from aenv.wire import Instance, timestamp

_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}", re.ASCII)


class Visible:
    """The instances of a platform, as they look to those who ask."""

    def __init__(self, lives: Lives, data_url: str) -> None:
        self._lives = lives
        self._data_url = data_url.rstrip("/")
        self._host = urlsplit(data_url).hostname or ""

    async def record(self, id: str) -> InstanceRecord | None:
        """An instance, whoever asks."""
        entry = self._here(id)
        if entry is not None and entry.kept.record.warm:
            entry = None  # it may just have been claimed
        if entry is not None and not self._lives.peers.others:
            return entry.record
        kept = await self._lives.records.get(id) if _ID.fullmatch(id) else None
        if kept is None:
            return None if entry is None else entry.record
        if entry is None:
            return kept.record
        if kept.revision > entry.kept.revision:
            self._lives.refresh(entry, kept)  # that it ended is followed soon
        return entry.record

    def newest(self, record: InstanceRecord) -> InstanceRecord:
        """What is known here of a record that was just read. Another server may have changed it since it was here."""
        entry = self._here(record.id)
        return record if entry is None or record.updated_at > entry.kept.record.updated_at else entry.record

    def _here(self, id: str) -> Entry | None:
        return self._lives.entries.get(id) or self._lives.unwritten.get(id)

    async def find(self, caller: Caller, id: str) -> InstanceRecord:
        """An instance that the caller may see; to everybody else there is none."""
        record = await self.record(id)
        if record is None or record.warm or not caller.owns(record.owner):
            raise unknown(id)
        return record

    async def alive(self, caller: Caller, id: str) -> Entry:
        """An instance of the caller's that lives: ours, or another server's."""
        record = await self.find(caller, id)
        if record.over:
            raise Conflict(f"{id} is {record.status.lower()}: {record.reason}", hint="make a new one")
        if (entry := self._lives.entries.get(id)) and not entry.kept.record.warm:
            return entry
        kept = await self._lives.records.get(id)
        if kept is None:
            raise unknown(id)
        return Entry(kept, self._lives.clock.now())

    async def running(self, caller: Caller, id: str) -> tuple[Entry, Place]:
        """An instance of the caller's that runs, and where."""
        entry = await self.alive(caller, id)
        if entry.kept.record.status is not State.RUNNING:
            raise Conflict(f"{id} does not run yet", hint="wait until it is Running")
        return entry, entry.place or self._lives.placed(entry.kept.record)

    def shown(self, record: InstanceRecord, caller: Caller, *, local: bool, reason: str = "") -> Instance:
        """An instance as it is answered. Its tokens are for who may use it; its socket, for who is on this machine."""
        shown = Instance(
            id=record.id,
            env=record.env,
            status=record.status.value,
            created_at=timestamp(record.created_at),
            updated_at=timestamp(record.updated_at),
            ip=self._host,
            ttl=_seconds(record.ttl),
            owner=record.owner,
            labels=record.labels,
            boot=record.boot,
            expires_at=timestamp(record.expires_at),
            reason=reason or record.reason,
            phases=record.phases,
            service=record.service,
            needs=record.needs,
            parent=record.parent,
        )
        if not record.over:
            if record.queued is not None and (place := self._lives.queue.standing(record)) is not None:
                shown.position, shown.estimate, shown.reason = place
            shown.url = f"{self._data_url}/env-instance/{record.id}"
            if local and record.url.startswith("unix:") and record.server == self._lives.name:
                shown.socket = record.url
            if caller.has(Scope.RUN):
                shown.owner_token = self._lives.token(record)
                shown.agent_token = agent_token(digest(shown.owner_token))
        return shown


def unknown(id: str) -> NotFound:
    return NotFound(f"there is no instance {id[:128]!r}", hint="see 'aenv instance list' for yours")


def _seconds(ttl: float) -> str:
    return f"{int(ttl)}s" if ttl == int(ttl) else f"{ttl:g}"
