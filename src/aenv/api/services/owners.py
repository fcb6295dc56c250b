"""Services, as they can be asked for: made, looked at, changed, and ended."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncGenerator, Sequence

import msgspec

from aenv.api import idempotency
from aenv.api.admission import check_secrets
from aenv.api.clock import steady
from aenv.api.errands import printed_at
from aenv.api.idempotency import Keys
from aenv.api.lives import Lives, Values
from aenv.api.packages import Packages
from aenv.api.services import printed
from aenv.api.services.keeper import remove_storage
from aenv.api.services.keeping import Keepers
from aenv.api.services.moves import reason, status
from aenv.api.services.planning import Storage, Wish, changed, checked_replicas, planned, wanted_version, wish
from aenv.api.services.records import (
    Kept,
    Member,
    Phase,
    Plan,
    ServiceRecord,
    StorageRecord,
    drop_storage,
    put,
    put_storage,
    size_of,
)
from aenv.auth.callers import Caller, Scope
from aenv.auth.keys import owner_token
from aenv.auth.tokens import checked_owner
from aenv.engines.base import new_id
from aenv.errors import Conflict, Invalid, NotFound, TooLarge
from aenv.models import VERSION, EnvRef, State, Volume
from aenv.runtime.tokens import agent_token, digest
from aenv.store import Change, Store
from aenv.wire import Env, Replica, Service, ServiceChange, ServiceRequest, timestamp

MOST = 1000
"""Services of one owner: each is looked at every second."""
LONGEST_WAIT = 600.0
"""Most seconds that an answer waits for a service to be as it should."""
ENDING = 60.0
"""Seconds after which the answer to a deletion no longer waits for its end, which comes all the same."""
_LARGEST = 512 * 1024
"""Bytes of a service's record when it is written first."""
_TRIES = 100
_POLL = 0.2
_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}", re.ASCII)
_STATES = {
    Phase.STARTING: State.CREATING,
    Phase.READY: State.RUNNING,
    Phase.UNWELL: State.RUNNING,
    Phase.DOWN: State.FAILED,
    Phase.LEAVING: State.RUNNING,
}


