"""What goes on by itself: instances whose time is over end, what is written down and what lives is made to agree, and
records of what has ended are forgotten.

Whoever ends an instance changes its record first, on the revision that was seen; so of several servers one does it,
and an instance that was extended meanwhile is let live. A server looks after its own. Instances of another name are
touched only when that server has not been heard of for a while, by a clock of ours that nobody sets: a wall clock that
is wrong here ends nothing there.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine, Iterable
from contextlib import suppress
from typing import Any

from aenv.api.clock import steady
from aenv.api.lives import ENGINE, SERVER, Entry, Lives
from aenv.api.records import InstanceRecord, Kept, put
from aenv.errors import AEnvError, Conflict
from aenv.models import Sandbox, State
from aenv.store import Put, Store

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
_HEARTBEAT = "server"
_REMEMBERED = 24 * 3600.0
"""Seconds that a server's name is kept after it was last heard of."""


class Reaper:
    """Looks after the instances of one server, and at the records of all."""

    def __init__(self, lives: Lives, store: Store) -> None:
        self._lives = lives
        self._store = store
        self._tasks: list[asyncio.Task[None]] = []
        self._expiring: dict[str, asyncio.Task[None]] = {}
        self._others: dict[str, tuple[int, float]] = {}
        """The last heartbeat of each other server: its revision, and when it was first seen."""

    async def start(self, patience: float) -> None:
        """Take in what lives, as far as that is done within so many seconds; the rest follows."""
        try:
            async with asyncio.timeout(patience):
                await self.sweep(first=True)
        except TimeoutError:
            log.warning("not everything that lives was looked at within %g s; that goes on", patience)
        except AEnvError as exc:
            log.warning("what lives could not be looked at yet: %s", exc)
        self._tasks = [asyncio.create_task(self._expire()), asyncio.create_task(self._repeat())]

    async def close(self) -> None:
        for task in (tasks := [*self._tasks, *self._expiring.values()]):
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
                if (deadline := entry.deadline(now)) > now:
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

    def _was_away(self, seconds: float) -> None:
        """This process was stopped, or its machine slept, and heard nobody: as after a restart, leases begin anew."""
        log.warning("this server did not run for %.1f s; clients have their leases anew", seconds)
        now = self._lives.clock.now()
        for entry in self._lives.entries.values():
            entry.heard(now)

    async def _end(self, entry: Entry) -> None:
        """End one whose time is over, beside the others."""
        clock = self._lives.clock
        try:
            reason = over_since(entry.record, clock.now())
            await self._lives.end(
                entry, State.TERMINATED, reason, due=lambda: entry.deadline(now := clock.now()) <= now
            )
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
            ended = entry.kept.record
            while True:
                try:
                    await lives.records.save(entry.kept, ended)
                    break
                except Conflict:
                    found = await lives.records.get(id)
                    if found is None or found.record.over:
                        break
                    entry.kept = Kept(ended, found.revision)
            del lives.unwritten[id]

    async def _write_times(self, entries: list[Entry]) -> None:
        changed = [(entry, entry.shift, entry.record) for entry in entries]
        puts = [put(record, entry.kept.revision) for entry, _, record in changed]
        try:
            revisions = await self._lives.records.write(*puts)
        except Conflict:  # one of them; each by itself, then
            for entry in entries:
                with suppress(AEnvError):
                    await self._lives.change(entry, lambda record: None if record.over else record)
            return
        for (entry, shift, record), revision in zip(changed, revisions, strict=True):
            entry.kept = Kept(record, revision)
            entry.shift -= shift

    # What is written down and what lives is made to agree

    async def sweep(self, *, first: bool = False) -> None:
        """Compare records with sandboxes, both ways, and forget what is long over."""
        silent = await self._silent()
        await self._read(silent, first)
        async with asyncio.timeout(ENGINE):
            sandboxes = await self._lives.engine.find({SERVER: self._lives.name})
        found = {sandbox.id: sandbox for sandbox in sandboxes}
        await _each(self._lost(entry, found) for entry in list(self._lives.entries.values()))
        await _each(self._stray(sandbox) for sandbox in sandboxes if sandbox.id not in self._lives.entries)

    async def _silent(self) -> set[str]:
        """Say that this server is there; the names of those that are not."""
        now, lives = steady(), self._lives
        expires_at = lives.clock.now() + _REMEMBERED
        await self._store.change(Put(_HEARTBEAT, lives.name, b"{}", expires_at=expires_at))
        heard = {}
        async for record in self._store.scan(_HEARTBEAT):
            if record.key != lives.name:
                revision, since = self._others.get(record.key, (0, now))
                heard[record.key] = (record.revision, since if record.revision == revision else now)
        for name, (_, since) in self._others.items():
            heard.setdefault(name, (0, since))
        self._others = heard
        return {name for name, (_, since) in heard.items() if now - since > SILENT}

    async def _read(self, silent: set[str], first: bool) -> None:
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
                await self._mine(kept, first, now)
            elif record.server not in self._others:
                self._others[record.server] = (0, steady())  # it was never heard of, as far as is known
            elif record.server in silent and record.deadline + SWEEP < now:
                await self._inherited(kept, now)
        await _each(self._ended(entry, kept) for entry, kept in ended)
        for entry in before.values():
            if entry.id in lives.entries and (entry.starting is None or entry.starting.done()):
                await self._forgotten(entry)

    async def _mine(self, kept: Kept, first: bool, now: float) -> None:
        """One of this server's, or of another one of the same name, that is not over."""
        lives, id = self._lives, kept.record.id
        if entry := lives.entries.get(id):
            if kept.revision > entry.kept.revision:
                lives.refresh(entry, kept)
                lives.changed.set()
            return
        found = kept if first else await lives.records.get(id)  # it may have ended since it was read
        if found is None or found.record.over or id in lives.entries or id in lives.unwritten:
            return
        if found.record.status is State.RUNNING:
            lives.adopt(found)
        elif first or now - found.record.updated_at > 2 * SWEEP:
            log.info("going on to make %s", id)
            lives.resume(found)

    async def _ended(self, entry: Entry, kept: Kept) -> None:
        """One of this server's that another one ended."""
        entry.refresh(kept)
        await self._lives.end(entry, kept.record.status, kept.record.reason)

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

    async def _lost(self, entry: Entry, found: dict[str, Sandbox]) -> None:
        """A record that says that it runs, of something that does not."""
        if entry.kept.record.status is not State.RUNNING:
            return
        sandbox = found.get(entry.id)
        if sandbox is None or sandbox.state.over:
            await self._lives.look(entry)

    async def _stray(self, sandbox: Sandbox) -> None:
        """A sandbox that lives, and ought not to. Records precede sandboxes: what has none now never will."""
        kept = await self._lives.records.get(sandbox.id)
        if kept is None or (kept.record.over and not sandbox.state.over):
            if not sandbox.state.over:
                log.info("%s lives, and %s; it is ended", sandbox.id, "has no record" if kept is None else "is over")
            self._lives.endings.begin(sandbox.id)


def over_since(record: InstanceRecord, now: float) -> str:
    """Why an instance is over, when its time is."""
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


async def _each(work: Iterable[Coroutine[Any, Any, None]]) -> None:
    """Do all of this, some of it at a time; what fails is tried at the next sweep."""
    room = asyncio.Semaphore(_BATCH)

    async def one(part: Coroutine[Any, Any, None]) -> None:
        async with room:
            await _try(part, "an instance could not be looked at")

    async with asyncio.TaskGroup() as group:
        for part in work:
            group.create_task(one(part))


async def _try(work: Coroutine[Any, Any, None], what: str) -> None:
    try:
        await work
    except (AEnvError, TimeoutError) as exc:
        log.warning("%s: %s", what, exc or "it took too long")
    except Exception:
        log.exception("%s", what)
