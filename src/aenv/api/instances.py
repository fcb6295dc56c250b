"""Instances, as they can be asked for: made, looked at, let live longer, and ended."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from aenv.api import admission, idempotency
from aenv.api.errands import Errands
from aenv.api.idempotency import Keys
from aenv.api.lives import ENGINE, MARGIN, Entry, Lives, Values
from aenv.api.packages import Packages
from aenv.api.peers import Peers
from aenv.api.phases import Phases
from aenv.api.pools import More, Pools
from aenv.api.quotas import Quotas
from aenv.api.reaper import Reaper
from aenv.api.records import InstanceRecord, Records, Wanted, size_of, slim
from aenv.api.visible import Visible, unknown
from aenv.auth.callers import Caller
from aenv.auth.tokens import checked_owner
from aenv.cleanup import finish
from aenv.engines.base import Engine, new_id
from aenv.errors import Conflict, Invalid, NotFound, SandboxError, Unsupported, did_you_mean
from aenv.models import NAME, VERSION, EnvRef, State, parse_duration
from aenv.project.composed import Part, composed
from aenv.project.depends import seed_of
from aenv.store import Change, Store
from aenv.wire import Env, Expose, Exposed, Fork, Instance, InstanceRequest, Renewed, timestamp

LONGEST_WAIT = 600.0
"""Most seconds that an answer waits for an instance to run."""
START = 30.0
"""Seconds that the start of the service waits until what lives was looked at."""
GRACE = 10.0
"""Seconds that what is being made has to run when the service stops."""
_LOOK = 5.0
"""Seconds that an engine has to say how an instance is, before what is written down is answered."""
_POLL, _SLOWEST_POLL = 0.05, 1.0


class Whole(NamedTuple):
    """The record of an instance that is to be, without its id, and of its parts, by alias."""

    record: InstanceRecord
    parts: Mapping[str, Whole]

    def records(self, parent: str = "") -> list[InstanceRecord]:
        """One of each, the whole one first."""
        id = new_id(self.record.env.name)
        below = {alias: part.records(id) for alias, part in self.parts.items()}
        needs = {alias: records[0].id for alias, records in below.items()}
        record = msgspec.structs.replace(self.record, id=id, needs=needs, parent=parent)
        return [record, *(one for records in below.values() for one in records)]


class Joined(NamedTuple):
    """What was asked for before."""

    ids: list[str]


class Instances:
    """The instances of a platform, as one server serves them."""

    def __init__(
        self,
        store: Store,
        engine: Engine,
        packages: Packages,
        secrets: Values,
        key: bytes,
        *,
        data_url: str,
        name: str,
        datasources: Sequence[Path] = (),
        peers: Peers | None = None,
    ) -> None:
        """``data_url`` is where the gateway is; ``name`` tells this server's sandboxes from others' and is the same
        after a restart; data may be used that is below ``datasources``; ``peers`` are the servers beside it."""
        if not NAME.fullmatch(name):
            raise Invalid(f"{name[:64]!r} is not a server's name", hint="use letters, digits, '-', '_' and '.'")
        self.exposed_url: Callable[[str, int, float], str] | None = None
        """Makes the URL of a port inside, which is open until then: the gateway's."""
        self._records = Records(store)
        self._keys = Keys(store)
        self.packages = packages
        """Where environments come from."""
        self._secrets = secrets
        self._datasources = datasources
        self._engine = engine
        self.peers = peers or Peers(store, name)
        self.quotas = Quotas(store)
        """What may be in use, of the platform, by owner and by experiment."""
        self.lives = Lives(self._records, engine, packages, secrets, key, peers=self.peers, quotas=self.quotas)
        self.pools = Pools(self.lives, self.quotas, store)
        """Sandboxes that wait for the next creates."""
        self.reaper = Reaper(self.lives)
        self._visible = Visible(self.lives, data_url)
        self.inside = Errands(self._visible, self.lives)
        """What is done inside instances."""

    async def start(self) -> None:
        """Find what lives, and look after it from now on."""
        await self.reaper.start(START)
        self.pools.start()

    async def close(self) -> None:
        """Let go. What lives, lives on, and is found again."""
        await self.pools.close()
        await self.reaper.close()
        await self.lives.close(GRACE)
        await self.packages.close()
        await self.peers.leave()

    # Making

    async def create(
        self,
        caller: Caller,
        request: InstanceRequest,
        *,
        token: str = "",
        key: str | None = None,
        wait: float = 0.0,
        local: bool = False,
    ) -> list[Instance]:
        """Make instances, as many as are asked for; answered when they run or have failed, or after ``wait`` seconds.

        Asked again under the same ``key``, it answers with the same ones. ``token`` is the caller's own, to be shown
        to the hub. ``local`` callers are on this machine and are told where the sandbox itself is.
        """
        deadline = _deadline(wait)
        entries = await self._begun(caller, request, token, key)
        if isinstance(entries, Joined):
            found = await asyncio.gather(*(self._joined(id, deadline) for id in entries.ids))
        else:
            await asyncio.gather(*(self._settled(entry, deadline) for entry in entries))
            found = [entry.record for entry in entries]
        return [self._visible.shown(record, caller, local=local) for record in found]

    async def _begun(
        self, caller: Caller, request: InstanceRequest, token: str, key: str | None
    ) -> list[Entry] | Joined:
        """Begin to make what is asked for, unless the key says that somebody has."""
        if key is None:
            made = await self._planned(caller, request, token)
            return await self._made(made, lambda made: [], token, caller)
        idempotency.check(key)
        ids = await self._keys.find(caller.owner, key, request)
        if ids is None:
            made = await self._planned(caller, request, token)
            now = self.lives.clock.now()

            def note(made: Sequence[InstanceRecord]) -> list[Change]:
                ids = [record.id for record in made if not record.parent]
                return [idempotency.note(caller.owner, key, request, ids, now)]

            try:
                return await self._made(made, note, token, caller)
            except Conflict:  # somebody was faster
                ids = await self._keys.find(caller.owner, key, request)
                if ids is None:
                    raise
        return Joined(ids)

    async def _made(self, made: Sequence[InstanceRecord], more: More, token: str, caller: Caller) -> list[Entry]:
        """Begin to make these; those that were asked for, without their parts. Whole ones only are warm."""
        if not any(record.needs for record in made):
            return await self.pools.begin(made, more, token, caller)
        entries = await self.lives.begin(made, more(made), token, caller)
        return [entry for entry in entries if not entry.kept.record.parent]

    async def _planned(self, caller: Caller, request: InstanceRequest, token: str) -> list[InstanceRecord]:
        """The records of what is asked for, when all of it is in order."""
        owner = checked_owner(caller, request.owner, "instances") if request.owner else caller.owner
        count = admission.count(request)
        phases = Phases()
        with phases.of("hub"):
            env = await self.packages.resolve(EnvRef.parse(request.env_name), token, caller)
        plan = await admission.plan(request, env, datasources=self._datasources, elsewhere=self._engine.shared)
        self._engine.check_second(plan.wanted.second)
        self._engine.check_resources(plan.wanted.resources)
        parent = await self._parent(caller, request.forked_from, owner, env) if request.forked_from else None
        if plan.secrets:
            admission.check_secrets(await self._secrets.values(owner, plan.secrets))  # which are missing is said now
        now = self.lives.clock.now()
        first = InstanceRecord(
            id="",
            server=self.lives.name,
            owner=owner,
            env=slim(env),
            status=State.PENDING,
            created_at=now,
            updated_at=now,
            ttl=plan.ttl,
            expires_at=now + plan.ttl,
            lease=plan.lease,
            lease_until=None if plan.lease is None else now + plan.lease,
            labels=plan.labels,
            secrets=plan.secrets,
            wanted=plan.wanted,
            charge=None if parent is None else parent.charge,
            phases=phases.seconds,
        )
        if not env.dependencies:
            admission.check_written(count, size_of(first))
            return [msgspec.structs.replace(first, id=new_id(env.name)) for _ in range(count)]
        part = await composed(env, env.locked, lambda ref: self.packages.resolve(ref, token, caller))
        whole = Whole(first, {alias: await self._part(one, first, alias) for alias, one in part.parts.items()})
        family = [record for _ in range(count) for record in whole.records()]
        admission.check_written(len(family), max(map(size_of, family)))
        return family

    async def _part(self, part: Part, above: InstanceRecord, alias: str) -> Whole:
        """What is to be made of a part of an instance, which has that one's owner, labels and end."""
        env, wanted = part.env, above.wanted or Wanted()
        request = InstanceRequest(
            env_name=env.id,
            ttl=above.ttl,
            labels=above.labels,
            seed=seed_of(wanted.seed, alias),
            startup_timeout=wanted.startup_timeout,
        )
        plan = await admission.plan(request, env, datasources=self._datasources, elsewhere=self._engine.shared)
        self._engine.check_second(plan.wanted.second)
        self._engine.check_resources(plan.wanted.resources)
        if plan.secrets:
            admission.check_secrets(await self._secrets.values(above.owner, plan.secrets))
        record = msgspec.structs.replace(
            above,
            env=slim(env),
            lease=None,
            lease_until=None,
            secrets=plan.secrets,
            wanted=plan.wanted,
            charge=admission.charge_of(env, plan.wanted),
            phases={},
        )
        return Whole(record, {alias: await self._part(one, record, alias) for alias, one in part.parts.items()})

    async def _parent(self, caller: Caller, id: str, owner: str, env: Env) -> InstanceRecord:
        """The instance of which one of that owner and environment can be a fork."""
        self._engine.check_fork(id)
        entry, _ = await self._visible.running(caller, id)
        record = entry.record
        if record.needs:
            raise Unsupported(f"{id} depends on others, and is not forked", hint="a fork would share them with it")
        if not admission.environment(record.env, "").forkable:
            raise Unsupported(
                f"{record.env.id} does not say that its instances can be forked",
                hint="deployConfig.forkable says so",
            )
        if record.server != self.lives.name:
            raise Unsupported(f"{id} is another server's, and is forked where it is")
        if (record.owner, record.env.id, record.env.digest) != (owner, env.id, env.digest):
            raise Conflict(
                f"a fork of {id} is of {record.env.id}, and of the same owner", hint=f"ask for {record.env.id}"
            )
        return record

    async def _settled(self, entry: Entry, deadline: float) -> None:
        """Wait until an instance runs or has failed, or there is no more time. Meanwhile its client is there."""
        left = deadline - asyncio.get_running_loop().time()
        if left > 0 and entry.starting is not None and not entry.starting.done():
            with self.lives.used(entry):
                await asyncio.wait((entry.starting,), timeout=left)

    async def _joined(self, id: str, deadline: float) -> InstanceRecord:
        """An instance that was asked for before."""
        found = await self._followed(id, deadline)
        if found is None:  # records are kept for an hour, keys for a day
            message = f"{id}, which was made under this Idempotency-Key, ended long ago"
            raise Conflict(message, hint="make a new key")
        return found

    async def _followed(self, id: str, deadline: float) -> InstanceRecord | None:
        """An instance once it runs or has failed, or when there is no more time; be it another server's."""
        loop, pause = asyncio.get_running_loop(), _POLL
        while True:
            if (entry := self.lives.entries.get(id)) and not entry.kept.record.warm:
                await self._settled(entry, deadline)
                return entry.record
            record = await self._visible.record(id)
            if record is None or record.over or record.status is State.RUNNING or loop.time() >= deadline:
                return record
            await asyncio.sleep(min(pause, max(deadline - loop.time(), 0.0)))
            pause = min(pause * 2, _SLOWEST_POLL)

    # Looking

    async def get(self, caller: Caller, id: str, *, wait: float = 0.0, local: bool = False) -> Instance:
        """An instance; one that is starting is answered when it runs or has failed, or after ``wait`` seconds."""
        await self._visible.find(caller, id)
        record, reason = await self._latest(id, wait)
        return self._visible.shown(record, caller, local=local, reason=reason)

    async def locate(self, id: str, patience: float) -> InstanceRecord:
        """An instance for whoever carries calls to it; one that is starting is waited for so long."""
        return (await self._latest(id, patience))[0]

    async def _latest(self, id: str, wait: float) -> tuple[InstanceRecord, str]:
        """An instance as it is now, and what its engine says of it."""
        record = await self._followed(id, _deadline(wait))
        if record is None or record.warm:
            raise unknown(id)
        entry = self.lives.entries.get(id)
        if entry is None or record.status is not State.RUNNING:
            return record, ""
        reason = await self.lives.look(entry, _LOOK)
        return entry.record, reason

    async def list(
        self,
        caller: Caller,
        *,
        env: str = "*",
        owner: str | None = None,
        labels: Sequence[str] = (),
        status: Sequence[str] = (),
        limit: int,
        offset: int,
        local: bool = False,
    ) -> tuple[list[Instance], int]:
        """A page of the caller's instances, or, for an admin, of everybody's, newest first; and how many there are."""
        tags: dict[str, str | Sequence[str]] = {"as": "instance"}
        if owner:
            tags["owner"] = checked_owner(caller, owner, "instances")
        elif not caller.admin:
            tags["owner"] = caller.owner
        if env != "*":
            tags["env"] = _env(env)
        if status:
            tags["status"] = [_status(one) for one in status]
        pairs = set(map(_label, labels))
        wanted = admission.labels(dict(pairs))
        if len(wanted) < len(pairs):
            return [], 0  # no label has two values
        found, total = await self._records.find(tags, wanted, limit=limit, offset=offset)
        return [self._visible.shown(self._visible.newest(record), caller, local=local) for record in found], total

    # Changing, and ending

    async def delete(self, caller: Caller, id: str) -> None:
        """End an instance. Back when its sandbox is gone, or when it is clear that this takes longer: it goes on. With
        one that ran and is over goes what its engine keeps; of one that failed to start, that is there to be read."""
        try:
            entry = await self._visible.alive(caller, id)
        except Conflict:
            record = await self._visible.find(caller, id)
            if record.ran and record.server == self.lives.name:
                await self.lives.endings.wait(id)
            return
        await finish(self._delete(entry))

    async def _delete(self, entry: Entry) -> None:
        families, below = self.lives.families, list(self.lives.families.below(entry.kept.record))
        await self.lives.end(entry, State.TERMINATED, "it was deleted", force=True)
        await asyncio.gather(*(families.end(part, f"{entry.id}, which needed it, was deleted") for part in below))
        await asyncio.gather(*(self.lives.endings.wait(one.id) for one in (entry, *below)))

    async def extend(self, caller: Caller, id: str, ttl: str | float) -> Renewed:
        """Let an instance live so long from now."""
        seconds = admission.lifetime(ttl)
        entry, _ = await self._visible.running(caller, id)
        if service := entry.kept.record.service:
            raise Conflict(f"{id} is a replica of service {service}, and lives as long as that needs it")
        try:
            async with asyncio.timeout(ENGINE):
                await self._engine.update(id, ttl=seconds + MARGIN)
        except (NotFound, SandboxError, TimeoutError):
            if id in self.lives.entries:  # another server's tells its own engine
                await self.lives.look(entry)
                raise _gone(entry) from None
        clock = self.lives.clock

        def longer(record: InstanceRecord) -> InstanceRecord | None:
            now = clock.now()
            return None if record.over else _replace(record, ttl=seconds, expires_at=now + seconds, updated_at=now)

        entry.heard(clock.now())
        if not await self.lives.change(entry, longer):
            raise _gone(entry)
        await self.lives.families.prolong(entry.record)
        self.lives.changed.set()
        return _renewed(entry)

    async def renew(self, caller: Caller, id: str) -> Renewed:
        """Say that an instance's client is there: its lease begins anew."""
        entry = await self._visible.alive(caller, id)
        await self._heard(entry)
        return _renewed(entry)

    async def heard(self, id: str) -> None:
        """The same, of an instance that lives at another server."""
        kept = await self._records.get(id)
        if kept is not None:
            await self._heard(Entry(kept, self.lives.clock.now()))

    async def _heard(self, entry: Entry) -> None:
        entry.heard(self.lives.clock.now())
        if entry.id not in self.lives.entries and entry.lease_until is not None:
            await self.lives.change(entry, lambda record: None if record.over else record)

    async def expose(self, caller: Caller, id: str, request: Expose) -> Exposed:
        """A URL for whoever has it, of a port inside, until it expires or the instance does."""
        if not 0 < request.port < 65536:
            raise Invalid(f"port {request.port} is not between 1 and 65535")
        entry, _ = await self._visible.running(caller, id)
        if self.exposed_url is None:
            raise Unsupported("this platform exposes no ports")
        expires_at = entry.record.expires_at
        if request.ttl not in (None, ""):
            expires_at = min(expires_at, self.lives.clock.now() + parse_duration(request.ttl))
        url = self.exposed_url(id, request.port, expires_at)
        return Exposed(url=url, port=request.port, expires_at=timestamp(expires_at))

    async def forks_of(self, caller: Caller, id: str, wanted: Fork) -> InstanceRequest:
        """What is to be made where forks of an instance are wanted."""
        record = await self._visible.find(caller, id)
        return InstanceRequest(
            env_name=record.env.id,
            owner=record.owner,
            forked_from=id,
            count=wanted.count,
            ttl=wanted.ttl,
            labels=wanted.labels,
            lease=wanted.lease,
            own_random=not wanted.same_random,
        )

    async def cannot(self, caller: Caller, id: str, what: str) -> None:
        """What no engine of ours can do yet, to an instance that is there."""
        await self._visible.find(caller, id)
        raise Unsupported(f"the {self._engine.name} engine cannot {what}")


