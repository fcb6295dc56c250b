"""What goes on by itself: instances whose time is over end, what other servers did is learned, what is written down and
what lives is made to agree, and records of what has ended are forgotten.

Whoever ends an instance changes its record first, on the revision that was seen; so of several servers one does it,
and an instance that was extended meanwhile is let live. Each server of a name knows all instances of it, from what was
changed in the store in the last second: so any of them ends what is over, and goes on with what one that is gone had
begun. Instances of another name are touched only when no server of it was heard of for a while: a wall clock that is
wrong here ends nothing there.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Coroutine, Iterable
from contextlib import suppress
from typing import Any

import msgspec

from aenv.api.clock import steady
from aenv.api.lives import ENGINE, SERVER, Entry, Lives
from aenv.api.peers import BEAT, LATE
from aenv.api.records import InstanceRecord, Kept
from aenv.errors import AEnvError, Conflict
from aenv.models import Sandbox, State

log = logging.getLogger("aenv.api")

SWEEP = 30.0
"""Seconds between two comparisons of what is written down with what lives."""
KEPT_FOR = 3600.0
"""Seconds that the record of an instance outlives it."""
SILENT = 4 * SWEEP
"""Seconds after which a server that was not heard of is taken not to look after its instances any more."""
_LOOK = 5.0
"""Most seconds between two looks at the clock."""
_SHORTEST = 0.02
_LATE = 2.0
"""Seconds that a look at the clock may come too late before it is plain that this process did not run."""
_AGAIN = 1.0
"""Seconds until something that failed is tried again."""
_BATCH = 100
"""Records that are written at once, and sandboxes that are looked at."""
_NEWS = 2.5 * BEAT
"""Seconds until what one server heard of a client is known to all."""


class Reaper:
    """Looks after the instances of one server, and at the records of all."""

    def __init__(self, lives: Lives) -> None:
        self._lives = lives
        self._peers = lives.peers
        self._tasks: list[asyncio.Task[None]] = []
        self._expiring: dict[str, asyncio.Task[None]] = {}
        self._ending: set[asyncio.Task[None]] = set()
        """Ends by other servers that are followed here."""
        self._begun: dict[str, Kept] = {}
        """What another server of this name is making, or nobody is."""
        self._revision: int | None = None
        """Up to here, what was changed in the store is known."""
        self._followed = 0.0
        self._learning = asyncio.Lock()
        """One at a time takes in what it read, so that nothing comes back that has ended since."""

    async def start(self, patience: float) -> None:
        """Take in what lives, as far as that is done within so many seconds; the rest follows."""
        try:
            async with asyncio.timeout(patience):
                await self._lives.queue.recount()
                await self.sweep(first=True)
        except TimeoutError:
            log.warning("not everything that lives was looked at within %g s; that goes on", patience)
        except AEnvError as exc:
            log.warning("what lives could not be looked at yet: %s", exc)
        self._tasks = [asyncio.create_task(self._expire()), asyncio.create_task(self._repeat())]
        if self._lives.records.shared:
            self._tasks.append(asyncio.create_task(self._follow()))

    async def close(self) -> None:
        for task in (tasks := [*self._tasks, *self._expiring.values(), *self._ending]):
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)
        with suppress(AEnvError):
            await self.write()

    # Time

    async def _expire(self) -> None:
        lives = self._lives
        while True:
            lives.changed.clear()
            now = lives.clock.now()
            nearest = now + _LOOK
            for entry in list(lives.entries.values()):
                if (deadline := entry.deadline(now, self._late)) > now:
                    nearest = min(nearest, deadline)
                elif entry.id not in self._expiring:
                    self._expiring[entry.id] = asyncio.create_task(self._end(entry))
            lives.nearest = nearest
            pause = max(nearest - now, _SHORTEST)
            awake_at = steady() + pause
            with suppress(TimeoutError):
                async with asyncio.timeout(pause):
                    await lives.changed.wait()
            if (late := steady() - awake_at) > _LATE:
                self._was_away(late)

    @property
    def _late(self) -> float:
        """Seconds by which news of a client may be late: for ever, while it is not known what other servers hear."""
        return math.inf if self._is_behind else self._lives.late

    @property
    def _is_behind(self) -> bool:
        """Whether it is not known what other servers hear, nor whether there are any by now."""
        return self._lives.records.shared and steady() - self._followed > LATE

    def _was_away(self, seconds: float) -> None:
        """This process was stopped, or its machine slept, and heard nobody: as after a restart, leases begin anew."""
        log.warning("this server did not run for %.1f s; clients have their leases anew", seconds)
        now = self._lives.clock.now()
        for entry in self._lives.entries.values():
            entry.heard(now)

    async def _end(self, entry: Entry) -> None:
        """End one whose time is over, beside the others."""
        lives = self._lives

        def due() -> bool:
            return entry.deadline(now := lives.clock.now(), self._late) <= now

        try:
            reason = over_since(entry.record, lives.clock.now())
            await lives.end(entry, State.TERMINATED, reason, due=due)
        except AEnvError as exc:
            log.warning("%s is over, and did not end: %s", entry.id, exc)
            await asyncio.sleep(_AGAIN)
        except Exception:
            log.exception("%s is over, and did not end", entry.id)
            await asyncio.sleep(_AGAIN)
        finally:
            del self._expiring[entry.id]
            self._lives.changed.set()

    # What only this process knows is written down

    async def _repeat(self) -> None:
        sweep_at = steady() + SWEEP
        while True:
            await asyncio.sleep(_LOOK)
            if not self._peers.others:  # else it is done more often
                await _try(self.write(), "what changed could not be written down")
            if steady() >= sweep_at:
                await _try(self.sweep(), "what lives could not be looked at")
                sweep_at = steady() + SWEEP

    async def write(self) -> None:
        """Write down ends that the store did not take, leases that were renewed, and times that moved."""
        await self._write_ends()
        stale = [entry for entry in self._lives.entries.values() if _is_stale(entry)]
        for start in range(0, len(stale), _BATCH):
            await self._write_times(stale[start : start + _BATCH])

    async def _write_ends(self) -> None:
        lives = self._lives
        for id, entry in list(lives.unwritten.items()):
            while True:
                try:
                    await lives.records.save(entry.kept, entry.record)
                    break
                except Conflict:
                    found = await lives.records.get(id)
                    if found is None or found.record.over:
                        break
                    entry.kept = found
            del lives.unwritten[id]

    async def _write_times(self, entries: list[Entry]) -> None:
        changed = [(entry, entry.shift, entry.record) for entry in entries]
        try:
            found = await self._lives.records.save_all([(entry.kept, record) for entry, _, record in changed])
        except Conflict:  # one of them; each by itself, then
            for entry in entries:
                with suppress(AEnvError):
                    await self._lives.change(entry, lambda record: None if record.over else record)
            return
        for (entry, shift, _), kept in zip(changed, found, strict=True):
            entry.wrote(kept, shift)

    # What other servers did

    async def _follow(self) -> None:
        while True:
            await asyncio.sleep(BEAT)
            await _try(self.follow(), "what other servers did could not be read")

    async def follow(self) -> None:
        """Say that this server is there, learn what others did, and go on with what those that are gone had begun."""
        lives = self._lives
        if self._peers.others:
            await self.write()  # they may be the ones to end it
        await self._heard_of()
        while self._revision is not None:
            async with self._learning:
                found, last = await lives.records.since(self._revision)
                for kept in found:
                    self._changed(kept)
                if last == self._revision:
                    break
                self._revision = last
        if self._is_behind:
            log.warning("what other servers heard was not known for a while; clients have their leases anew")
            now = lives.clock.now()
            for entry in lives.entries.values():
                entry.heard(now)
        self._followed = steady()
        await self._go_on()

    async def _heard_of(self) -> None:
        """Say that this server is there, and hear of the others."""
        revision = await self._peers.beat()
        if self._revision is None and self._lives.records.shared:
            self._revision, self._followed = revision, steady()
        self._lives.late = _NEWS if self._peers.others else 0.0

    def _changed(self, kept: Kept) -> None:
        """A record as it is in the store now."""
        lives, record = self._lives, kept.record
        self._begun.pop(record.id, None)
        if record.over:
            entry = lives.entries.get(record.id)
            if entry is not None and kept.revision >= entry.kept.revision:
                task = asyncio.create_task(_try(self._ended(entry, kept), f"{record.id} could not be ended"))
                self._ending.add(task)
                task.add_done_callback(self._ending.discard)
            elif entry is None:
                for tell in lives.missed:
                    tell(record)
        elif record.server == lives.name:
            self._mine(kept)

    def _mine(self, kept: Kept) -> None:
        """One of this server's, or of another one of the same name, that is not over."""
        lives, record = self._lives, kept.record
        entry = lives.entries.get(record.id)
        if entry is not None and entry.kept.record.warm and not record.warm:
            del lives.entries[record.id]  # another server claimed it
            entry = None
        if entry is not None:
            if kept.revision > entry.kept.revision:
                lives.refresh(entry, kept)
                lives.changed.set()
        elif record.id in lives.unwritten:
            return
        elif record.status is State.RUNNING:
            entry = lives.adopt(kept)
            if record.lease and record.lease_until and any(peer.name == lives.name for peer in self._peers.others):
                # Somebody was there to hear its client, and wrote that down, but for the last tenth.
                entry.lease_until = min(entry.lease_until or 0.0, record.lease_until + record.lease / 10)
                lives.changed.set()
        elif record.by != self._peers.me.boot or lives.clock.now() - record.updated_at > SWEEP:
            self._begun[record.id] = kept  # or this one, which never heard that the store took it

    async def _go_on(self) -> None:
        """Make what servers that are gone had begun to."""
        me = self._peers.me.boot
        gone = [kept for kept in self._begun.values() if kept.record.by == me or not self._peers.alive(kept.record.by)]
        await _each(self._resume(kept) for kept in gone)

    async def _resume(self, kept: Kept) -> None:
        lives, id = self._lives, kept.record.id
        self._begun.pop(id, None)
        mine = msgspec.structs.replace(kept.record, by=self._peers.me.boot)
        try:
            claimed = await lives.records.save(kept, mine)
        except Conflict:
            return  # another one has, or it has ended
        log.info("going on to make %s, which a server that is gone had begun", id)
        lives.resume(claimed)

    # What is written down and what lives is made to agree

    async def sweep(self, *, first: bool = False) -> None:
        """Compare records with sandboxes, both ways, and forget what is long over."""
        await self._heard_of()
        await self._read(first)
        await self._go_on()
        async with asyncio.timeout(ENGINE):
            sandboxes = await self._lives.engine.find({SERVER: self._lives.name})
        alive = {sandbox.id for sandbox in sandboxes if not sandbox.state.over}
        entries = self._lives.entries.values()
        lost = [one for one in entries if one.kept.record.status is State.RUNNING and one.id not in alive]
        await _each(self._lives.look(entry) for entry in lost)
        await _each(self._stray(sandbox) for sandbox in sandboxes if sandbox.id not in self._lives.entries)
        await _try(self._lives.families.orphans(), "parts of instances could not be looked at")
        await self._lives.queue.tidy()

    async def _read(self, first: bool) -> None:
        """Go through all records."""
        lives = self._lives
        before, ended = dict(lives.entries), []
        async for kept in lives.records.scan():
            record, now = kept.record, lives.clock.now()
            before.pop(record.id, None)
            if record.over:
                if now - record.updated_at > KEPT_FOR:
                    with suppress(Conflict):
                        await lives.records.remove(kept)
                elif entry := lives.entries.get(record.id):
                    ended.append((entry, kept))
            elif record.server == lives.name:
                await self._known(kept, first)
            elif self._peers.silence(record.server) > SILENT and record.deadline + SWEEP < now:
                await self._inherited(kept, now)
        await _each(self._ended(entry, kept) for entry, kept in ended)
        for entry in before.values():
            if entry.id in lives.entries and (entry.starting is None or entry.starting.done()):
                await self._forgotten(entry)

    async def _known(self, kept: Kept, first: bool) -> None:
        """Take in one of this name, as it is now: it may have ended since it was read."""
        entry = self._lives.entries.get(kept.record.id)
        if entry is not None and entry.kept.revision >= kept.revision:
            return
        async with self._learning:
            found = kept if first else await self._lives.records.get(kept.record.id)
            if found is not None and not found.record.over:
                self._mine(found)

    async def _ended(self, entry: Entry, kept: Kept) -> None:
        """One of this server's that another one ended. Where both have one engine, the other one has ended its sandbox,
        or left that to be read; but for one that is only being made here."""
        entry.refresh(kept)
        is_made = entry.starting is None or entry.starting.done()
        is_theirs = self._lives.engine.shared and kept.record.by == self._lives.name and is_made
        await self._lives.end(entry, kept.record.status, kept.record.reason, leave=is_theirs)

    async def _inherited(self, kept: Kept, now: float) -> None:
        """End what a server that is gone did not."""
        record = kept.record
        ended = self._lives.over(State.TERMINATED, over_since(record, now))(record)
        if ended is not None:
            with suppress(Conflict):
                await self._lives.records.save(kept, ended)
                self._lives.endings.begin(record.id)

    async def _forgotten(self, entry: Entry) -> None:
        """The store may have lost the record of an instance that lives: what is known here is written anew."""
        if await self._lives.records.get(entry.id) is None and entry.id in self._lives.entries:
            log.warning("the store has lost the record of %s; it is written again", entry.id)
            await self._lives.change(entry, lambda record: None if record.over else record)

    async def _stray(self, sandbox: Sandbox) -> None:
        """A sandbox that lives, and ought not to. Records precede sandboxes: what has none now never will."""
        kept = await self._lives.records.get(sandbox.id)
        if kept is None or (kept.record.over and not sandbox.state.over):
            if not sandbox.state.over:
                log.info("%s lives, and %s; it is ended", sandbox.id, "has no record" if kept is None else "is over")
            self._lives.endings.begin(sandbox.id)


