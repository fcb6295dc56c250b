"""Who used what: the meter of one server, which writes it into the ledger (``usage``) every few seconds.

Nothing is counted twice, though several servers look after the same instances and any of them may end at any moment.

- Seconds: a record says up to when all instances of a server's name are charged. Whoever charges what ran since then
  changes that record in the same step, on the revision that was seen; so of several servers one does it. A server that
  was away, as after a crash, goes on from there. An instance is charged from when it runs until it ends; one of a pool,
  from when it was given to somebody.
- Processor: engines tell what a sandbox has used since it began. How much of that is charged is a number beside it,
  which may not grow over what was told. What is used after the last reading is not charged.
- Calls: each is counted by the server that carried it to the sandbox, and written with a record of that server's, on
  its revision: when it is not known whether that was done, it is tried again, and refused if it was. A crash takes
  those of the last few seconds.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Coroutine
from contextlib import suppress
from typing import Any, NamedTuple

import msgspec
from msgspec import Struct

from aenv.api.clock import JUMP, steady
from aenv.api.gateway.places import Answered
from aenv.api.lives import Lives
from aenv.api.records import InstanceRecord
from aenv.api.usage import HOUR, KIND, Ledger, Used
from aenv.errors import AEnvError, Conflict, Unsupported
from aenv.store import Add, Change, Full, Put, Store

log = logging.getLogger("aenv.api")

EVERY = 15.0
"""Seconds between two entries into the ledger."""
LATE = 3.0
"""Seconds until a server knows what another one began or ended: so much of the newest time is charged later."""
GAP = HOUR
"""Most seconds that are charged at once. What no server saw for longer may not have run."""
_CLOSE = 5.0
"""Seconds that a store has to take the last entry of a server that stops."""
_ENGINE = 5.0
"""Seconds in which an engine must tell what one sandbox used."""
_READING = 10.0
"""Seconds for all of them; those that were left out come next time."""
_READERS = 8
_BATCH = 200
"""Sandboxes whose readings are written at once."""
_TRIES = 3
_MOST_ENDED = 100_000
"""Instances that have ended and are not charged yet, when the store is away."""
_REMEMBERED = 7 * 24 * HOUR
"""Seconds that the record of a server's calls is kept."""
_REFUSED = (401, 403)
_CALLS = (b"/tools/", b"/mcp", b"/a2a", b"/functions/", b"/task/reward")
_PASSED_ON = "/env-instance/"
"""Part of the address of an instance that is reached through another server, which counts the call."""


class _Life(NamedTuple):
    """When an instance ran, and for whom."""

    began: float
    ended: float
    owner: str
    experiment: str


class _Reading(NamedTuple):
    milliseconds: int
    owner: str
    experiment: str


class _Charged(Struct, frozen=True):
    """Up to when a name's instances are charged."""

    until: float
    by: str
    """The boot id of the server that did it."""


class _Calls:
    """Calls to one instance that are not written yet."""

    __slots__ = ("count", "owner")

    def __init__(self, owner: str) -> None:
        self.owner = owner
        self.count = 0


