"""Instances that are parts of another one: made in one change with it, started beside it, reached from it through this
server, and ended with it.

The record of an instance says which ones it needs, and theirs whose part they are. So a server that comes back carries
calls again, and ends what a server that is gone did not.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine, Iterator
from typing import TYPE_CHECKING, Any

from aenv.api.entry import Entry
from aenv.api.gateway.places import Place
from aenv.api.records import InstanceRecord
from aenv.client.carrying import Carried, Carrier, Child, Lost
from aenv.errors import AEnvError, StartFailed
from aenv.models import Sandbox, State

if TYPE_CHECKING:
    from aenv.api.lives import Lives

log = logging.getLogger("aenv.api")

_POLL, _SLOWEST_POLL = 0.02, 1.0
_AGAIN = 5.0
"""Seconds until calls are tried to be carried again."""


class Families:
    """What the instances of a server need of each other."""

    def __init__(self, lives: Lives) -> None:
        self._lives = lives
        self._carriers: dict[str, asyncio.Task[None]] = {}
        self._work: set[asyncio.Task[None]] = set()

    # Coming

    async def join(self, entry: Entry, sandbox: Sandbox) -> None:
        """Wait until all run that an instance needs, and carry its calls there from now on. ``StartFailed`` when one
        does not start."""
        if entry.kept.record.needs:
            with entry.phases.of("parts"):
                await self._join(entry, sandbox)

    async def _join(self, entry: Entry, sandbox: Sandbox) -> None:
        record = entry.kept.record
        found = await asyncio.gather(*(self._running(alias, id) for alias, id in record.needs.items()))
        children: dict[str, Carried] = {
            alias: self._child(child) for alias, child in zip(record.needs, found, strict=True)
        }
        carrier = Carrier(self._reached(record, sandbox.url, sandbox.boot), children)
        self._stop(entry.id)
        self._carriers[entry.id] = asyncio.create_task(carrier.run())
        await carrier.prepared

    async def _running(self, alias: str, id: str) -> InstanceRecord:
        """One that is needed, once it runs; be it made by another server."""
        pause = _POLL
        while True:
            record = await self._lives.latest(id)
            if record is None or record.over:
                why = "it is gone" if record is None else record.reason
                env = id if record is None else record.env.id
                raise StartFailed(f"{alias} ({env}), which it needs, did not start: {why}")
            if record.status is State.RUNNING:
                return record
            entry = self._lives.entries.get(id)
            if entry is not None and entry.starting is not None and not entry.starting.done():
                await asyncio.wait((entry.starting,))
            else:
                await asyncio.sleep(pause)
                pause = min(pause * 2, _SLOWEST_POLL)

    def runs(self, record: InstanceRecord) -> None:
        """One runs: what it needs is to live as long as it does, also where it had to wait."""
        if record.needs:
            self._begin(self.prolong(record))

    def carry(self, entry: Entry) -> None:
        """Carry the calls of one that runs already."""
        if entry.kept.record.needs and entry.id not in self._carriers:
            self._carriers[entry.id] = asyncio.create_task(self._carry(entry))

    async def _carry(self, entry: Entry) -> None:
        record = entry.kept.record
        while True:
            try:
                children: dict[str, Carried] = {}
                for alias, id in record.needs.items():
                    child = await self._lives.latest(id)
                    is_there = child is not None and child.status is State.RUNNING
                    reason = "it is gone" if child is None else child.reason or f"it is {child.status.lower()}"
                    children[alias] = self._child(child) if child is not None and is_there else Lost(reason)
                place = self._lives.placed(record)
                carrier = Carrier(self._reached(record, place.url, record.boot), children)
                await carrier.run()  # until the first connection cannot be had
                await carrier.prepared
            except AEnvError as exc:
                log.warning("calls of %s cannot be carried at the moment: %s", entry.id, exc)
            await asyncio.sleep(_AGAIN)

    def _reached(self, record: InstanceRecord, url: str, boot: str) -> Sandbox:
        return Sandbox(url=url, id=record.id, token=self._lives.token(record), boot=boot, env=record.env.id)

    def _child(self, record: InstanceRecord) -> Child:
        place: Place = self._lives.placed(record)
        return Child(self._reached(record, place.url, record.boot), self)

    async def reason(self, id: str, patience: float) -> str:
        """Why one is no more, as far as it is known, or learned within so many seconds."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + patience
        while True:
            if (entry := self._lives.entries.get(id)) is not None:
                await self._lives.look(entry)
            record = await self._lives.latest(id)
            if record is None or record.over:
                return "it is gone" if record is None else record.reason or f"it is {record.status.lower()}"
            if loop.time() >= deadline:
                return ""
            await asyncio.sleep(_POLL)

    # Living, and going

    def below(self, record: InstanceRecord) -> Iterator[Entry]:
        """All that live because of it, and are known here."""
        for id in record.needs.values():
            if (entry := self._lives.entries.get(id)) is not None:
                yield entry
                yield from self.below(entry.kept.record)

    async def prolong(self, record: InstanceRecord) -> None:
        """See to it that what one needs lives as long as it does."""
        for entry in list(self.below(record)):
            await self._lives.prolong(entry, record)

    def ended(self, record: InstanceRecord) -> None:
        """One is no more, and what it needed ends, too."""
        self._stop(record.id)
        for id in record.needs.values():
            if (entry := self._lives.entries.get(id)) is not None:
                self._begin(self.end(entry, f"{record.id}, which needed it, has ended"))

    async def end(self, entry: Entry, reason: str) -> None:
        await self._lives.end(entry, State.TERMINATED, reason, force=True)

    async def orphans(self) -> None:
        """End what is left of those that are no more."""
        for entry in list(self._lives.entries.values()):
            parent = entry.kept.record.parent
            if parent and parent not in self._lives.entries:
                found = await self._lives.latest(parent)
                if found is None or found.over:
                    await self.end(entry, f"{parent}, which needed it, has ended")

    async def close(self) -> None:
        tasks = [*self._carriers.values(), *self._work]
        for id in list(self._carriers):
            self._stop(id)
        if tasks:
            await asyncio.wait(tasks)

    def _stop(self, id: str) -> None:
        if (task := self._carriers.pop(id, None)) is not None:
            task.cancel()

    def _begin(self, work: Coroutine[Any, Any, None]) -> None:
        async def run() -> None:
            try:
                await work
            except AEnvError as exc:  # what it did not come to is done at the next sweep
                log.warning("a part of an instance was not changed with it: %s", exc)

        task = asyncio.create_task(run())
        self._work.add(task)
        task.add_done_callback(self._work.discard)
