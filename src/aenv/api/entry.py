"""One living instance, as the server knows it that it lives on."""

from __future__ import annotations

import asyncio

import msgspec

from aenv.api.gateway.places import Place
from aenv.api.phases import Phases
from aenv.api.records import FOREVER, InstanceRecord, Kept
from aenv.runtime.hidden import Hidden


class Entry:
    """One living instance."""

    __slots__ = ("ended", "hidden", "kept", "lease_until", "phases", "place", "shift", "starting", "waiting")

    def __init__(self, kept: Kept, now: float) -> None:
        self.kept = kept
        """As it is in the store, as far as is known."""
        self.place: Place | None = None
        """Where it is reached, once it runs."""
        self.starting: asyncio.Task[None] | None = None
        self.waiting = 0
        """How many wait for an answer about it, or from it: meanwhile it counts as used."""
        self.hidden: Hidden | None = None
        """What takes its secrets out of texts."""
        self.phases = Phases(kept.record.phases)
        """Where the time of its start goes."""
        lease = kept.record.lease
        self.lease_until = None if lease is None else now + lease
        """When it ends if nobody is heard of; in the record this is written now and then."""
        self.ended: InstanceRecord | None = None
        """What it has become, while the store has not taken that."""
        self.shift = 0.0
        """Seconds by which the clock was set since its times were written."""

    @property
    def record(self) -> InstanceRecord:
        if self.ended is not None:
            return self.ended
        record = self.kept.record
        if self.lease_until != record.lease_until:
            record = msgspec.structs.replace(record, lease_until=self.lease_until)
        if self.shift:
            record = msgspec.structs.replace(record, expires_at=record.expires_at + self.shift)
        if self.place is None and not record.over:
            record = msgspec.structs.replace(record, phases=self.phases.seconds)
        return record

    @property
    def id(self) -> str:
        return self.kept.record.id

    def refresh(self, found: Kept) -> None:
        """Take what the store has. A lease may have been renewed by another server, and times moved with the clock."""
        if found.record.expires_at != self.kept.record.expires_at:
            self.shift = 0.0
        self.kept = found
        if found.record.lease is not None:
            self.lease_until = max(self.lease_until or 0.0, found.record.lease_until or 0.0)

    def wrote(self, kept: Kept, shift: float) -> None:
        """The store took this, with so much of the shift; which may have been read there before this is known."""
        if kept.revision > self.kept.revision:
            self.shift -= shift
            self.kept = kept

    def heard(self, now: float) -> None:
        """Somebody uses it."""
        if self.lease_until is not None:
            self.lease_until = now + (self.kept.record.lease or 0.0)

    def deadline(self, now: float, late: float = 0.0) -> float:
        """When its time is over. News of its client may be so late."""
        expires_at = self.kept.record.expires_at + self.shift
        if self.lease_until is None:
            return expires_at
        if self.waiting:
            self.heard(now)
        return min(expires_at, self.lease_until + late)

    def moved(self, seconds: float) -> None:
        """The clock was set: it has as much time left as before."""
        if self.kept.record.expires_at < FOREVER:
            self.shift += seconds
        if self.lease_until is not None:
            self.lease_until += seconds

    def hide(self, text: str) -> str:
        return text if self.hidden is None else self.hidden.text(text)
