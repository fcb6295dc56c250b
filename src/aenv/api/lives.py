"""The living instances of this server: how each comes to run, how it is changed, and how it ends.

Every instance that lives here has an ``Entry``: its record as it was last read or written, and what only this process
knows of it. The store decides: a change that it refuses is made again on what it has. An entry goes when its instance
ends; the record stays for a while.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from secrets import randbits
from weakref import WeakValueDictionary

import msgspec

from aenv.api import inside
from aenv.api.admission import charge_of, check_secrets
from aenv.api.clock import Clock
from aenv.api.endings import PATIENCE, Endings
from aenv.api.entry import Entry as Entry
from aenv.api.families import Families
from aenv.api.gateway.places import Place
from aenv.api.packages import Packages
from aenv.api.peers import Peers
from aenv.api.phases import told
from aenv.api.queue import Queue
from aenv.api.quotas import Quotas
from aenv.api.records import FOREVER, InstanceRecord, Kept, Records
from aenv.api.specs import SERVER as SERVER
from aenv.api.specs import Values as Values
from aenv.api.specs import spec_of
from aenv.auth.callers import Caller, Scope
from aenv.auth.keys import owner_token
from aenv.engines.base import Engine
from aenv.errors import AEnvError, Conflict, NetworkError, NotFound, StartFailed
from aenv.models import Sandbox, SandboxSpec, State, to_json
from aenv.runtime.hidden import Hidden
from aenv.store import Change
from aenv.web import logs

log = logging.getLogger("aenv.api")

AT_ONCE = 32
"""Sandboxes of one owner and environment that want the same, which an engine is asked for at the same time."""
MARGIN = 30.0
"""Seconds that an engine lets a sandbox live longer than its record says: the record decides, and the engine when
nobody is there to decide."""
ENGINE = 30.0
"""Seconds in which an engine must answer a question."""
_SLOW, _SLOWER = 1.0, 5.0
"""Seconds after which a start that is not over is written down, with what it waits for; and then again."""
_LONGER = 5.0
"""Seconds that an engine has, over those of a start, to say by itself why it failed."""
_TRIES = 100
_AWAY, _AGAIN = 60.0, 0.5
"""Seconds that a store may be away when something has come to run, and between two tries to write that down."""

Mutation = Callable[[InstanceRecord], InstanceRecord | None]
"""From a record to what it is to become; None leaves it as it is."""


class Lives:
    """All instances that live on this server."""

    def __init__(
        self,
        records: Records,
        engine: Engine,
        packages: Packages,
        secrets: Values,
        key: bytes,
        *,
        peers: Peers,
        quotas: Quotas,
    ) -> None:
        self.records = records
        self.engine = engine
        self.name = peers.me.name
        self.peers = peers
        """The servers beside this one."""
        self.clock = Clock(self.moved)
        self.queue = Queue(records, quotas, self.clock, peers.me.boot)
        """What waits to be admitted."""
        self.entries: dict[str, Entry] = {}
        self.endings = Endings(engine)
        self.families = Families(self)
        """What instances need of each other."""
        self.unwritten: dict[str, Entry] = {}
        """Ends that the store did not take."""
        self.changed = asyncio.Event()
        """Set when something may be over earlier than was known."""
        self.nearest = 0.0
        """When whoever waits for that looks again by itself: what is over later need not wake it."""
        self.listeners: list[Callable[[InstanceRecord], None]] = [lambda record: self.queue.wake()]
        """Told of each instance that is no more."""
        self.missed: list[Callable[[InstanceRecord], None]] = []
        """Told of each that is no more and is not among them, be it that it came and went unseen; maybe twice."""
        self.started: list[Callable[[InstanceRecord], None]] = []
        """Told of each start that is over, well or not, in the context of who asked for it."""
        self.specialise: Callable[[Entry, SandboxSpec], Awaitable[Sandbox | None]]
        """Tells a sandbox that was warm what it is; None when it is gone. The pools do."""
        self.late = 0.0
        """Seconds by which news of clients may be late, since they talk to other servers as well."""
        self._packages = packages
        self._secrets = secrets
        self._key = key
        self._beginning: set[asyncio.Task[list[Entry]]] = set()
        self._rooms: WeakValueDictionary[tuple[object, ...], asyncio.Semaphore] = WeakValueDictionary()
        self._prolonging: set[asyncio.Task[None]] = set()
        packages.in_use = self._digests

    def token(self, record: InstanceRecord) -> str:
        """The owner token of an instance; all replicas of a service have the same one."""
        return owner_token(self._key, record.service or record.id)

    def placed(self, record: InstanceRecord) -> Place:
        """Where a running instance is reached from here. ``NetworkError`` when only a server can that is gone."""
        return Place(record.id, self.peers.url(record), record.owner, self.token(record))

    def moved(self, seconds: float) -> None:
        log.warning("the clock of this machine was set by %+.1f s; instances keep the time that they had", seconds)
        for entry in self.entries.values():
            entry.moved(seconds)
        self.changed.set()

    def _digests(self) -> set[str]:
        """Of the packages that are in use; asked from a thread."""
        return {entry.kept.record.env.digest for entry in list(self.entries.values())}

    # From a record to a sandbox that runs

    async def begin(
        self,
        made: Sequence[InstanceRecord],
        more: Sequence[Change],
        call_token: str,
        caller: Caller,
        *,
        claimed: Mapping[str, Kept] = {},
    ) -> list[Entry]:
        """Write these records, with what else belongs to them, and then begin to make what they say: at once, or when
        they are admitted. ``RateLimited`` when the queue is full. Those that are ``claimed`` take the place of a warm
        one.

        Who leaves meanwhile leaves neither half of it undone.
        """
        task = asyncio.create_task(self._begin(made, more, call_token, caller, claimed))
        self._beginning.add(task)
        task.add_done_callback(self._begun)
        return await asyncio.shield(task)

    async def _begin(
        self,
        made: Sequence[InstanceRecord],
        more: Sequence[Change],
        call_token: str,
        caller: Caller,
        claimed: Mapping[str, Kept],
    ) -> list[Entry]:
        by, charge = self.peers.me.boot, made[0].charge or charge_of(made[0].env, made[0].wanted)
        made = [msgspec.structs.replace(record, by=by, charge=record.charge or charge) for record in made]
        kept = await self.queue.enter(made, more, claimed=claimed)
        return [self.resume(found, call_token, caller) for found in kept]

    def _begun(self, task: asyncio.Task[list[Entry]]) -> None:
        self._beginning.discard(task)
        if not task.cancelled():
            task.exception()  # when who asked has left, nobody hears it

    def resume(self, kept: Kept, call_token: str = "", caller: Caller | None = None) -> Entry:
        """Go on with an instance that is written down, and does not run yet."""
        entry = self.entries[kept.record.id] = Entry(kept, self.clock.now())
        caller = caller or Caller(kept.record.owner, frozenset((Scope.READ, Scope.RUN)))
        if kept.record.queued is not None:
            self.queue.join(entry)
        entry.starting = asyncio.create_task(self._start(entry, call_token, caller))
        self._came(entry)
        return entry

    def adopt(self, kept: Kept) -> Entry:
        """Take in an instance that runs: of the server that was here before, or of another one of the same name."""
        entry = self.entries[kept.record.id] = Entry(kept, self.clock.now())
        if not kept.record.warm:
            entry.place = self.placed(kept.record)
            self.families.carry(entry)
        self._came(entry)
        return entry

    def _came(self, entry: Entry) -> None:
        if entry.deadline(self.clock.now(), self.late) < self.nearest:
            self.changed.set()

    async def _start(self, entry: Entry, call_token: str, caller: Caller) -> None:
        """Bring it up, or end it with the reason. Cancelled, it is ended by somebody else, or is gone on with when
        this server is back."""
        with logs.about(instance=entry.id):
            try:
                if entry.kept.record.queued is not None and not await self._admitted(entry):
                    return
                spec = await self._spec(entry, call_token, caller)
                sandbox = await self._sandbox(entry, spec)
                await self._reseed(entry, sandbox)
                await self.families.join(entry, sandbox)
                await self._runs(entry, sandbox)
            except AEnvError as exc:
                await self._failed(entry, exc.message if exc.hint is None else f"{exc.message} ({exc.hint})")
            except Exception as exc:
                log.exception("%s could not be started", entry.id)
                await self._failed(entry, f"the platform itself failed: {type(exc).__name__}")

    async def _admitted(self, entry: Entry) -> bool:
        """Wait in the queue. What another server has taken over, or ended, is not ours any more."""
        with entry.phases.of("queue"):
            admitted = await self.queue.turn(entry)
        if admitted:
            self._came(entry)
        elif entry.kept.record.over:
            self._drop(entry)
        elif self.entries.get(entry.id) is entry:
            del self.entries[entry.id]
        return admitted

    async def _spec(self, entry: Entry, call_token: str, caller: Caller) -> SandboxSpec:
        record = entry.record
        with entry.phases.of("package"):
            placed = await self._packages.place(record.env, call_token, caller)
        values: dict[str, str] = {}
        if record.secrets and not record.warm:  # what is warm is nobody's yet
            values = await self._secrets.values(record.owner, record.secrets)
        check_secrets(values)
        entry.hidden = Hidden.of(values, values)
        left = record.ttl if record.lacks_room else record.expires_at - self.clock.now()
        ttl = max(left, 1.0) + MARGIN
        return spec_of(record, placed, values, token=self.token(record), ttl=ttl)

    async def _sandbox(self, entry: Entry, spec: SandboxSpec) -> Sandbox:
        record = entry.kept.record
        alike = (record.owner, record.env.id, *sorted(spec.resources.items()))
        room = self._rooms.setdefault(alike, asyncio.Semaphore(AT_ONCE))
        loop = asyncio.get_running_loop()
        limit, asked = asyncio.timeout(None), asyncio.Event()
        report = asyncio.create_task(self._report(entry, limit, asked))
        try:
            if record.claimed and (made := await self.specialise(entry, spec)) is not None:
                return made
            with entry.phases.of("queue"):
                await room.acquire()
            asked.set()
            with entry.phases.of("engine"):
                deadline = loop.time() + spec.startup_timeout
                try:
                    async with limit:
                        limit.reschedule(deadline + _LONGER)
                        try:
                            sandbox = await self.engine.create(record.id, spec)
                        finally:
                            room.release()
                        if sandbox.state is not State.RUNNING:
                            limit.reschedule(None)  # a wait has its own
                            left = max(deadline - loop.time(), 0.0)
                            sandbox = await self.engine.wait(record.id, left, where=False)
                except TimeoutError:
                    if not limit.expired():
                        raise
                    raise StartFailed(f"it did not start within {spec.startup_timeout:g} s") from None
            entry.phases.within("engine", sandbox.phases)
            return sandbox
        finally:
            report.cancel()

    async def _reseed(self, entry: Entry, sandbox: Sandbox) -> None:
        """Let a fork draw what only it draws, where that is wanted, before anybody can call it."""
        record = entry.kept.record
        if record.wanted is not None and record.wanted.own_random:
            place = Place(record.id, sandbox.url, record.owner, self.token(record))
            await inside.ask(place, "POST", "/reseed", to_json({"seed": randbits(32)}), timeout=ENGINE)

    async def _report(self, entry: Entry, limit: asyncio.Timeout, asked: asyncio.Event) -> None:
        """Write down that a start takes its time, and what it waits for; ``asked`` is set once the engine was. How long
        it may wait for room, the engine decides: ``limit`` is put off."""
        pause, loop = _SLOW, asyncio.get_running_loop()
        while True:
            await asyncio.sleep(pause)
            pause = _SLOWER
            with suppress(AEnvError, TimeoutError):
                state, reason = await self._stands(entry, asked)
                record = entry.kept.record
                if state is State.PENDING and record.wanted and (until := limit.when()) and not limit.expired():
                    limit.reschedule(max(until, loop.time() + record.wanted.startup_timeout + _LONGER))
                if record.status is not state or record.reason != reason:
                    await self.change(entry, partial(self._creating, state=state, reason=reason))
                    self._came(entry)

    async def _stands(self, entry: Entry, asked: asyncio.Event) -> tuple[State, str]:
        """How far a start is, and what it waits for."""
        claimed = entry.kept.record.claimed
        if not claimed and not asked.is_set():
            return State.PENDING, f"{AT_ONCE} that want the same are made before it"
        async with asyncio.timeout(ENGINE):
            sandbox = await self.engine.get(entry.id)
        if not claimed:  # then those are of the time before
            entry.phases.within("engine", sandbox.phases)
        state = State.PENDING if sandbox.state is State.PENDING else State.CREATING
        return state, entry.hide(sandbox.reason)

    def _creating(self, record: InstanceRecord, state: State, reason: str) -> InstanceRecord | None:
        """While there is no room for it, its time to live does not run."""
        if record.status not in (State.PENDING, State.CREATING):
            return None
        now, expires_at = self.clock.now(), record.expires_at
        if state is State.PENDING and not record.lacks_room and record.wanted is not None:
            expires_at = min(now + max(record.ttl, record.wanted.startup_timeout), FOREVER)
        elif state is State.CREATING and record.lacks_room:
            expires_at = min(now + record.ttl, FOREVER)
        return msgspec.structs.replace(record, status=state, reason=reason, updated_at=now, expires_at=expires_at)

    async def _runs(self, entry: Entry, sandbox: Sandbox) -> None:
        def running(record: InstanceRecord) -> InstanceRecord | None:
            if record.over:
                return None
            now = self.clock.now()
            return msgspec.structs.replace(
                record,
                status=State.RUNNING,
                reason="",
                url=sandbox.url,
                boot=sandbox.boot,
                phases=entry.phases.seconds,
                updated_at=now,
                expires_at=min(now + record.ttl, FOREVER) if record.lacks_room else record.expires_at,
                wanted=None,
                ran=True,
                started_at=record.started_at or (0.0 if record.warm else now),
                by="",
            )

        loop = asyncio.get_running_loop()
        deadline = loop.time() + _AWAY
        while True:
            try:
                runs = await self.change(entry, running)
                break
            except NetworkError:  # a store that is away for a moment is no reason to end what has just begun
                if loop.time() >= deadline:
                    raise
                await asyncio.sleep(_AGAIN)
        if runs:
            if not entry.kept.record.warm:
                entry.place = self.placed(entry.kept.record)
            self.families.runs(entry.kept.record)
            self._tell_started(entry.kept.record)
        else:  # somebody ended it while it started
            self.endings.begin(entry.id)

    async def _failed(self, entry: Entry, reason: str) -> None:
        """It did not start. What the engine keeps of it, to be read, is kept as long as the record."""
        leave = False
        with suppress(AEnvError, TimeoutError):
            async with asyncio.timeout(ENGINE):
                sandbox = await self.engine.get(entry.id)
            leave = sandbox.state.over
            if not entry.kept.record.claimed:
                entry.phases.within("engine", sandbox.phases)
        where = told(entry.phases.seconds)
        await self.end(
            entry, State.FAILED, f"{reason}; the time went to: {where}" if where else reason, leave=leave, force=True
        )
        self._tell_started(entry.record)

    def _tell_started(self, record: InstanceRecord) -> None:
        for tell in self.started if not record.warm else ():
            tell(record)

    # Changes, and the end

    @contextmanager
    def used(self, entry: Entry) -> Iterator[None]:
        """Somebody waits for an answer about it, or from it."""
        entry.waiting += 1
        try:
            yield
        finally:
            entry.waiting -= 1
            entry.heard(self.clock.now())

    async def change(self, entry: Entry, mutation: Mutation) -> bool:
        """Change an instance, on what the store has of it; whether there was anything to change.

        An entry whose instance turns out to be over is dropped. A record that the store has lost is written anew.
        """
        for _ in range(_TRIES):
            shift = entry.shift
            changed = mutation(entry.record)
            if changed is None:
                return False
            try:
                kept = await self.records.save(entry.kept, changed)
            except Conflict:
                found = await self.records.get(entry.id)
                self.refresh(entry, found or Kept(entry.kept.record, 0))
                if entry.kept.record.over:
                    self._drop(entry)
                continue
            entry.wrote(kept, shift)
            return True
        raise Conflict(f"{entry.id} is being changed by others all the time", hint="try again")

    def refresh(self, entry: Entry, found: Kept) -> None:
        """Take what the store has. What another server lets live longer, the engine here must, too."""
        self.clock.now()  # that it was set is known before times are taken that another server moved with it
        is_longer = found.record.expires_at > entry.kept.record.expires_at
        entry.refresh(found)
        record = found.record
        if entry.place is None and entry.starting is None and record.status is State.RUNNING and not record.warm:
            entry.place = self.placed(record)  # another server claimed it
            self.families.carry(entry)
        if is_longer and entry.place is not None:
            task = asyncio.create_task(self._prolong(entry))
            self._prolonging.add(task)
            task.add_done_callback(self._prolonging.discard)

    async def latest(self, id: str) -> InstanceRecord | None:
        """An instance as it is known now."""
        if (entry := self.entries.get(id)) is not None:
            return entry.record
        kept = await self.records.get(id)
        return None if kept is None else kept.record

    async def prolong(self, entry: Entry, like: InstanceRecord) -> None:
        """Let an instance live as long as another one, where it would end earlier."""

        def longer(record: InstanceRecord) -> InstanceRecord | None:
            if record.over or record.expires_at >= like.expires_at:
                return None
            return msgspec.structs.replace(
                record, ttl=like.ttl, expires_at=like.expires_at, updated_at=self.clock.now()
            )

        if await self.change(entry, longer):
            await self._prolong(entry)

    async def _prolong(self, entry: Entry) -> None:
        left = entry.kept.record.expires_at + entry.shift - self.clock.now()
        try:
            async with asyncio.timeout(ENGINE):
                await self.engine.update(entry.id, ttl=max(left, 1.0) + MARGIN)
        except (AEnvError, TimeoutError) as exc:
            log.warning("the engine did not let %s live longer: %s", entry.id, exc or "it took too long")

    async def end(
        self,
        entry: Entry,
        status: State,
        reason: str,
        *,
        due: Callable[[], bool] = lambda: True,
        leave: bool = False,
        force: bool = False,
    ) -> None:
        """End an instance, and after that its sandbox, unless it is to be left.

        One that is not ``due`` on a second look, since somebody let it live on, is let be. When the store fails that
        is raised, and nothing has ended; with ``force`` it ends all the same, and is written down later.
        """
        over = self.over(status, entry.hide(reason))
        try:
            changed = await self.change(entry, lambda record: over(record) if due() else None)
            if not changed and not entry.kept.record.over:
                return
        except AEnvError as exc:
            if not force:
                raise
            log.warning("%s ends, which cannot be written down yet: %s", entry.id, exc)
            entry.ended = over(entry.record) or entry.record
            self.unwritten[entry.id] = entry
        self._drop(entry)
        if entry.starting is not None and entry.starting is not asyncio.current_task():
            entry.starting.cancel()
            await asyncio.wait((entry.starting,), timeout=PATIENCE)
        if not leave:
            self.endings.begin(entry.id)

    def over(self, status: State, reason: str) -> Mutation:
        """What makes a record one of an instance that has ended."""

        def mutation(record: InstanceRecord) -> InstanceRecord | None:
            if record.over:
                return None
            return msgspec.structs.replace(
                record,
                status=status,
                reason=reason,
                url="",
                boot="",
                updated_at=self.clock.now(),
                wanted=None,
                by=self.name,
            )

        return mutation

    def _drop(self, entry: Entry) -> None:
        entry.place = None
        is_here = self.entries.get(entry.id) is entry
        if is_here:
            del self.entries[entry.id]
        self.families.ended(entry.record)
        for tell in self.listeners if is_here else self.missed:
            tell(entry.record)

    async def look(self, entry: Entry, patience: float = ENGINE) -> str:
        """See whether a running instance is still there, and note its end if it is not; what the engine says of it."""
        if entry.hidden is None and entry.kept.record.secrets:
            await self.hidden(entry.kept.record)
        try:
            async with asyncio.timeout(patience):
                sandbox = await self.engine.get(entry.id)
        except NotFound:
            await self.end(entry, State.FAILED, "lost: its sandbox is gone, and the engine does not know why")
        except (AEnvError, TimeoutError):
            return ""  # an engine that does not answer has not said that it is gone
        else:
            if not sandbox.state.over:
                return entry.hide(sandbox.reason)
            await self.end(entry, sandbox.state, sandbox.reason or "lost: its sandbox ended by itself", leave=True)
        return entry.record.reason

    async def hidden(self, record: InstanceRecord) -> Hidden | None:
        """What takes the secrets of an instance out of texts."""
        entry = self.entries.get(record.id)
        if entry is not None and entry.hidden is not None:
            return entry.hidden
        values: dict[str, str] = {}
        for name in record.secrets:
            with suppress(AEnvError):  # it was deleted since then
                values |= await self._secrets.values(record.owner, [name])
        made = Hidden.of(values, values)
        if entry is not None:
            entry.hidden = made
        return made

    async def close(self, grace: float) -> None:
        """Wait for what is being made. What takes longer is made when this server is back; all that lives, lives on."""
        if self._beginning:
            await asyncio.wait(self._beginning, timeout=grace)
        await self.queue.close()
        for entry in self.entries.values():
            waits = entry.kept.record.queued is not None or entry.kept.record.lacks_room
            if entry.starting is not None and waits:
                entry.starting.cancel()
        starting = [entry.starting for entry in self.entries.values() if entry.starting is not None]
        if starting:
            _, left = await asyncio.wait(starting, timeout=grace)
            for task in left:
                task.cancel()
            if left:
                await asyncio.wait(left, timeout=PATIENCE)
        if self._prolonging:
            await asyncio.wait(self._prolonging, timeout=grace)
        await self.families.close()
        await self.endings.close(grace)
