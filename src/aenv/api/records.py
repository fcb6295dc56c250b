"""What the API service writes down of an instance, and how it is found and changed in the store.

A record is made before the engine is asked for anything and outlives its instance by an hour. It holds no token and no
value of a secret. Every change says which revision it replaces, so several servers may work on one record.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence

import msgspec
from msgspec import Struct

from aenv.models import State
from aenv.store import Change, Delete, Put, Record, Store
from aenv.wire import Env

KIND = "instance"


class Wanted(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What was asked for. It is kept until the instance runs: a server that died in between goes on from it."""

    datasource: str = ""
    environment_variables: dict[str, str] = {}
    arguments: list[str] = []
    seed: int | None = None
    resources: dict[str, str] = {}
    startup_timeout: float = 500.0


class InstanceRecord(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """An instance, as it is written down. Times are Unix times."""

    id: str
    server: str
    """The name of the server, or of the servers, that it belongs to: whose engine has it."""
    owner: str
    env: Env
    """Without what only a reader of the hub is interested in."""
    status: State
    reason: str = ""
    created_at: float
    updated_at: float
    ttl: float
    expires_at: float
    lease: float | None = None
    lease_until: float | None = None
    """When it ends if nobody is heard of. Who serves the instance knows better: it is written now and then."""
    labels: dict[str, str] = {}
    url: str = ""
    """Where the sandbox is."""
    boot: str = ""
    ran: bool = False
    """Whether it ever ran: what fails then is lost, and did not fail to start."""
    secrets: list[str] = []
    """Names of the variables whose values are secret."""
    wanted: Wanted | None = None

    @property
    def over(self) -> bool:
        return self.status.over

    @property
    def deadline(self) -> float:
        """When its time is over, as far as it is written down."""
        return self.expires_at if self.lease_until is None else min(self.expires_at, self.lease_until)


class Kept(Struct, frozen=True):
    """A record with its revision."""

    record: InstanceRecord
    revision: int


_encode = msgspec.json.Encoder().encode
_decode = msgspec.json.Decoder(InstanceRecord).decode


def slim(env: Env) -> Env:
    """An environment without what is long and of no use to an instance."""
    return msgspec.structs.replace(env, readme="", tools=[], functions=[], rewards=[], history=[])


def size_of(record: InstanceRecord) -> int:
    """Bytes of a record, as it is kept."""
    return len(_encode(record))


def put(record: InstanceRecord, expect: int) -> Put:
    """The change that writes a record."""
    tags = {
        "env": [record.env.name, f"{record.env.name}@{record.env.version}"],
        "owner": [record.owner],
        "server": [record.server],
        "status": [record.status.value],
        **{_label(name): [value] for name, value in record.labels.items()},
    }
    return Put(KIND, record.id, _encode(record), expect=expect, tags=tags, order=record.created_at)


def _label(name: str) -> str:
    return f"label:{name}"


class Records:
    """The records of instances in a store."""

    def __init__(self, store: Store) -> None:
        self._store = store

    async def write(self, *changes: Change) -> list[int]:
        """Make all of these changes or none, and return the revisions that they led to."""
        return await self._store.change(*changes)

    async def save(self, kept: Kept, record: InstanceRecord) -> Kept:
        """Replace a record; ``Conflict`` when somebody else has changed it."""
        [revision] = await self._store.change(put(record, kept.revision))
        return Kept(record, revision)

    async def get(self, id: str) -> Kept | None:
        found = await self._store.get(KIND, id)
        return None if found is None else _kept(found)

    async def find(
        self, tags: Mapping[str, str | Sequence[str]], labels: Mapping[str, str], *, limit: int, offset: int
    ) -> tuple[list[InstanceRecord], int]:
        """A page of the records that bear these tags and labels, the newest first, and how many there are."""
        wanted = {**tags, **{_label(name): value for name, value in labels.items()}}
        page = await self._store.find(KIND, wanted, limit=limit, offset=offset)
        return [_decode(found.value) for found in page.records], page.total

    async def scan(self) -> AsyncIterator[Kept]:
        async for found in self._store.scan(KIND):
            yield _kept(found)

    async def remove(self, kept: Kept) -> None:
        """Forget a record; ``Conflict`` when somebody else has changed it."""
        await self._store.change(Delete(KIND, kept.record.id, kept.revision))


def _kept(found: Record) -> Kept:
    return Kept(_decode(found.value), found.revision)