def over_since(record: InstanceRecord, now: float) -> str:
    """Why an instance is over, when its time is."""
    if record.queued is not None and (record.expires_at <= now or record.lease is None):
        return f"it waited in the queue for {now - record.queued:.0f} s, and there was no room"
    if record.lacks_room and record.expires_at <= now:
        return f"there was no room for it: {record.reason}"
    if record.expires_at <= now or record.lease is None:
        return f"its time to live of {record.ttl:g} s is over"
    return f"its client was not heard of for {record.lease:g} s"


def _is_stale(entry: Entry) -> bool:
    written = entry.kept.record
    if entry.shift:
        return True
    if entry.lease_until is None or written.lease is None:
        return False
    return entry.lease_until - (written.lease_until or 0.0) > written.lease / 10


async def _each(work: Iterable[Coroutine[Any, Any, Any]]) -> None:
    """Do all of this, some of it at a time; what fails is tried at the next sweep."""
    room = asyncio.Semaphore(_BATCH)

    async def one(part: Coroutine[Any, Any, Any]) -> None:
        async with room:
            await _try(part, "an instance could not be looked at")

    async with asyncio.TaskGroup() as group:
        for part in work:
            group.create_task(one(part))


async def _try(work: Coroutine[Any, Any, Any], what: str) -> None:
    try:
        await work
    except (AEnvError, TimeoutError) as exc:
        log.warning("%s: %s", what, exc or "it took too long")
    except Exception:
        log.exception("%s", what)
