"""One service, looked after: its replicas are started, watched, replaced, and made to leave, as its record says.

Every move is written down before it is made, on the revision that was seen. So whatever ends this process in between,
the next keeper finds in the record how far it was; and a process that is no longer the keeper, without knowing it, is
told so by the first thing that it tries.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from typing import NamedTuple

import msgspec

from aenv.api.clock import steady
from aenv.api.gateway.places import Replicas
from aenv.api.lives import ENGINE, Entry, Lives
from aenv.api.records import InstanceRecord
from aenv.api.services import health, shares
from aenv.api.services.moves import TRIES, given_up, is_done, is_updating, next_moves, pause_after, plan_of, rolled_back
from aenv.api.services.records import (
    KEPT_FOR,
    Kept,
    Member,
    Phase,
    Plan,
    Records,
    ServiceRecord,
    drop_storage,
    free_storage,
    put,
)
from aenv.api.services.sandboxes import instance_of, lost
from aenv.api.standing import REASON
from aenv.auth.callers import Caller, Scope
from aenv.auth.keys import owner_token
from aenv.errors import AEnvError, Conflict, NetworkError, Unsupported
from aenv.models import State
from aenv.store import Change, Full

log = logging.getLogger("aenv.api")

LOOK = 1.0
"""Seconds between two looks at a service's record, and between two looks at anything."""
SOON = 0.1
"""The same while something is under way."""
HEALTH = 2.0
"""Seconds between two looks at the health of its replicas."""
WELL = 60.0
"""Seconds after which a replica that runs has lived down its failures."""
HEARD, SOONER = 3.0, 1.5
"""Seconds in which every gateway hears that a replica leaves; the second, when nobody takes its place meanwhile. Where
there is no other server, a third of it: what is on its way arrives."""
DRAIN, LAST = 30.0, 10.0
"""Seconds that calls in flight have to end, at a replica that leaves; the second, when the service was deleted."""
SESSIONS = 3.0
"""Seconds that sessions which are never without a call have to end, at a replica that leaves."""
_AGAIN = 1.0
_ASKING = 2.0
_LONGEST_REASON = 600
_MOST = 0.95
"""What part of the time for a start is all of it, as far as clocks agree."""

Mutation = Callable[[ServiceRecord], ServiceRecord]


class Deposed(Exception):
    """Another process is the keeper, or there is nothing left to keep."""


class Site(NamedTuple):
    """What the keepers of a server share."""

    records: Records
    lives: Lives
    key: bytes


