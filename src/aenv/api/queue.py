"""Who waits to be admitted, and how each is.

An instance is admitted in the change that writes its record: the numbers of what is in use grow in the same step, and
the store refuses that when a limit would be passed. What has no room is written down as waiting, and is admitted by the
server that has it as soon as it is next (``fairness``). Servers tell each other who is first in their queues; each
leaves room for what is next at another, as long as that one is heard of and takes it.

While it waits, an instance may be deleted, its lease runs, and after its time to live, or the time that its start may
take where that is longer, it is given up. Its time to live begins when it is admitted.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from heapq import merge

import msgspec
from msgspec import Struct

from aenv.api import charges, fairness
from aenv.api.charges import AT, KIND, Amounts, subjects
from aenv.api.clock import Clock, steady
from aenv.api.entry import Entry
from aenv.api.fairness import Group, Request
from aenv.api.quotas import Quotas
from aenv.api.records import FOREVER, InstanceRecord, Kept, Records
from aenv.api.standing import REASON, Standing, Standings, check
from aenv.errors import AEnvError, Conflict, RateLimited
from aenv.store import Change, Delete, Full, Put

log = logging.getLogger("aenv.api")

POLL = 0.2
"""Seconds after which a server looks again whether there is room, when nothing ended here."""
PAUSE = 0.02
"""Seconds between two looks at least."""
HOLD = 300.0
"""Seconds for which what becomes free is kept for requests that need more; as long after that, others go before."""
YIELD = 2.0
"""Seconds for which room is left for a request of another server that could take it."""
HEARD = 2.0
"""Seconds after which what another server said of its queue counts no more."""
TOLD = 0.5
"""Seconds after which a server says again who is first in its queue."""
GATHER = 5.0
"""Seconds for which the rest of a batch is waited for when a server takes it over."""
HEADS = 64
"""Experiments whose first request other servers are told of."""
IDLE = 60.0
"""Seconds after which the clock of a rate that was not used is forgotten."""
_NOTES = "queue"
_REMEMBERED = 60.0


class Waiting:
    """Instances that wait to be admitted together."""

    def __init__(self, record: InstanceRecord) -> None:
        self.id = record.batch or record.id
        self.group: Group = (record.owner, record.experiment)
        self.since = record.queued or 0.0
        self.entries: dict[str, Entry] = {}
        self.missing = max(record.together, 1)
        """How many of them are not here, as far as is known."""
        self.joined_at = 0.0
        self.over = asyncio.Event()
        """Set when some of them were admitted, or wait here no more."""
        self.request = Request(self.id, *self.group, self.since, charges.needed(()))

    @property
    def is_whole(self) -> bool:
        return self.missing <= 0 or steady() - self.joined_at > GATHER

    def tell(self) -> None:
        """Those that wait no more hear it; the others wait on."""
        self.over.set()
        self.over = asyncio.Event()

    def count(self, record: InstanceRecord, sign: int) -> None:
        """One more of them, or one less, is here."""
        one, need = charges.needed((record,)), self.request.need
        need = {name: amount + sign * one[name] for name, amount in need.items()}
        self.request = msgspec.structs.replace(self.request, need=need)


class Head(Struct, frozen=True, array_like=True):
    """The first request of an experiment, as one server tells the others."""

    id: str
    owner: str
    experiment: str
    since: float
    need: Amounts
    served: float
    """When something of that experiment was last admitted there."""
    count: int
    """How many requests of that experiment wait there."""
    owner_served: float = 0.0
    """The same of all that its owner asks for."""


class Queue:
    """What waits at this server."""

    def __init__(self, records: Records, quotas: Quotas, clock: Clock, name: str) -> None:
        """``name`` is this server's, for as long as it runs."""
        self._store = quotas.store
        self._records = records
        self._quotas = quotas
        self._clock = clock
        self._name = name
        self._groups: dict[Group, dict[str, Waiting]] = {}
        self._task: asyncio.Task[None] | None = None
        self._woken = asyncio.Event()
        self._held_at: float | None = None
        """Since when room is kept for requests that need more."""
        self._holder = ""
        self._had: set[str] = set()
        """Requests that room was kept for in vain, since there were last none."""
        self._yielded: dict[str, float] = {}
        self._heard: dict[str, tuple[int, float]] = {}
        """The last word of each other server: its revision, and when it was first seen."""
        self._told: tuple[bytes, float] = (b"", 0.0)
        self._standings = Standings()

    def __len__(self) -> int:
        """How many instances wait here."""
        return sum(len(waiting.entries) for waiting in self._all())

    def _all(self) -> Iterator[Waiting]:
        return (waiting for group in self._groups.values() for waiting in group.values())

    # Coming in

    async def enter(
        self,
        made: Sequence[InstanceRecord],
        more: Sequence[Change],
        *,
        claimed: Mapping[str, Kept] = {},
    ) -> list[Kept]:
        """Write these records, all or none, with what else belongs to them: as admitted, or else as waiting. Those
        that are ``claimed`` take the place of a warm one.

        What could never be admitted is ``Invalid``. ``RateLimited`` when the queue is full.
        """
        table, now = await self._quotas.table(), self._clock.now()
        check(made, table)
        first = made[0]
        limited = [subject for subject in subjects(first.owner, first.experiment) if table.of(subject).any]
        # Nobody goes before those who wait. What was warm is not charged for until now.
        guard = charges.unless_waiting(limited[0]) if limited else []
        with suppress(Full):
            return await self._records.save_all(
                [(claimed.get(record.id), record) for record in made], [*more, *guard], limits=table.of, now=now
            )
        waiting = [_waiting(record, first.id, len(made), now) for record in made]
        try:
            changes = [(claimed.get(record.id), record) for record in waiting]
            return await self._records.save_all(changes, more, limits=table.of)
        except Full as exc:
            most = int(table.of(exc.key).waiting)
            message = f"there is no room, and the queue of {exc.key} is full: {most} may wait"
            hint = "ask again later, or end what is not needed any more"
            raise RateLimited(message, hint=hint, retry_after=self._standings.later(exc.key)) from None

    def join(self, entry: Entry) -> None:
        """Take in an instance that is written down as waiting."""
        record = entry.kept.record
        group = self._groups.setdefault((record.owner, record.experiment), {})
        waiting = group.get(record.batch or record.id)
        if waiting is None:
            waiting = Waiting(record)
            last = next(reversed(group.values()), None)
            group[waiting.id] = waiting
            if last is not None and last.since > waiting.since:  # of a server that was here before
                self._groups[waiting.group] = dict(sorted(group.items(), key=lambda item: item[1].since))
        waiting.entries[entry.id] = entry
        waiting.missing -= 1
        waiting.joined_at = steady()
        waiting.count(record, 1)
        self.wake()
        if self._task is None or self._task.done():
            self._task = asyncio.create_task(self._run(), name="aenv queue")

    async def turn(self, entry: Entry) -> bool:
        """Wait until an instance is admitted; False when another server has admitted or ended it."""
        record = entry.kept.record
        waiting = self._groups.get((record.owner, record.experiment), {}).get(record.batch or record.id)
        try:
            while waiting is not None and entry.id in waiting.entries:
                await waiting.over.wait()
        finally:
            if waiting is not None:
                self._leave(waiting, entry)
        return entry.kept.record.queued is None and entry.kept.record.by == self._name and not entry.kept.record.over

    def _leave(self, waiting: Waiting, entry: Entry) -> None:
        if waiting.entries.pop(entry.id, None) is None:
            return
        self.wake()
        waiting.count(entry.kept.record, -1)
        if waiting.entries:
            return
        group = self._groups.get(waiting.group, {})
        if group.get(waiting.id) is waiting:
            del group[waiting.id]
            if not group:
                del self._groups[waiting.group]

    def wake(self) -> None:
        """There may be room."""
        self._woken.set()

    async def recount(self) -> None:
        """Make the numbers the sum of what the records say, where nobody else could change them meanwhile.

        They are that by themselves; but not after a server of an older version, which counts nothing, or when a file
        was put together from others.
        """
        if self._store.shared:
            return
        records: list[tuple[None, InstanceRecord]] = [(None, kept.record) async for kept in self._records.scan()]
        right, found = charges.moved(records), await self._store.counts(KIND)
        wrong: dict[str, Amounts] = {}
        for subject in {*right, *found}:
            is_, should = found.get(subject, {}), right.get(subject, {})
            names = {*is_, *should} - {AT}
            if off := {name: gap for name in names if (gap := should.get(name, 0) - is_.get(name, 0))}:
                wrong[subject] = off
        if wrong:
            log.warning("what is in use was counted anew: %s", ", ".join(sorted(wrong)))
            await self._store.change(*charges.adds(wrong))

    async def tidy(self) -> None:
        """Forget the clocks of rates that nobody used for a while: there is one for each experiment that ever was."""
        now = self._clock.now()
        clocks = {subject: used.get(AT, 0.0) for subject, used in (await self._store.counts(KIND)).items()}
        idle = {subject: {AT: -at} for subject, at in clocks.items() if at and at < now - IDLE}
        if idle:
            await self._store.change(*charges.adds(idle))

    async def close(self) -> None:
        """Admit nobody any more. What waits goes on waiting when a server is back."""
        if self._task is not None and not self._task.done():
            self._task.cancel()
            await asyncio.wait((self._task,))
            if self._told[0]:
                await self._forget()

    # Looking whether there is room

    async def _run(self) -> None:
        while self._groups:
            await self._work()
            self._held_at, self._had, self._yielded = None, set(), {}
            self._standings.tidy(())
            if self._told[0]:
                await self._forget()

    async def _work(self) -> None:
        """Admit who is next, as long as somebody waits."""
        failed = False
        while self._groups:
            self._woken.clear()
            try:
                await self._look()
                failed = False
            except AEnvError as exc:
                if not failed:
                    log.warning("who is next in the queue cannot be seen: %s", exc)
                failed = True
            except Exception:
                log.exception("the queue failed")
                failed = True
            await asyncio.sleep(POLL if failed else PAUSE)
            if self._groups and not failed:
                await _either(self._woken, POLL)

    async def _look(self) -> None:
        self._standings.table = await self._quotas.table()
        self._standings.use = await self._store.counts(KIND)
        others = await self._others() if self._store.shared else []
        groups, served = self._lines(others)
        keeps = self._keeps()
        self._standings.plan = fairness.plan(
            groups,
            self._standings.use,
            self._standings.table.of,
            now=self._clock.now(),
            served=served,
            passed=self._passed(),
            keep=keeps,
        )
        self._note_chances(keeps)
        for request in self._standings.plan.turns:
            waiting = self._groups.get(request.group, {}).get(request.id)
            if waiting is not None and not await self._admit(waiting):
                self.wake()
                break
        if len(self._standings.plan.turns) >= fairness.AT_ONCE:
            self.wake()
        elsewhere: Counter[Group] = Counter()
        for head in others:
            elsewhere[head.owner, head.experiment] += head.count
        self._standings.tidy(self._groups, elsewhere)
        if self._store.shared:
            await self._tell()

    def _lines(self, others: Sequence[Head]) -> tuple[dict[Group, Iterable[Request]], dict[str, float]]:
        """Who waits, here and first elsewhere, and when each owner and experiment was last given something."""
        groups: dict[Group, Iterable[Request]] = {
            group: (waiting.request for waiting in found.values() if waiting.is_whole)
            for group, found in self._groups.items()
        }
        served = dict(self._standings.served)
        for head in others:
            group = (head.owner, head.experiment)
            if head.id not in self._groups.get(group, {}):
                request = Request(head.id, *group, head.since, head.need, elsewhere=True)
                groups[group] = merge(groups.get(group, ()), (request,), key=lambda one: one.since)
            for subject, at in zip(subjects(*group)[1:], (head.owner_served, head.served), strict=True):
                served[subject] = max(served.get(subject, 0.0), at)
        return groups, served

    def _keeps(self) -> bool:
        """Whether room is kept for requests that need more: for one after another, and half of the time at most,
        however many there are."""
        kept_for = 0.0 if self._held_at is None else steady() - self._held_at
        if kept_for >= 2 * HOLD:
            self._held_at = None
        elif kept_for >= HOLD:
            self._had.add(self._holder)
            return False
        return True

    def _passed(self) -> set[str]:
        """Requests that had their chance, and are passed over for now."""
        now = steady()
        return self._had | {id for id, since in self._yielded.items() if now - since > YIELD}

    def _note_chances(self, keeps: bool) -> None:
        """Note since when room is left for requests of other servers, and kept for what needs more."""
        now, holder = steady(), self._standings.plan.holder
        self._yielded = {one.id: self._yielded.get(one.id, now) for one in self._standings.plan.turns if one.elsewhere}
        if holder is not None:
            self._holder, self._held_at = holder.id, self._held_at or now
        elif keeps:
            self._held_at, self._had = None, set()

    async def _admit(self, waiting: Waiting) -> bool:
        """Admit these together; False when that could not be: what is in use, or they, changed meanwhile."""
        now = self._clock.now()
        if not waiting.entries:
            return True
        entries = [(entry, entry.shift) for entry in waiting.entries.values()]
        changes = [(entry.kept, _admitted(entry.record, now)) for entry, _ in entries]
        try:
            found = await self._records.save_all(changes, limits=self._standings.table.of, now=now)
        except Full:
            return False
        except Conflict:
            await self._reread(waiting)
            return False
        for (entry, shift), kept in zip(entries, found, strict=True):
            entry.wrote(kept, shift)
            self._leave(waiting, entry)
        waiting.tell()
        self._standings.admitted(waiting.group, now)
        return True

    async def _reread(self, waiting: Waiting) -> None:
        """Take what the store has of these; what has ended or was admitted waits here no more."""
        for entry in list(waiting.entries.values()):
            found = await self._records.get(entry.id) or Kept(entry.kept.record, 0)
            entry.refresh(found)
            if found.record.over or found.record.queued is None or found.record.by != self._name:
                self._leave(waiting, entry)
        waiting.tell()

    # What servers tell each other

    async def _others(self) -> list[Head]:
        """Who is first in the queues of other servers, as far as they are heard of."""
        now, found = steady(), []
        heard: dict[str, tuple[int, float]] = {}
        async for record in self._store.scan(_NOTES):
            if record.key == self._name:
                continue
            revision, since = self._heard.get(record.key, (0, now))
            since = since if revision == record.revision else now
            heard[record.key] = (record.revision, since)
            if now - since <= HEARD:
                try:
                    found += msgspec.json.decode(record.value, type=list[Head])
                except msgspec.MsgspecError:
                    continue  # of a version that says it in another way
        self._heard = heard
        return found

    async def _tell(self) -> None:
        firsts = [next(iter(found.values())).request for found in self._groups.values()]
        firsts.sort(key=lambda first: first.since)
        heads = [self._head(first) for first in firsts[:HEADS]]
        said = msgspec.json.encode(heads)
        if heads and (said != self._told[0] or steady() - self._told[1] >= TOLD):
            await self._store.change(Put(_NOTES, self._name, said, expires_at=self._clock.now() + _REMEMBERED))
            self._told = said, steady()

    def _head(self, one: Request) -> Head:
        _, owner, experiment = (self._standings.served.get(name, 0.0) for name in subjects(*one.group))
        count = len(self._groups[one.group])
        return Head(one.id, *one.group, one.since, one.need, experiment, count, owner)

    async def _forget(self) -> None:
        try:
            await self._store.change(Delete(_NOTES, self._name))
        except AEnvError as exc:
            log.debug("that nothing waits here any more was not written down: %s", exc)
        self._told = b"", 0.0

    # What those who wait are told

    def standing(self, record: InstanceRecord) -> Standing | None:
        """Where an instance is in the queue; None when it waits at another server."""
        waiting = self._groups.get((record.owner, record.experiment), {}).get(record.batch or record.id)
        if waiting is None or record.id not in waiting.entries:
            return None
        return self._standings.of(waiting.request, self._requests, self._clock.now())

    def _requests(self) -> dict[Group, list[Request]]:
        return {group: [waiting.request for waiting in found.values()] for group, found in self._groups.items()}


async def _either(event: asyncio.Event, seconds: float) -> None:
    """Wait for an event, so long."""
    try:
        async with asyncio.timeout(seconds):
            await event.wait()
    except TimeoutError:
        pass


def _waiting(record: InstanceRecord, batch: str, count: int, now: float) -> InstanceRecord:
    longest = max(record.ttl, record.wanted.startup_timeout if record.wanted else 0.0)
    return msgspec.structs.replace(
        record,
        queued=now,
        reason=REASON,
        batch=batch if count > 1 else "",
        together=count if count > 1 else 0,
        expires_at=record.expires_at if record.expires_at > FOREVER / 2 else now + longest,
    )


def _admitted(record: InstanceRecord, now: float) -> InstanceRecord:
    expires_at = record.expires_at if record.expires_at > FOREVER / 2 else now + record.ttl
    return msgspec.structs.replace(
        record, queued=None, reason="", batch="", together=0, expires_at=expires_at, updated_at=now
    )