def _deadline(wait: float) -> float:
    return asyncio.get_running_loop().time() + min(wait, LONGEST_WAIT)


def _replace(record: InstanceRecord, **changes: Any) -> InstanceRecord:
    return msgspec.structs.replace(record, **changes)


def _gone(entry: Entry) -> Conflict:
    record = entry.record
    how = f"is {record.status.lower()}: {record.reason}" if record.over else "cannot be reached by its engine"
    return Conflict(f"{entry.id} {how}")


def _renewed(entry: Entry) -> Renewed:
    record = entry.record
    lease = "" if record.lease_until is None else timestamp(record.lease_until)
    return Renewed(timestamp(record.expires_at), lease)


def _env(text: str) -> str:
    """A name, or a name with an exact version, as a tag's value."""
    ref = EnvRef.parse(text)
    if ref.version is not None and not VERSION.fullmatch(ref.version):
        raise Invalid(f"{text!r} is not one version", hint="use name, name@1.0.1 or *")
    return str(ref)


def _status(text: str) -> str:
    known = {state.value.lower(): state.value for state in State}
    if text.lower() not in known:
        raise Invalid(f"there is no status {text[:64]!r}", hint=did_you_mean(text[:64], known.values()))
    return known[text.lower()]


def _label(text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not equals:
        raise Invalid(f"label {text[:64]!r} is not name=value")
    return name, value
