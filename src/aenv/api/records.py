"""What the API service writes down of an instance, and how it is found and changed in the store.

A record is made before the engine is asked for anything and outlives its instance by an hour. It holds no token and no
value of a secret. Every change says which revision it replaces, so several servers may work on one record; and with it
change the numbers of what is in use (``charges``), here and nowhere else.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Mapping, Sequence

import msgspec
from msgspec import Struct

from aenv.api import charges
from aenv.api.charges import Charge, LimitsOf
from aenv.models import Second, State, Volume
from aenv.store import Change, Delete, Put, Record, Store
from aenv.wire import Env

log = logging.getLogger("aenv.api")

KIND = "instance"
FOREVER = 253402214400.0
"""When what has no end ends, as far as a time must be written: in the year 9999."""
EXPERIMENT = "experiment"
"""The label that says which experiment an instance is of."""


class Wanted(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What was asked for. It is kept until the instance runs: a server that died in between goes on from it."""

    datasource: str = ""
    environment_variables: dict[str, str] = {}
    arguments: list[str] = []
    seed: int | None = None
    resources: dict[str, str] = {}
    startup_timeout: float = 500.0
    volumes: list[Volume] = []
    second: Second | None = None
    forked_from: str = ""
    own_random: bool = False


class InstanceRecord(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """An instance, as it is written down. Times are Unix times."""

    id: str
    server: str
    """The name of the server, or of the servers, that it belongs to: whose engine has it."""
    by: str = ""
    """The boot id of the server that makes it, until it runs: when that one is gone, another goes on. Once it is over,
    the name of the server that ended it."""
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
    started_at: float = 0.0
    """When it came to run; 0 before."""
    secrets: list[str] = []
    """Names of the variables whose values are secret."""
    wanted: Wanted | None = None
    warm: str = ""
    """The boot id of the server that made it, when it is a sandbox that waits to become an instance: then it is
    nobody's, and in no list."""
    claimed: bool = False
    """Whether it was warm, and is to be told what it is instead of being made."""
    service: str = ""
    """The service that it is a replica of. It has its service's token, and no end by itself."""
    phases: dict[str, float] = {}
    """Where the time of its start went, in seconds."""
    charge: Charge | None = None
    """What it is charged for, from its admission to its end."""
    queued: float | None = None
    """Since when it waits to be admitted; None when it was."""
    batch: str = ""
    """What waits to be admitted together with it has the same; and how many those are."""
    together: int = 0
    needs: dict[str, str] = {}
    """The instances that it depends on, by alias: its parts, which live and end with it."""
    parent: str = ""
    """The instance that it is a part of."""

    @property
    def experiment(self) -> str:
        return self.labels.get(EXPERIMENT, "")

    @property
    def over(self) -> bool:
        return self.status.over

    @property
    def lacks_room(self) -> bool:
        """Whether it was admitted, and its engine has no room for it."""
        return self.status is State.PENDING and self.queued is None and self.reason != ""

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
        "as": ["warm" if record.warm else f"replica of {record.service}" if record.service else "instance"],
        **{_label(name): [value] for name, value in record.labels.items()},
    }
    return Put(KIND, record.id, _encode(record), expect=expect, tags=tags, order=record.created_at)


def _label(name: str) -> str:
    return f"label:{name}"


class Records:
    """The records of instances in a store."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self.shared = store.shared
        """Whether other servers may change them, too."""

    async def write(self, *changes: Change) -> list[int]:
        """Make all of these changes or none, and return the revisions that they led to."""
        return await self._store.change(*changes)

    async def save(self, kept: Kept, record: InstanceRecord) -> Kept:
        """Replace a record; ``Conflict`` when somebody else has changed it."""
        return (await self.save_all([(kept, record)]))[0]

    async def save_all(
        self,
        changes: Sequence[tuple[Kept | None, InstanceRecord]],
        more: Sequence[Change] = (),
        *,
        limits: LimitsOf | None = None,
        now: float = 0.0,
    ) -> list[Kept]:
        """Replace all of these records or none, and make those that are not there; and with it what else is to change.

        What they count for changes in the same step, from what each was: a record with revision 0 is one that the store
        has lost, with its numbers. With ``limits``, ``Full`` when that is more than there may be.
        """
        puts = [put(record, 0 if kept is None else kept.revision) for kept, record in changes]
        amounts = charges.moved((kept.record if kept and kept.revision else None, record) for kept, record in changes)
        revisions = await self.write(*puts, *more, *charges.adds(amounts, limits, now))
        return [Kept(record, revision) for (_, record), revision in zip(changes, revisions, strict=False)]

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
            if (kept := _readable(found)) is not None:
                yield kept

    async def since(self, revision: int) -> tuple[list[Kept], int]:
        """Some of the records that were changed after that revision, and the last revision that was looked at: the
        same one when there is no more."""
        found = await self._store.since(KIND, revision)
        kept = [one for one in map(_readable, found) if one is not None]
        return kept, found[-1].revision if found else revision

    async def remove(self, kept: Kept) -> None:
        """Forget a record; ``Conflict`` when somebody else has changed it."""
        await self._store.change(Delete(KIND, kept.record.id, kept.revision))


def _readable(found: Record) -> Kept | None:
    """A record among others; None for one that a server of another version wrote in a way that is not known here."""
    try:
        return _kept(found)
    except msgspec.MsgspecError as exc:
        log.warning("the record of %s cannot be read here, and is left alone: %s", found.key, exc)
        return None


def _kept(found: Record) -> Kept:
    return Kept(_decode(found.value), found.revision)
