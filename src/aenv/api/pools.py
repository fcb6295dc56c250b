"""Warm pools: sandboxes that wait for an owner's next creates of an environment, made before anybody asks.

A pool belongs to one owner and one package, since what an owner's sandboxes are forked from is shared by nobody else.
It begins with the first create of an environment whose ``deployConfig.pool.max`` is over 0, and has as many as recent
creates say (``demand``), between ``min`` and ``max``. After an hour without a create it ends. Each that waits is looked
at every few seconds, and is thrown away when it does not answer, and when it is an hour old.

A create that fits takes one: the warm record becomes the record of the instance, in the change that would have written
that one anew, so of several servers one gets it. Then the sandbox is told what it is. One that was taken is never put
back, and one that turns out to be gone is replaced by a new sandbox under the same id.

Warm ones are charged to nobody, and in nobody's way: they are not made while others start or wait, nor where they would
take what the platform or their owner has left, and are ended when that becomes less.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections import Counter
from collections.abc import Callable, Coroutine, Sequence
from contextlib import suppress
from typing import Any

import msgspec

from aenv.api.admission import environment
from aenv.api.charges import KIND, PLATFORM, WAITING
from aenv.api.clock import steady
from aenv.api.demand import FORGOTTEN
from aenv.api.entry import Entry
from aenv.api.gateway.places import Place
from aenv.api.lives import Lives
from aenv.api.quotas import Quotas
from aenv.api.records import InstanceRecord, Wanted
from aenv.api.specialising import Gone, look, specialised
from aenv.api.stock import Claim, Key, Ready, Stock
from aenv.auth.callers import Caller, Scope
from aenv.engines.base import Engine, new_id
from aenv.errors import AEnvError, Conflict
from aenv.models import Sandbox, SandboxSpec, State
from aenv.store import Change, Store
from aenv.web.routes import Call, Paged, Route
from aenv.wire import PAGE, Pool

log = logging.getLogger("aenv.api")

AGE = 3600.0
"""Seconds that a sandbox waits at most."""
CHECK = 5.0
"""Seconds between two looks at one that waits."""
AT_ONCE = 4
"""Sandboxes that are made warm at the same time."""
MOST_EACH, MOST = 100, 500
"""Sandboxes that wait at one server, of one owner and of all."""
MOST_POOLS = 1000
_TICK, _PAUSE = 1.0, 0.05
"""Seconds between two looks at the pools, when nothing happens, and at least."""
_YIELD = 1.0
"""Seconds for which a warm one waits until those have started that somebody waits for."""
_BACKOFF, _LONGEST_BACKOFF = 1.0, 300.0
_TRIES = 3

More = Callable[[Sequence[InstanceRecord]], Sequence[Change]]
"""From the records of a request to what else is to be written with them."""
Room = Callable[[str, Stock], float]
"""How many more instances of a pool a subject may have."""


class Pools:
    """The warm sandboxes of one server, and of those that share its engine."""

    def __init__(self, lives: Lives, quotas: Quotas, store: Store) -> None:
        self._lives = lives
        self._quotas = quotas
        self._store = store
        self._pools: dict[Key, Stock] = {}
        self._claimed: dict[str, Place] = {}
        """Where those are that were taken and are not told yet."""
        self._running: asyncio.Task[None] | None = None
        self._work: set[asyncio.Task[Any]] = set()
        self._making = 0
        self._checking: set[str] = set()
        self._woken = asyncio.Event()
        self._usable = _has_update(lives.engine)
        """Whether the engine can do this, as far as is known."""
        lives.specialise = self.specialise
        lives.listeners.append(self._ended)

    def start(self) -> None:
        self._running = asyncio.create_task(self._run(), name="aenv pools")

    async def close(self) -> None:
        """Make no more. What waits is found again by the next server, which goes on with what is being made."""
        tasks = [*self._work, *([self._running] if self._running is not None else [])]
        tasks += [one.starting for one in self._lives.entries.values() if one.kept.record.warm and one.starting]
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)

    # Taking one

    async def begin(self, made: Sequence[InstanceRecord], more: More, call_token: str, caller: Caller) -> list[Entry]:
        """Begin to make these instances, of warm sandboxes as far as there are some. ``more`` is written with them."""
        pool = self._pool(made[0])
        if pool is not None:
            pool.demand.note(steady(), len(made))
            self._woken.set()
        for _ in range(_TRIES if pool is not None else 0):
            assert pool is not None
            claim = self._claim(pool, made)
            if not claim.taken:
                break
            self._claimed |= {id: self._place(ready.entry.kept.record) for id, ready in claim.taken.items()}
            try:
                found = await self._lives.begin(claim.made, more(claim.made), call_token, caller, claimed=claim.kept)
            except Conflict:
                if not await self._lost(claim):
                    break
            except BaseException:  # who leaves does not know what becomes of it; whoever tells it finds its place
                self._forget(claim)
                raise
            else:
                pool.claims += len(claim.taken)
                pool.misses += len(made) - len(claim.taken)
                self._woken.set()
                return found
        if pool is not None:
            pool.misses += len(made)
        return await self._lives.begin(made, more(made), call_token, caller)

    def _pool(self, record: InstanceRecord) -> Stock | None:
        """The pool that a request concerns, made when it is the first; None where there is none to be."""
        wanted = record.wanted or Wanted()
        if not self._usable or not record.env.digest or record.service or wanted.datasource:
            return None
        if (
            wanted.resources
            or wanted.volumes
            or wanted.second
            or wanted.forked_from
            or not environment(record.env, "").value("deployConfig.pool.max")
        ):
            return None
        return self._known(record)

    def _known(self, record: InstanceRecord, burst: float = 0.0) -> Stock | None:
        key = (record.owner, record.env.id, record.env.digest)
        pool = self._pools.get(key)
        if pool is None and len(self._pools) < MOST_POOLS:
            pool = self._pools[key] = Stock(record, steady(), burst)
        return pool

    def _claim(self, pool: Stock, made: Sequence[InstanceRecord]) -> Claim:
        """Take as many as there are and fit, so that nobody here takes the same."""
        claim = Claim([], {})
        waiting = [id for id, ready in pool.ready.items() if pool.fits(made[0], ready.waits)]
        for record, id in zip(made, waiting, strict=False):
            claim.taken[id] = pool.ready.pop(id)
            claim.made.append(msgspec.structs.replace(record, id=id, claimed=True))
        claim.made.extend(made[len(claim.made) :])
        return claim

    def _forget(self, claim: Claim) -> None:
        """None of them was taken after all: whoever looks at the pools next finds them, if they are still there."""
        for id in claim.taken:
            self._claimed.pop(id, None)
        self._woken.set()

    async def _lost(self, claim: Claim) -> bool:
        """Somebody was faster: learn who has what; False when all of them are still there, and it was about something
        else."""
        self._forget(claim)
        lost = False
        for id, ready in claim.taken.items():
            found = await self._lives.records.get(id)
            if found is None or found.revision != ready.entry.kept.revision:
                lost = True
                if found is not None:
                    ready.entry.refresh(found)
                    self._let_go(ready.entry)
        return lost

    def _let_go(self, entry: Entry) -> None:
        """Forget one that another server claimed: what became of it is learned as of any other instance."""
        if not entry.kept.record.warm and self._lives.entries.get(entry.id) is entry:
            del self._lives.entries[entry.id]

    # Telling it what it is

    async def specialise(self, entry: Entry, spec: SandboxSpec) -> Sandbox | None:
        """Make a warm sandbox what it was claimed for; None when a new one is to be made in its place."""
        record = entry.kept.record
        place = self._claimed.pop(record.id, None)
        phases: dict[str, float] = {}
        try:
            with entry.phases.of("engine"):
                token = self._lives.token(record)
                return await specialised(self._lives.engine, record.id, spec, place, token=token, phases=phases)
        finally:
            entry.phases.within("engine", phases)

    def _ended(self, record: InstanceRecord) -> None:
        self._claimed.pop(record.id, None)
        if record.warm:
            self._woken.set()

    def _place(self, record: InstanceRecord) -> Place:
        return self._lives.placed(record)

    # Keeping as many as there should be

    async def _run(self) -> None:
        while True:
            with suppress(TimeoutError):
                async with asyncio.timeout(_TICK):
                    await self._woken.wait()
            self._woken.clear()
            try:
                await self.look()
            except (AEnvError, TimeoutError) as exc:
                log.warning("the warm pools could not be looked at: %s", exc or "it took too long")
            except Exception:
                log.exception("the warm pools failed")
            await asyncio.sleep(_PAUSE)

    async def look(self) -> None:
        """Make what is missing, look at what waits, and end what is too much."""
        room, now = await self._room(), steady()
        self._count()
        owners: Counter[str] = Counter()
        for key, pool in list(self._pools.items()):
            mine = [entry for entry in pool.members.values() if self._is_mine(entry)]
            others = len(pool.members) - len(mine)
            left = self._left(pool, room, owners[pool.owner], owners.total())
            wanted = pool.demand.target(now, max(pool.min - others, 0), max(pool.max - others, 0))
            pool.target = min(wanted, left)
            owners[pool.owner] += pool.target
            for entry in list(pool.members.values()):
                self._check(pool, entry, now)
            missing = pool.target - len(mine) - pool.coming
            if missing > 0 and now >= pool.pause_until:
                for _ in range(min(missing, AT_ONCE - self._making)):
                    pool.coming += 1
                    self._making += 1
                    self._do(self._make(pool))
            elif missing < 0:
                for entry in self._surplus(mine, -missing):
                    self._do(self._end(pool, entry, "it was warm, and was not needed any more"))
            if not pool.members and not pool.coming and now - pool.demand.last > FORGOTTEN:
                del self._pools[key]

    def _count(self) -> None:
        """Find what waits, whoever made it."""
        members: dict[Key, dict[str, Entry]] = {}
        for entry in self._lives.entries.values():
            record = entry.kept.record
            if record.warm and not record.over:
                members.setdefault((record.owner, record.env.id, record.env.digest), {})[entry.id] = entry
        for found in members.values():
            first = next(iter(found.values())).kept.record
            self._known(first, burst=sum(map(self._is_mine, found.values())))
        for key, pool in self._pools.items():
            pool.members = members.get(key, {})
            pool.ready = {id: ready for id, ready in pool.ready.items() if pool.members.get(id) is ready.entry}

    async def _room(self) -> Room:
        """How many more instances of a pool a subject may have; none while some of that subject wait."""
        table = await self._quotas.table() if self._pools else None
        if table is None or not table.given:
            return lambda subject, pool: math.inf
        use = await self._store.counts(KIND)

        def room(subject: str, pool: Stock) -> float:
            limits, used = table.of(subject), use.get(subject, {})
            if limits.any and used.get(WAITING, 0.0) > 0:
                return 0.0
            return min((limits.most(name) - used.get(name, 0.0)) / max(need, 1) for name, need in pool.need.items())

        return room

    def _left(self, pool: Stock, room: Room, mine: int, total: int) -> int:
        """How many may wait of this pool, when so many are wanted already, by its owner and by all."""
        owner = f"owner:{pool.owner}"
        most = min(MOST_EACH - mine, MOST - total, room(owner, pool) - mine, room(PLATFORM, pool) - total)
        return max(math.floor(most), 0)

    def _is_mine(self, entry: Entry) -> bool:
        """Whether this server says if it is needed: it made it, or who did is gone. Others may take it all the same."""
        maker, peers = entry.kept.record.warm, self._lives.peers
        return maker == peers.me.boot or not peers.alive(maker)

    def _surplus(self, mine: list[Entry], count: int) -> list[Entry]:
        """Which are to go, the oldest first; none that is being made, looked at or taken."""
        busy = {*self._checking, *self._claimed}
        found = [entry for entry in mine if entry.id not in busy and _is_up(entry)]
        return sorted(found, key=lambda entry: entry.kept.record.created_at)[:count]

    def _do(self, work: Coroutine[Any, Any, Any]) -> None:
        task = asyncio.create_task(work)
        self._work.add(task)
        task.add_done_callback(self._work.discard)

    async def _make(self, pool: Stock) -> None:
        """Make one more, and see that it waits."""
        try:
            entry, began = await self._begin(pool), steady()
            assert entry.starting is not None
            await asyncio.wait((entry.starting,))
            if _is_up(entry):
                pool.demand.took(steady() - began)
                await self._looked_at(pool, entry)
            else:
                self._failed(pool, entry.record.reason)
        except AEnvError as exc:
            self._failed(pool, str(exc))
        finally:
            self._making -= 1
            self._woken.set()

    async def _begin(self, pool: Stock) -> Entry:
        """Write one down, once those have begun that somebody waits for."""
        try:
            await self._let_others()
            lives, now = self._lives, self._lives.clock.now()
            record = InstanceRecord(
                id=new_id(pool.env.name),
                server=lives.name,
                by=lives.peers.me.boot,
                owner=pool.owner,
                env=pool.env,
                status=State.PENDING,
                created_at=now,
                updated_at=now,
                ttl=AGE,
                expires_at=now + AGE,
                secrets=pool.secrets,
                wanted=Wanted(startup_timeout=pool.startup),
                warm=lives.peers.me.boot,
            )
            [kept] = await lives.records.save_all([(None, record)])
            return lives.resume(kept)
        finally:
            pool.coming -= 1

    async def _let_others(self) -> None:
        """Let those begin first that somebody waits for."""
        starting = [entry.starting for entry in self._lives.entries.values() if not entry.kept.record.warm]
        if under_way := [task for task in starting if task is not None and not task.done()]:
            await asyncio.wait(under_way, timeout=_YIELD)

    def _failed(self, pool: Stock, reason: str) -> None:
        pause = min(_BACKOFF * 2**pool.failures, _LONGEST_BACKOFF)
        if not pool.failures:
            log.warning("no warm sandbox of %s can be made: %s", pool.env.id, reason)
        pool.failures = min(pool.failures + 1, 16)
        pool.pause_until = steady() + pause

    # Looking at one

    def _check(self, pool: Stock, entry: Entry, now: float) -> None:
        if not _is_up(entry) or entry.id in self._checking:
            return
        ready = pool.ready.get(entry.id)
        if ready is None or now - ready.checked_at >= CHECK:
            self._do(self._looked_at(pool, entry))

    async def _looked_at(self, pool: Stock, entry: Entry) -> None:
        """See that one waits. One that does not is thrown away."""
        if entry.id in self._checking:
            return
        self._checking.add(entry.id)
        try:
            waits = await look(self._place(entry.kept.record))
        except (Gone, AEnvError, TimeoutError) as exc:
            why = f"it was warm, and does not wait: {exc or 'it took too long'}"
            if self._waits_still(entry) and await self._end(pool, entry, why):
                self._failed(pool, why)
        else:
            if self._waits_still(entry) and entry.id not in self._claimed:
                pool.failures = 0
                pool.ready[entry.id] = Ready(entry, waits, steady())
        finally:
            self._checking.discard(entry.id)

    def _waits_still(self, entry: Entry) -> bool:
        """Whether it is warm, and nobody here has taken it."""
        return self._lives.entries.get(entry.id) is entry and bool(entry.kept.record.warm)

    async def _end(self, pool: Stock, entry: Entry, reason: str) -> bool:
        """End one, unless somebody takes or ends it first; whether it ended for this reason."""
        pool.ready.pop(entry.id, None)
        try:
            await self._lives.end(entry, State.TERMINATED, reason, due=lambda: bool(entry.kept.record.warm))
        except AEnvError as exc:
            log.warning("%s, which is warm, did not end: %s", entry.id, exc)
        self._let_go(entry)
        return entry.kept.record.reason == reason

    # What an operator sees

    def list(self) -> list[Pool]:
        """All pools of this server, the largest first."""
        found = [
            Pool(
                owner=pool.owner,
                env=pool.env.id,
                size=len(pool.members),
                ready=len(pool.ready),
                target=pool.target,
                min=pool.min,
                max=pool.max,
                claims=pool.claims,
                misses=pool.misses,
            )
            for pool in self._pools.values()
        ]
        return sorted(found, key=lambda pool: (-pool.size, pool.env, pool.owner))


def _is_up(entry: Entry) -> bool:
    return entry.kept.record.status is State.RUNNING


def _has_update(engine: Engine) -> bool:
    """Whether an engine can let a sandbox live longer than it was made for."""
    return getattr(engine.update, "__func__", None) is not Engine.update


# Over HTTP


class Handlers:
    """What each route of pools does."""

    def __init__(self, pools: Pools) -> None:
        self._pools = pools

    async def list(self, call: Call, limit: int = PAGE, offset: int = 0) -> Paged[Pool]:
        """The warm pools of the server that answers: how many wait, how many should, and how often one was there."""
        found = self._pools.list()
        return Paged(found[offset : offset + limit], len(found))


def routes(pools: Pools) -> list[Route]:
    return [Route("GET", "/pool", Handlers(pools).list, Scope.ADMIN)]