class Keeper:
    """Looks after one service."""

    def __init__(self, site: Site, kept: Kept, call_token: str = "", caller: Caller | None = None) -> None:
        """``call_token`` and ``caller`` are of who asked for the service: a package that is not here yet is fetched in
        their name."""
        self._site = site
        self._kept = kept
        self._awake = asyncio.Event()
        self._news: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._read_at = 0.0
        self._found_at = steady()
        """When the store had its record."""
        self._due: dict[str, float] = {}
        """When replicas that are down are started again."""
        self._ready_since: dict[str, float] = {}
        self._health = health.Health()
        self._lost: set[str] = set()
        """Replicas that are over, which the record does not say yet."""
        self._dead: deque[str] = deque(maxlen=128)
        """The last replicas that ended by themselves, which the engine may keep for some minutes, to be read."""
        self._departures: dict[str, asyncio.Task[None]] = {}
        self._quiet: set[str] = set()
        """Those that leave, and are to take no calls of their sessions any more."""
        self._looking: asyncio.Task[None] | None = None
        self._token = owner_token(site.key, kept.record.id)
        self._asked(call_token, caller)
        self.replicas: Replicas = shares.replicas(kept.record, self._token, site.lives.peers)
        """For the gateway, as of now."""

    @property
    def record(self) -> ServiceRecord:
        return self._kept.record

    def _asked(self, call_token: str, caller: Caller | None) -> None:
        self._call_token = call_token
        self._caller = caller or Caller(self.record.owner, frozenset((Scope.READ, Scope.RUN)))

    # From outside

    def changed(self, kept: Kept, call_token: str, caller: Caller | None) -> None:
        """Somebody wants it otherwise."""
        if kept.revision > self._kept.revision:
            self._take(kept)
        self._asked(call_token, caller)
        self._awake.set()

    def ended(self, id: str) -> None:
        """A replica is over."""
        self._lost.add(id)
        self._show()
        self._awake.set()

    async def news(self, patience: float) -> None:
        """Wait until something about it changes, or for so long."""
        await asyncio.wait((self._news,), timeout=max(patience, 0.0))

    async def look(self) -> None:
        """See whether the replicas that take calls are there: somebody could not reach one."""
        if self._looking is None or self._looking.done():
            self._looking = asyncio.create_task(self._look())
        await asyncio.wait((self._looking,), timeout=2 * _ASKING)

    async def _look(self) -> None:
        lives = self._site.lives
        entries = [lives.entries.get(member.id) for member in self.record.members if member.phase is Phase.READY]
        for work in asyncio.as_completed([lives.look(entry, _ASKING) for entry in entries if entry is not None]):
            with suppress(AEnvError):
                await work

    # The loop

    async def run(self) -> None:
        """Look after it until it is over, or another process does."""
        checking = asyncio.create_task(self._check())
        try:
            while True:
                self._awake.clear()
                pause = await self._tried()
                with suppress(TimeoutError):
                    async with asyncio.timeout(pause):
                        await self._awake.wait()
        except Deposed:
            pass
        finally:
            tasks = [checking, *self._departures.values(), *filter(None, [self._looking])]
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks)
            self._tell()

    async def _tried(self) -> float:
        """One step, whatever it meets; how long to wait then."""
        try:
            return await self._step()
        except Conflict:
            self._read_at = 0.0
            return SOON
        except (AEnvError, TimeoutError) as exc:
            log.warning("service %s could not be looked after: %s", self.record.id, exc or "it took too long")
        except Deposed:
            raise
        except Exception:
            log.exception("service %s could not be looked after", self.record.id)
        self._read_at = 0.0
        return _AGAIN

    async def _step(self) -> float:
        await self._read()
        seen = {member.id: await self._seen(member) for member in self.record.members}
        await self._change(lambda record: self._settled(record, seen))
        self._forget()
        if self.record.deleted and not self.record.members:
            await self._finish()
        for member in self.record.members:
            if member.phase is Phase.LEAVING and member.id not in self._departures:
                self._departures[member.id] = asyncio.create_task(self._depart(member))
        for member in [one for one in self.record.members if one.phase is Phase.DOWN]:
            if self._due.get(member.id, 0.0) <= steady():
                await self._restart(member)
        while next_moves(self.record).start:  # each is admitted for itself
            await self._start(self.record.plan, None)
        if self.record.good is not None and not is_updating(self.record) and is_done(self.record):
            self._call_token = ""  # nothing is to be fetched any more
        busy = any(member.phase in (Phase.STARTING, Phase.LEAVING) for member in self.record.members)
        nearest = min(self._due.values(), default=steady() + LOOK) - steady()
        return min(SOON if busy else LOOK, max(nearest, 0.02))

    async def _read(self) -> None:
        """Take what others have written meanwhile."""
        if steady() < self._read_at + LOOK:
            return
        known = self._kept
        found = await self._site.records.get(self.record.id)
        is_recent = steady() - self._found_at < KEPT_FOR / 2  # else it may have been over meanwhile, and be forgotten
        if is_recent and not known.record.over and (found is None or found.revision < known.revision):
            log.warning("the store has lost what was written of service %s; it is written again", self.record.id)
            found = self._kept = await self._site.records.write_again(known.record, found)
        if found is None or found.record.keeper != self._site.lives.peers.me.boot or found.record.over:
            if found is not None:
                self._take(found)
            raise Deposed
        self._read_at = self._found_at = steady()
        if found.revision != known.revision:
            self._take(found)

    async def _change(self, mutation: Mutation, *more: Change) -> None:
        """Write a change down, on what the store has; ``Conflict`` when somebody else was faster."""
        changed = mutation(self.record)
        if changed == self.record and not more:
            return
        changed = msgspec.structs.replace(changed, updated_at=self._site.lives.clock.now())
        revisions = await self._site.records.write(put(changed, self._kept.revision), *more)
        self._take(Kept(changed, revisions[0]))

    def _take(self, kept: Kept) -> None:
        if kept.revision < self._kept.revision:
            return
        self._kept = kept
        self._show()
        self._tell()

    def _show(self) -> None:
        self.replicas = shares.replicas(self.record, self._token, self._site.lives.peers, self._lost)

    def _tell(self) -> None:
        if not self._news.done():
            self._news.set_result(None)
        self._news = asyncio.get_running_loop().create_future()

    def _forget(self) -> None:
        """What is known of replicas that are no more."""
        ids = {member.id for member in self.record.members}
        self._health.keep(ids)
        self._lost &= ids
        self._quiet &= ids
        self._due = {id: due for id, due in self._due.items() if id in ids}
        self._ready_since = {id: since for id, since in self._ready_since.items() if id in ids}
        self._departures = {id: task for id, task in self._departures.items() if id in ids or not task.done()}

    # How each replica is

    async def _seen(self, member: Member) -> Member | None:
        """A replica as it is now; None when it has left."""
        if member.phase is Phase.LEAVING:
            departure = self._departures.get(member.id)
            if departure is None or not departure.done():
                return _replace(member, closed=True) if member.id in self._quiet else member
            if departure.exception() is None:
                return None
            del self._departures[member.id]  # once more
            return member
        if member.phase is Phase.DOWN:
            return member
        entry = await self._entry(member)
        record = entry.record if isinstance(entry, Entry) else entry
        if record.over:
            return self._down(member, record)
        if not isinstance(entry, Entry) or entry.place is None:
            reason = self._waits_for(member, record) or (member.reason if member.failures else "")  # why it failed
            return _replace(member, phase=Phase.STARTING, reason=reason[:_LONGEST_REASON])
        if self._health.is_over(member.id):
            await self._site.lives.end(entry, State.FAILED, self._health.reason(member.id))
            return self._down(member, entry.kept.record)
        reason = self._health.reason(member.id)
        since = self._ready_since.setdefault(member.id, steady())
        return _replace(
            member,
            phase=Phase.UNWELL if reason else Phase.READY,
            url=entry.place.url,
            reason=reason,
            failures=0 if steady() - since > WELL and not reason else member.failures,
        )

    def _waits_for(self, member: Member, record: InstanceRecord) -> str:
        """Why a replica does not run yet. Of one in the queue it is said why it is there, and not every place."""
        if record.queued is None:
            return record.reason
        if member.reason.startswith(REASON):
            return member.reason
        standing = self._site.lives.queue.standing(record)
        return record.reason if standing is None else standing.reason

    async def _entry(self, member: Member) -> Entry | InstanceRecord:
        """A replica that lives here, or else its record."""
        lives = self._site.lives
        if entry := lives.entries.get(member.id) or lives.unwritten.get(member.id):
            return entry.record if entry.record.over else entry
        kept = await lives.records.get(member.id)
        if kept is None:
            return lost(self.record, member, lives.clock.now())
        record = kept.record
        if record.over:
            return record
        if entry := lives.entries.get(member.id):
            return entry
        if record.server != lives.name:
            over = lives.over(State.FAILED, "its server is gone")(record) or record
            await lives.records.save(kept, over)
            return over
        return lives.adopt(kept) if record.status is State.RUNNING else record

    def _down(self, member: Member, over: InstanceRecord) -> Member:
        """A replica that has ended."""
        plan = plan_of(self.record, member)
        failures = member.failures + 1
        if plan is not None and not over.ran and over.phases.get("engine", 0.0) >= _MOST * plan.startup_timeout:
            failures = max(failures, TRIES)  # it had all the time that there is
        self._due[member.id] = steady() + pause_after(failures)
        self._ready_since.pop(member.id, None)
        self._dead.append(member.id)
        reason = (over.reason or "it ended")[:_LONGEST_REASON]
        return _replace(member, phase=Phase.DOWN, url="", failures=failures, reason=reason)

    async def _check(self) -> None:
        """Look at the health of those that run, again and again."""
        while True:
            await asyncio.sleep(HEALTH)
            entries = self._site.lives.entries
            running = [member.id for member in self.record.members if member.phase in (Phase.READY, Phase.UNWELL)]
            found = [entry for id in running if (entry := entries.get(id)) and entry.place]
            for seen in await asyncio.gather(*(self._checked(entry) for entry in found), return_exceptions=True):
                if isinstance(seen, Exception):
                    log.error("service %s: a replica could not be checked", self.record.id, exc_info=seen)

    async def _checked(self, entry: Entry) -> None:
        if entry.place is None:
            return
        before = self._health.reason(entry.id)
        seen = await health.look(entry.place)
        self._health.note(entry.id, entry.hide(seen.reason))
        if seen.reason:
            with suppress(AEnvError):
                await self._site.lives.look(entry, _ASKING)
        if self._health.reason(entry.id) != before or self._health.is_over(entry.id):
            self._awake.set()

    # What is to be done

    def _settled(self, record: ServiceRecord, seen: dict[str, Member | None]) -> ServiceRecord:
        """The record with its replicas as they are, and with those leaving that should."""
        members = [found for one in record.members if (found := seen.get(one.id, one)) is not None]
        record = _with(record, members)
        if is_updating(record) and (failed := given_up(record)):
            record = rolled_back(record, failed)
        if is_done(record) and record.wanted:
            record = msgspec.structs.replace(record, good=record.plan)
        leave = set(next_moves(record).leave)
        kept = [one for one in record.members if one.id not in leave or one.phase is not Phase.DOWN]
        return _with(record, [_replace(one, phase=Phase.LEAVING) if one.id in leave else one for one in kept])

    async def _restart(self, member: Member) -> None:
        """Start another replica in the place of one that failed."""
        plan = plan_of(self.record, member)
        if plan is None:
            await self._change(lambda record: _with(record, [one for one in record.members if one.id != member.id]))
            return
        if self.record.volume is not None:  # which only one may have
            await self._site.lives.endings.wait(member.id)
        await self._start(plan, member)

    async def _start(self, plan: Plan, instead: Member | None) -> None:
        """Start a replica, in the place of one or beside those that there are."""
        record, lives = self.record, self._site.lives
        now = lives.clock.now()
        made = instance_of(record, plan, lives.name, now)
        member = Member(
            id=made.id,
            generation=plan.generation,
            phase=Phase.STARTING,
            created_at=now,
            restarts=0 if instead is None else instead.restarts + 1,
            failures=0 if instead is None else instead.failures,
            reason="" if instead is None else instead.reason,
        )
        changed = msgspec.structs.replace(_placed(record, member, instead), updated_at=now)
        self._read_at = 0.0
        try:
            await lives.begin([made], [put(changed, self._kept.revision)], self._call_token, self._caller)
        except NetworkError:
            raise
        except AEnvError as exc:
            if isinstance(exc, Conflict) and not isinstance(exc, Full):
                raise
            await self._refused(member, instead, exc)
        else:
            await self._read()

    async def _refused(self, member: Member, instead: Member | None, exc: AEnvError) -> None:
        """It may not be made: tried again later, as if it had failed."""
        failures = member.failures + 1
        self._due[member.id] = steady() + pause_after(failures)
        reason = exc.message if exc.hint is None else f"{exc.message} ({exc.hint})"
        down = _replace(member, phase=Phase.DOWN, failures=failures, reason=reason[:_LONGEST_REASON])
        await self._change(lambda record: _placed(record, down, instead))

    async def _depart(self, member: Member) -> None:
        """End a replica when every gateway has heard that it leaves, and its calls are over."""
        try:
            entry = await self._entry(member)
            if isinstance(entry, Entry):
                await self._drained(entry)
                why = "its service was deleted" if self.record.deleted else "its service has no more use for it"
                await self._site.lives.end(entry, State.TERMINATED, why)
            elif not entry.over:
                raise Conflict("another process is just starting it")
            await self._site.lives.endings.wait(member.id)
        except AEnvError as exc:
            log.warning("replica %s has not left: %s", member.id, exc)
            await asyncio.sleep(_AGAIN)
            raise
        finally:
            self._awake.set()

    async def _drained(self, entry: Entry) -> None:
        """Wait until a replica has no calls: none that are new, at first, and then none of its sessions, whose clients
        begin new ones elsewhere."""
        if entry.place is None:
            return
        heard = SOONER if self.record.deleted or self.record.volume is not None else HEARD
        alone = not self._site.lives.peers.others
        await asyncio.sleep(heard / 3 if alone else heard)
        await self._silence(entry, SESSIONS)
        self._quiet.add(entry.id)
        self._awake.set()
        while any(member.id == entry.id and not member.closed for member in self.record.members):
            await self.news(LOOK)
        if not alone:
            await asyncio.sleep(heard)
        await self._silence(entry, LAST if self.record.deleted else DRAIN)

    async def _silence(self, entry: Entry, patience: float) -> None:
        """Wait until a replica has no calls, on two looks: one that was just sent, or just answered, is seen by the
        second."""
        deadline, silent = steady() + patience, 0
        while entry.place is not None and silent < 2 and steady() < deadline:
            seen = await health.look(entry.place, _ASKING)
            silent = silent + 1 if seen.calls == 0 else 0
            if seen.calls is None:
                await self._site.lives.look(entry, _ASKING)
            await asyncio.sleep(SOON)

    async def _finish(self) -> None:
        """Nobody is left: let go of the storage, or remove it, and write down that all is over."""
        record = self.record
        for id in self._dead:
            self._site.lives.endings.begin(id)
        more: list[Change] = []
        if record.volume is not None:
            owner, name = record.volume.owner, record.volume.name
            storage = await self._site.records.storage(owner, name)
            if storage is not None and storage.record.service == record.id:
                if record.delete_storage:
                    await remove_storage(self._site.lives, owner, name)
                more = [drop_storage(storage) if record.delete_storage else free_storage(storage)]
        await self._change(lambda found: msgspec.structs.replace(found, over=True), *more)
        raise Deposed


async def remove_storage(lives: Lives, owner: str, name: str) -> None:
    """Have the engine remove storage, where it keeps any."""
    with suppress(Unsupported):
        async with asyncio.timeout(ENGINE):
            await lives.engine.delete_volume(owner, name)


def _placed(record: ServiceRecord, member: Member, instead: Member | None) -> ServiceRecord:
    """The record with one more replica, or with another one."""
    if instead is None:
        return _with(record, [*record.members, member])
    return _with(record, [member if one.id == instead.id else one for one in record.members])


def _with(record: ServiceRecord, members: list[Member]) -> ServiceRecord:
    return msgspec.structs.replace(record, members=members)


def _replace(member: Member, **changes: object) -> Member:
    return msgspec.structs.replace(member, **changes)
