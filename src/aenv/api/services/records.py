"""What is written down of a service and of its storage, and how both are found and changed in the store.

A service's record says what is wanted and which sandboxes there are for it. Owners change what is wanted, and its
keeper what there is; every change says which revision it replaces. The sandboxes themselves are records of instances.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from enum import StrEnum

import msgspec
from msgspec import Struct

from aenv.models import Second, Volume
from aenv.store import Change, Delete, Put, Record, Store
from aenv.wire import Env

KIND = "service"
STORAGE = "storage"
KEPT_FOR = 3600.0
"""Seconds that the record of a service outlives it."""


class Phase(StrEnum):
    """Where a replica is in its life."""

    STARTING = "starting"
    READY = "ready"
    """It takes calls."""
    UNWELL = "unwell"
    """It runs, and its health check fails."""
    DOWN = "down"
    """It has ended, and is to be started again."""
    LEAVING = "leaving"
    """It takes no new calls but those of its sessions, and ends when those that it has are over."""


class Plan(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What every replica is to be."""

    generation: int
    """The service's, when this was asked for."""
    env: Env
    environment_variables: dict[str, str] = {}
    secrets: list[str] = []
    startup_timeout: float
    second: Second | None = None


class Member(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One replica, and after its end the place that it leaves for another."""

    id: str
    """Of its sandbox, or of the last that stood here."""
    generation: int
    """Of the plan that it was made by."""
    phase: Phase
    created_at: float
    url: str = ""
    """Where it is reached, once it ran."""
    restarts: int = 0
    failures: int = 0
    """How often in a row it failed: the more, the longer until it is started again."""
    reason: str = ""
    closed: bool = False
    """Whether it takes no calls of its sessions any more, either: it is about to end."""


class ServiceRecord(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A service, as it is written down. Times are Unix times."""

    id: str
    name: str
    owner: str
    server: str
    """The name of the server, or of the servers, whose engine has its replicas."""
    keeper: str
    """The boot id of the process that looks after it."""
    created_at: float
    updated_at: float
    replicas: int
    generation: int
    """Grows with every change of what is wanted."""
    plan: Plan
    good: Plan | None = None
    """The last plan by which all replicas ran: what an update that fails goes back to."""
    members: list[Member] = []
    reason: str = ""
    """What became of the last update."""
    labels: dict[str, str] = {}
    resources: dict[str, str] = {}
    port: int
    volume: Volume | None = None
    storage_size: str = ""
    """As it was written."""
    deleted: bool = False
    delete_storage: bool = False
    over: bool = False
    """Whether nothing of it is left."""

    @property
    def wanted(self) -> int:
        """How many replicas there are to be."""
        return 0 if self.deleted else self.replicas

    @property
    def ready(self) -> int:
        """How many take calls."""
        return sum(member.phase is Phase.READY for member in self.members)

    @property
    def staying(self) -> list[Member]:
        return [member for member in self.members if member.phase is not Phase.LEAVING]


class StorageRecord(Struct, frozen=True, kw_only=True):
    """Storage, which outlives the service that it was made for."""

    owner: str
    name: str
    size: int
    storage_size: str
    service: str
    """Who has it; empty for nobody."""


class Kept(Struct, frozen=True):
    """A service's record with its revision."""

    record: ServiceRecord
    revision: int


class KeptStorage(Struct, frozen=True):
    record: StorageRecord
    revision: int


_encode = msgspec.json.Encoder().encode
_decode = msgspec.json.Decoder(ServiceRecord).decode
_decode_storage = msgspec.json.Decoder(StorageRecord).decode


def size_of(record: ServiceRecord) -> int:
    """Bytes of a record, as it is kept."""
    return len(_encode(record))


def put(record: ServiceRecord, expect: int) -> Put:
    """The change that writes a record."""
    env = record.plan.env
    tags = {
        "env": [env.name, f"{env.name}@{env.version}"],
        "owner": [record.owner],
        "keeper": [record.keeper],
        "deleted": ["yes" if record.deleted else "no"],
        "over": ["yes" if record.over else "no"],
    }
    return Put(KIND, record.id, _encode(record), expect=expect, tags=tags, order=record.created_at)


def put_storage(record: StorageRecord, expect: int) -> Put:
    return Put(STORAGE, _storage(record.owner, record.name), _encode(record), expect=expect)


def free_storage(kept: KeptStorage) -> Put:
    """The change by which nobody has storage any more that is kept."""
    return put_storage(msgspec.structs.replace(kept.record, service=""), kept.revision)


def drop_storage(kept: KeptStorage) -> Delete:
    """The change that forgets storage."""
    return Delete(STORAGE, _storage(kept.record.owner, kept.record.name), kept.revision)


class Records:
    """The records of services in a store."""

    def __init__(self, store: Store) -> None:
        self._store = store

    async def write(self, *changes: Change) -> list[int]:
        """Make all of these changes or none, and return the revisions that they led to."""
        return await self._store.change(*changes)

    async def save(self, kept: Kept, record: ServiceRecord) -> Kept:
        """Replace a record; ``Conflict`` when somebody else has changed it."""
        [revision] = await self._store.change(put(record, kept.revision))
        return Kept(record, revision)

    async def write_again(self, record: ServiceRecord, found: Kept | None) -> Kept:
        """Write what the store has lost of a service, in the place of what it has; and of its storage."""
        changes: list[Change] = [put(record, 0 if found is None else found.revision)]
        volume = record.volume
        if volume is not None and await self.storage(volume.owner, volume.name) is None:
            lost = StorageRecord(
                owner=volume.owner,
                name=volume.name,
                size=volume.size,
                storage_size=record.storage_size,
                service=record.id,
            )
            changes.append(put_storage(lost, 0))
        [revision, *_] = await self._store.change(*changes)
        return Kept(record, revision)

    async def get(self, id: str) -> Kept | None:
        found = await self._store.get(KIND, id)
        return None if found is None else _kept(found)

    async def find(
        self, tags: Mapping[str, str | Sequence[str]], *, limit: int, offset: int = 0
    ) -> tuple[list[Kept], int]:
        """A page of the records that bear these tags, the newest first, and how many there are."""
        page = await self._store.find(KIND, tags, limit=limit, offset=offset)
        return [_kept(found) for found in page.records], page.total

    async def scan(self) -> AsyncIterator[Kept]:
        async for found in self._store.scan(KIND):
            yield _kept(found)

    async def remove(self, kept: Kept) -> None:
        """Forget a record; ``Conflict`` when somebody else has changed it."""
        await self._store.change(Delete(KIND, kept.record.id, kept.revision))

    async def storage(self, owner: str, name: str) -> KeptStorage | None:
        found = await self._store.get(STORAGE, _storage(owner, name))
        return None if found is None else KeptStorage(_decode_storage(found.value), found.revision)


def _kept(found: Record) -> Kept:
    return Kept(_decode(found.value), found.revision)


def _storage(owner: str, name: str) -> str:
    return f"{owner}/{name}"