class Services:
    """The services of a platform, as one server serves them."""

    def __init__(
        self, store: Store, lives: Lives, packages: Packages, secrets: Values, key: bytes, *, data_url: str
    ) -> None:
        """``data_url`` is where the gateway is."""
        self.keepers = Keepers(store, lives, key)
        self._records = self.keepers.records
        self._keys = Keys(store)
        self._lives = lives
        self._packages = packages
        self._secrets = secrets
        self._key = key
        self._data_url = data_url.rstrip("/")

    async def start(self) -> None:
        """Find the services of this server, and look after them from now on."""
        await self.keepers.start()

    async def close(self) -> None:
        """Let go. What serves, serves on."""
        await self.keepers.close()

    # Making

    async def create(
        self, caller: Caller, request: ServiceRequest, *, token: str = "", key: str | None = None, wait: float = 0.0
    ) -> Service:
        """Make a service; answered when its replicas run or have failed, or after ``wait`` seconds.

        Asked again under the same ``key``, it answers with the same one. ``token`` is the caller's own, to be shown to
        the hub.
        """
        deadline = _deadline(wait)
        if key is not None:
            idempotency.check(key)
            if ids := await self._keys.find(caller.owner, key, request):
                return await self._joined(caller, ids[0], deadline)
        owner = checked_owner(caller, request.owner, "services") if request.owner else caller.owner
        _, total = await self._records.find({"owner": owner, "over": "no"}, limit=1)
        if total >= MOST:
            raise Conflict(f"{owner} has {total} services; {MOST} is the most", hint="delete those of no use any more")
        env = await self._packages.resolve(EnvRef.parse(request.env_name), token, caller)
        wanted = await wish(request, env)
        self._lives.engine.check_second(wanted.plan.second)
        await self._check_secrets(owner, wanted.plan)
        record = self._record(owner, wanted)
        more: list[Change] = []
        if key is not None:
            more.append(idempotency.note(caller.owner, key, request, [record.id], record.created_at))
        try:
            kept = await self._written(record, wanted.storage, more)
        except Conflict:
            ids = None if key is None else await self._keys.find(caller.owner, key, request)
            if not ids:
                raise
            return await self._joined(caller, ids[0], deadline)
        self.keepers.keep(kept, token, caller)
        return self._shown(await self._settled(record.id, deadline), caller)

    def _record(self, owner: str, wanted: Wish) -> ServiceRecord:
        now = self._lives.clock.now()
        record = ServiceRecord(
            id=new_id(wanted.name),
            name=wanted.name,
            owner=owner,
            server=self._lives.name,
            keeper=self._lives.peers.me.boot,
            created_at=now,
            updated_at=now,
            replicas=wanted.replicas,
            generation=1,
            plan=wanted.plan,
            labels=wanted.labels,
            resources=wanted.resources,
            port=wanted.port,
        )
        return _checked(record)

    async def _written(self, record: ServiceRecord, storage: Storage | None, more: Sequence[Change]) -> Kept:
        """Write a service down, with the storage that it takes."""
        if storage is None:
            [revision, *_] = await self._records.write(put(record, 0), *more)
            return Kept(record, revision)
        found = await self._records.storage(record.owner, storage.name)
        if found is None:
            if not storage.size:
                raise Invalid(
                    f"storage {storage.name!r} needs a size",
                    hint="give storage_size, for example 10Gi (--storage-size)",
                )
            size, text, expect = storage.bytes, storage.size, 0
        else:
            size, text, expect = found.record.size, found.record.storage_size, found.revision
            if await self._is_taken(found.record.service):
                raise Conflict(
                    f"storage {storage.name!r} is that of service {found.record.service}",
                    hint="give other storage by its name (pvc_name), or delete that service first",
                )
            if storage.is_asked and storage.bytes != size:
                raise Conflict(
                    f"storage {storage.name!r} has {text}, which cannot be changed to {storage.size}",
                    hint="leave the size out, or give the storage another name",
                )
        volume = Volume(owner=record.owner, name=storage.name, mount=storage.mount, size=size)
        record = msgspec.structs.replace(record, volume=volume, storage_size=text)
        taken = StorageRecord(owner=record.owner, name=storage.name, size=size, storage_size=text, service=record.id)
        [revision, *_] = await self._records.write(put(record, 0), put_storage(taken, expect), *more)
        return Kept(record, revision)

    async def _is_taken(self, service: str) -> bool:
        """Whether a service that has storage is still there."""
        kept = await self._records.get(service) if service else None
        return kept is not None and not kept.record.over

    async def _joined(self, caller: Caller, id: str, deadline: float) -> Service:
        """A service that was asked for before."""
        if await self._records.get(id) is None:  # records are kept for an hour, keys for a day
            message = f"{id}, which was made under this Idempotency-Key, ended long ago"
            raise Conflict(message, hint="make a new key")
        return self._shown(await self._settled(id, deadline), caller)

    async def _check_secrets(self, owner: str, plan: Plan) -> None:
        if plan.secrets:  # which are missing is said now
            check_secrets(await self._secrets.values(owner, plan.secrets))

    # Looking

    async def get(self, caller: Caller, id: str, *, wait: float = 0.0) -> Service:
        """A service; one that is being made or changed is answered when that is done, or after ``wait`` seconds."""
        await self._found(caller, id)
        return self._shown(await self._settled(id, _deadline(wait)), caller)

    async def list(
        self,
        caller: Caller,
        *,
        env: str = "*",
        owner: str | None = None,
        ended: bool = False,
        limit: int,
        offset: int,
    ) -> tuple[list[Service], int]:
        """A page of the caller's services, or, for an admin, of everybody's, newest first; and how many there are."""
        tags: dict[str, str | Sequence[str]] = {} if ended else {"deleted": "no"}
        if owner:
            tags["owner"] = checked_owner(caller, owner, "services")
        elif not caller.admin:
            tags["owner"] = caller.owner
        if env != "*":
            ref = EnvRef.parse(env)
            if ref.version is not None and not VERSION.fullmatch(ref.version):
                raise Invalid(f"{env!r} is not one version", hint="use name, name@1.0.1 or *")
            tags["env"] = str(ref)
        found, total = await self._records.find(tags, limit=limit, offset=offset)
        return [self._shown(kept.record, caller) for kept in found], total

    async def logs(
        self,
        caller: Caller,
        id: str,
        *,
        tail: int | None = None,
        follow: bool = False,
        token: str = "",
        passed_on: bool = False,
    ) -> AsyncGenerator[bytes, None]:
        """What its replicas printed, each line with the replica's name. ``token`` is the caller's own, to be shown to
        the server that has them; what one server passed on to another is not passed on again."""
        if tail is not None and tail < 0:
            raise Invalid(f"tail {tail} is no number of lines")
        record = (await self._found(caller, id)).record
        if record.server != self._lives.name and record.members and not passed_on:
            peer = self._lives.peers.at(id, record.server)
            return await printed_at(peer, f"/env-service/{id}/logs", tail, follow, token)

        async def members() -> list[str] | None:
            kept = await self._records.get(id)
            return None if kept is None or kept.record.deleted else [member.id for member in kept.record.members]

        return printed.lines(self._lives, await members() or [], members, tail, follow)

    async def _found(self, caller: Caller, id: str) -> Kept:
        """A service that the caller may see; to everybody else there is none."""
        kept = await self._records.get(id) if _ID.fullmatch(id) else None
        if kept is None or not caller.owns(kept.record.owner):
            raise NotFound(f"there is no service {id[:128]!r}", hint="see 'aenv service list' for yours")
        return kept

    async def _settled(self, id: str, deadline: float) -> ServiceRecord:
        """A service once nothing is under way, or when there is no more time."""
        while True:
            keeper = self.keepers.get(id)
            if keeper is not None:
                record = keeper.record
            elif (kept := await self._records.get(id)) is not None:
                record = kept.record
            else:
                raise NotFound(f"service {id} is gone")
            left = deadline - steady()
            if left <= 0 or status(record) in ("Running", "Failed", "Terminated"):
                return record
            if keeper is not None:
                await keeper.news(left)
            else:
                await asyncio.sleep(min(_POLL, left))

    # Changing, and ending

    async def change(
        self, caller: Caller, id: str, change: ServiceChange, *, token: str = "", wait: float = 0.0
    ) -> Service:
        """Have a service otherwise. Its replicas follow one by one; those that only another number concerns stay."""
        deadline = _deadline(wait)
        resolved: Env | None = None
        for _ in range(_TRIES):
            kept = await self._alive(caller, id)
            record = kept.record
            if change.generation is not None and change.generation != record.generation:
                raise Conflict(
                    f"{id} is at generation {record.generation}, and this is a change of {change.generation}",
                    hint="look at it as it is now, and change that",
                )
            env = record.plan.env
            if ref := wanted_version(change, env, self._lives.engine.name):
                resolved = env = resolved or await self._packages.resolve(ref, token, caller)
            variables = change.environment_variables
            given = record.plan.environment_variables if variables is None else variables
            plan = record.plan
            if env is not plan.env or variables is not None:
                plan, _ = await planned(env, given, None, plan.generation)
                self._lives.engine.check_second(plan.second)
                await self._check_secrets(record.owner, plan)
            replicas = record.replicas if change.replicas is None else change.replicas
            replicas = checked_replicas(replicas, record.volume is not None)
            wanted = changed(record, replicas, plan, self._lives.clock.now())
            if wanted is record:
                break
            if await self._saved(kept, wanted, token, caller):
                break
        else:
            raise _busy(id)
        return self._shown(await self._settled(id, deadline), caller)

    async def restart(self, caller: Caller, id: str, *, token: str = "", wait: float = 0.0) -> Service:
        """Put new replicas in the place of all, one by one."""
        deadline = _deadline(wait)
        for _ in range(_TRIES):
            kept = await self._alive(caller, id)
            record = kept.record
            wanted = changed(record, record.replicas, record.plan, self._lives.clock.now(), again=True)
            if await self._saved(kept, wanted, token, caller):
                return self._shown(await self._settled(id, deadline), caller)
        raise _busy(id)

    async def _alive(self, caller: Caller, id: str) -> Kept:
        kept = await self._found(caller, id)
        if kept.record.deleted:
            raise Conflict(f"{id} was deleted", hint="make a new one")
        return kept

    async def _saved(self, kept: Kept, record: ServiceRecord, token: str, caller: Caller) -> bool:
        """Write a change down; False when somebody else was faster, and it is to be made again."""
        try:
            saved = await self._records.save(kept, _checked(record))
        except Conflict:
            return False
        if keeper := self.keepers.get(record.id):
            keeper.changed(saved, token, caller)
        return True

    async def delete(self, caller: Caller, id: str, *, storage: bool = False) -> None:
        """End a service, and with ``storage`` what it stored. Back when nothing is left, or when it is clear that this
        takes longer: it goes on. One that has ended already is fine."""
        for _ in range(_TRIES):
            kept = await self._found(caller, id)
            record = kept.record
            if record.over:
                if storage:
                    await self._remove_storage(record)
                return
            wanted = msgspec.structs.replace(
                record,
                deleted=True,
                delete_storage=record.delete_storage or storage,
                reason="it was deleted",
                generation=record.generation + (not record.deleted),
                updated_at=self._lives.clock.now(),
            )
            if await self._saved(kept, wanted, "", caller):
                await self._ended(id)
                return
        raise _busy(id)

    async def _ended(self, id: str) -> None:
        """Wait for the end of a service."""
        deadline = steady() + ENDING
        while (left := deadline - steady()) > 0:
            if keeper := self.keepers.get(id):
                await keeper.news(min(left, 1.0))
                continue
            kept = await self._records.get(id)
            if kept is None or kept.record.over:
                return
            await asyncio.sleep(_POLL)

    async def _remove_storage(self, record: ServiceRecord) -> None:
        """Remove what a service that is over had stored, and left behind."""
        if record.volume is None:
            return
        found = await self._records.storage(record.owner, record.volume.name)
        if found is None:
            return
        if await self._is_taken(found.record.service):
            raise Conflict(
                f"storage {record.volume.name!r} is that of service {found.record.service} now",
                hint="delete that service first",
            )
        await remove_storage(self._lives, record.owner, record.volume.name)
        await self._records.write(drop_storage(found))

    # Showing

    def _shown(self, record: ServiceRecord, caller: Caller) -> Service:
        """A service as it is answered. Its tokens are for who may use it."""
        volume = record.volume
        shown = Service(
            id=record.id,
            env=record.plan.env,
            status=status(record),
            created_at=timestamp(record.created_at),
            updated_at=timestamp(record.updated_at),
            replicas=record.replicas,
            available_replicas=0 if record.deleted else record.ready,
            owner=record.owner,
            environment_variables=record.plan.environment_variables,
            pvc_name="" if volume is None else volume.name,
            name=record.name,
            labels=record.labels,
            mount_path="" if volume is None else volume.mount,
            storage_size=record.storage_size,
            port=record.port,
            resources=record.resources,
            generation=record.generation,
            reason=reason(record),
            members=[_replica(record, member) for member in record.members],
        )
        if not record.deleted:
            shown.service_url = f"{self._data_url}/env-service/{record.id}"
            if caller.has(Scope.RUN):
                shown.owner_token = owner_token(self._key, record.id)
                shown.agent_token = agent_token(digest(shown.owner_token))
        return shown


def _replica(record: ServiceRecord, member: Member) -> Replica:
    plans = [plan for plan in (record.plan, record.good) if plan and plan.generation == member.generation]
    return Replica(
        id=member.id,
        status=_STATES[member.phase].value,
        ready=member.phase is Phase.READY,
        env=plans[0].env.id if plans else record.plan.env.name,
        generation=member.generation,
        restarts=member.restarts,
        reason="it leaves" if member.phase is Phase.LEAVING else member.reason,
        created_at=timestamp(member.created_at),
    )


def _checked(record: ServiceRecord) -> ServiceRecord:
    if (size := size_of(record)) > _LARGEST:
        raise TooLarge(f"what is to be kept of the service has {size} bytes; {_LARGEST} is the most")
    return record


def _busy(id: str) -> Conflict:
    return Conflict(f"{id} is being changed by others all the time", hint="try again")


def _deadline(wait: float) -> float:
    return steady() + min(wait, LONGEST_WAIT)