class Meter:
    """What is used at one server. It is a ``Watcher`` of the gateway."""

    def __init__(self, store: Store, lives: Lives, *, every: float = EVERY) -> None:
        self.ledger = Ledger(store)
        self._store = store
        self._lives = lives
        self._every = every
        self._late = LATE if store.shared else 0.0
        self._me = lives.peers.me.boot
        self._writing = asyncio.Lock()
        self._task: asyncio.Task[None] | None = None
        self._forget_at = 0.0
        self._ended: dict[str, _Life] = {}
        """Instances that have ended and may not be charged yet."""
        self._looked = False
        """Whether those that ended before this server began are among them."""
        self._charged_at = 0.0
        """When this server charged last, by a clock that nobody sets."""
        self._tells = True
        """Whether the engine tells what a sandbox uses, as far as is known."""
        self._readings: dict[str, _Reading] = {}
        self._last_readings: set[asyncio.Task[None]] = set()
        self._room = asyncio.Semaphore(_READERS)
        self._marks: dict[str, int] | None = None
        """Milliseconds of each sandbox that are charged; None when they are to be read."""
        self._calls: dict[str, _Calls] = {}
        self._batch: list[Add] = []
        """Calls that are being written."""
        self._batch_revision = 0

    def start(self) -> None:
        self._lives.listeners.append(self.ended)
        self._lives.missed.append(self.missed)
        self._task = asyncio.create_task(self._run())

    async def close(self) -> None:
        """Write what is not written yet."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait((self._task,))
        if self._last_readings:
            await asyncio.wait(self._last_readings, timeout=_ENGINE)
        with suppress(TimeoutError):
            async with asyncio.timeout(_CLOSE):
                await self.write(last=True)

    async def _run(self) -> None:
        while True:
            await asyncio.sleep(self._every * random.uniform(0.8, 1.2))  # noqa: S311
            await self.write()

    async def write(self, *, last: bool = False) -> None:
        """Write what was used into the ledger. What the store does not take now is tried next time."""
        async with self._writing:
            await _try(self._write_calls())
            await _try(self._charge(last))
            await _try(self._write_readings())
            if steady() >= self._forget_at and not last:
                self._forget_at = steady() + HOUR
                await _try(self.ledger.forget(self._lives.clock.now()))
                await _try(self._forget_marks())

    # Calls

    def answered(self, call: Answered) -> None:
        """Count a call of a tool, a reward or a function."""
        place, path = call.place, call.path
        if place is None or not path.startswith(_CALLS) or call.status in _REFUSED or _PASSED_ON in place.url:
            return
        if call.method != b"POST" and not path.startswith(b"/functions/"):
            return
        counted = self._calls.get(place.id)
        if counted is None:
            counted = self._calls[place.id] = _Calls(place.owner)
        counted.count += 1

    async def _write_calls(self) -> None:
        if self._batch:
            await self._write_batch()
        if not self._batch:
            self._batch = self.ledger.changes(await self._counted())
            if self._batch:
                await self._write_batch()

    async def _write_batch(self) -> None:
        key, now = f"calls:{self._me}", self._lives.clock.now()
        put = Put(KIND, key, b"{}", expect=self._batch_revision, expires_at=now + _REMEMBERED)
        try:
            self._batch_revision, *_ = await self._store.change(put, *self._batch)
        except Conflict:  # it was done, though nobody could say so; or nothing was written for so long that it is gone
            found = await self._store.get(KIND, key)
            self._batch_revision = 0 if found is None else found.revision
            if found is None:
                return
        self._batch = []

    async def _counted(self) -> Used:
        """The calls since the last time, by whose they were."""
        experiments = {}
        for id in list(self._calls):
            entry = self._lives.entries.get(id)
            kept = entry.kept if entry is not None else await self._lives.records.get(id)
            experiments[id] = "" if kept is None else kept.record.experiment
        used, now = Used(), self._lives.clock.now()
        for id, experiment in experiments.items():
            calls = self._calls.pop(id)
            used.add(now, calls.owner, experiment, "calls", calls.count)
        return used

    # Seconds

    def ended(self, record: InstanceRecord) -> None:
        """An instance is no more."""
        if not record.started_at:
            return
        if len(self._ended) >= _MOST_ENDED:
            del self._ended[next(iter(self._ended))]
        self._ended[record.id] = _life(record)
        if self._tells:  # its sandbox is ended after this, and may tell once more
            task = asyncio.create_task(_try(self._read(record)))
            self._last_readings.add(task)
            task.add_done_callback(self._last_readings.discard)

    def missed(self, record: InstanceRecord) -> None:
        """One is no more that was not known here, or not any more."""
        if record.server == self._lives.name and record.id not in self._ended:
            self.ended(record)

    async def _charge(self, last: bool) -> None:
        """Charge what ran since it was done last, unless another server has just done it."""
        name, key = self._lives.name, f"charged:{self._lives.name}"
        found = await self._store.get(KIND, key)
        charged = _Charged(0.0, "") if found is None else msgspec.json.decode(found.value, type=_Charged)
        now = self._lives.clock.now() - self._late
        if charged.until > now + 2 * LATE:  # the clock was set back
            charged = _Charged(now, "")
        elif charged.until >= now or (charged.until > now - self._every / 2 and not last):
            self._forget_ended(charged.until)
            return
        since = max(charged.until, now - GAP)
        if charged.by == self._me:  # a clock that was set forward makes nothing run longer
            since = max(since, now - (steady() - self._charged_at) - JUMP)
        else:
            self._marks = None
        if not self._looked:
            await self._look(since)
        at, used = steady(), Used()
        for life in self._charged_lives():
            if since <= life.began < now:
                used.add(life.began, life.owner, life.experiment, "instances", 1)
            used.span(max(life.began, since), min(life.ended, now), life.owner, life.experiment)
        changes: list[Change] = [
            Put(KIND, key, msgspec.json.encode(_Charged(now, self._me)), expect=0 if found is None else found.revision),
            *self.ledger.changes(used),
        ]
        try:
            await self._store.change(*changes)
        except Conflict:
            log.debug("another server of the name %s has charged what ran", name)
            return
        self._charged_at = at
        self._forget_ended(now)
        if self._tells and not last:
            await self._read_all()

    def _charged_lives(self) -> list[_Life]:
        running = [_life(entry.kept.record) for entry in self._lives.entries.values() if entry.kept.record.started_at]
        return [*running, *self._ended.values()]

    async def _look(self, since: float) -> None:
        """Find what ended while no server was there."""
        async for kept in self._lives.records.scan():
            record = kept.record
            if record.over and record.server == self._lives.name and record.started_at and record.updated_at > since:
                self._ended.setdefault(record.id, _life(record))
        self._looked = True

    def _forget_ended(self, until: float) -> None:
        self._ended = {id: life for id, life in self._ended.items() if life.ended > until}

    # Processor

    async def _read_all(self) -> None:
        """Ask what each running sandbox has used, as far as there is time."""
        running = [
            entry.kept.record
            for entry in self._lives.entries.values()
            if entry.kept.record.started_at and entry.place is not None
        ]
        random.shuffle(running)

        async def reader() -> None:
            while running and self._tells:
                await self._read(running.pop())

        with suppress(TimeoutError):
            async with asyncio.timeout(_READING), asyncio.TaskGroup() as group:
                for _ in range(_READERS):
                    group.create_task(reader())

    async def _read(self, record: InstanceRecord) -> None:
        try:
            async with asyncio.timeout(_ENGINE), self._room:
                used = await self._lives.engine.used(record.id)
        except Unsupported:
            self._tells = False
        except (AEnvError, TimeoutError):
            return  # the last reading counts
        else:
            self._readings[record.id] = _Reading(round(used.cpu * 1000), record.owner, record.experiment)

    @property
    def _marked(self) -> str:
        return f"{KIND}/cpu/{self._lives.name}"

    async def _write_readings(self) -> None:
        refused = 0
        while self._readings and refused < _TRIES:
            if self._marks is None:
                counts = await self._store.counts(self._marked)
                self._marks = {id: round(numbers.get("ms", 0)) for id, numbers in counts.items()}
            some = [(id, self._readings[id]) for id in list(self._readings)[:_BATCH]]
            used, marks, now = Used(), [], self._lives.clock.now()
            for id, (milliseconds, owner, experiment) in some:
                if (more := milliseconds - self._marks.get(id, 0)) > 0:
                    used.add(now, owner, experiment, "cpu_seconds", more / 1000)
                    marks.append(Add(self._marked, id, {"ms": more}, most={"ms": milliseconds}))
            try:
                await self._store.change(*marks, *self.ledger.changes(used))
            except Full:  # another server was faster
                self._marks = None
                refused += 1
                continue
            except AEnvError:
                self._marks = None
                raise
            for id, reading in some:
                self._marks[id] = max(reading.milliseconds, self._marks.get(id, 0))
                if self._readings.get(id) is reading:
                    del self._readings[id]

    async def _forget_marks(self) -> None:
        """Forget what was charged of sandboxes of which there is no record any more; one server does it."""
        if not self._tells:
            return
        key = f"forgotten:{self._lives.name}"
        before = await self._store.get(KIND, key)
        revision = 0 if before is None else before.revision
        counts = await self._store.counts(self._marked)
        there = {kept.record.id async for kept in self._lives.records.scan()}
        gone = [
            Add(self._marked, id, {name: -amount for name, amount in numbers.items()})
            for id, numbers in counts.items()
            if id not in there
        ]
        self._marks = None
        with suppress(Conflict):
            for start in range(0, len(gone), _BATCH):
                put = Put(KIND, key, b"{}", expect=revision)
                revision, *_ = await self._store.change(put, *gone[start : start + _BATCH])


def _life(record: InstanceRecord) -> _Life:
    ended = record.updated_at if record.over else float("inf")
    return _Life(record.started_at, ended, record.owner, record.experiment)


async def _try(work: Coroutine[Any, Any, None]) -> None:
    try:
        await work
    except AEnvError as exc:
        log.warning("what was used could not be written down yet: %s", exc)
    except Exception:
        log.exception("what was used could not be written down")
