"""Limits: of the platform as a whole, of each owner, and of each experiment.

A subject is ``platform``, ``owner`` for every owner that has no limits of its own, ``owner:NAME``, ``experiment`` for
every experiment that has none, or ``experiment:OWNER/NAME``. What has no limits is not limited, but for the queue.
"""

from __future__ import annotations

import asyncio
import math
import re
import time
from collections.abc import Mapping
from typing import Annotated

import msgspec
from msgspec import Struct

from aenv.api.charges import AT, CPU, INSTANCES, KIND, MEMORY, PLATFORM, WAITING, Limits, Use, is_named
from aenv.api.clock import steady
from aenv.auth.callers import Caller, Scope
from aenv.errors import Invalid, NotFound, TooLarge, did_you_mean
from aenv.models import NAME
from aenv.project import fields
from aenv.store import Add, Delete, Put, Store
from aenv.web.routes import Call, Paged, Query, Route
from aenv.wire import PAGE, Quota, QuotaRequest, timestamp

RECORDS = "quota"
FRESH = 1.0
"""Seconds after which limits that were read are read again."""
MOST = 1000
"""Subjects that may have limits of their own."""
WAITING_HERE, WAITING_EACH = 10_000, 5_000
"""Instances that may wait in the queue, of all owners and of each, where no limit says otherwise."""
_OWNERS, _EXPERIMENTS = "owner", "experiment"
_LARGEST = 10**9
_SLOWEST, _FASTEST = 1e-6, 1e6
_EXPERIMENT = re.compile(r"experiment:([^/]+)/(.{1,256})")


class Limit(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The limits of one subject, as they are written down."""

    instances: int | None = None
    creates_per_second: float | None = None
    cpu: str | None = None
    memory: str | None = None
    waiting: int | None = None
    updated_at: float

    @property
    def limits(self) -> Limits:
        return Limits(
            instances=_number(self.instances),
            cpu=math.inf if self.cpu is None else fields.quantity(self.cpu) * 1000,
            memory=math.inf if self.memory is None else fields.quantity(self.memory),
            rate=_number(self.creates_per_second),
            waiting=_number(self.waiting),
        )


class Table:
    """All limits that there are, as they were at one moment."""

    def __init__(self, given: Mapping[str, Limit]) -> None:
        self.given = given
        self._limits = {subject: limit.limits for subject, limit in given.items()}
        self._queue = {PLATFORM: Limits(waiting=WAITING_HERE), _OWNERS: Limits(waiting=WAITING_EACH)}

    def source(self, subject: str) -> str:
        """The subject whose limits hold for this one."""
        kind = subject.partition(":")[0]
        return kind if subject not in self.given and is_named(subject) else subject

    def of(self, subject: str) -> Limits:
        """The limits of a subject of ``charges``. What has no experiment is limited by its owner alone."""
        source = self.source(subject)
        found = self._limits.get(source, Limits())
        default = self._queue.get(source.partition(":")[0])
        if default is not None and found.waiting == math.inf:
            return default if source not in self._limits else msgspec.structs.replace(found, waiting=default.waiting)
        return found


class Quotas:
    """The limits of a platform, and what is in use under them."""

    def __init__(self, store: Store) -> None:
        self.store = store
        self._table = Table({})
        self._read_at = -math.inf
        self._reading = asyncio.Lock()

    async def table(self) -> Table:
        """The limits as they were not long ago."""
        if steady() - self._read_at >= FRESH:
            async with self._reading:
                if steady() - self._read_at >= FRESH:
                    began = steady()
                    self._table = Table(await self._read())
                    self._read_at = began
        return self._table

    async def _read(self) -> dict[str, Limit]:
        return {record.key: msgspec.json.decode(record.value, type=Limit) async for record in self.store.scan(RECORDS)}

    async def list(self, caller: Caller, *, limit: int, offset: int) -> tuple[list[Quota], int]:
        """The limits that concern a caller, and for an admin all, with what is in use; also where nothing is limited,
        and something in use."""
        table, use = Table(await self._read()), await self.store.counts(KIND)
        named = {subject for subject, used in use.items() if is_named(subject) and _shown(used)}
        found = sorted(subject for subject in {*table.given, *named, PLATFORM} if _concerns(subject, caller))
        page = found[offset : offset + limit]
        return [_quota(subject, table, use.get(subject, {})) for subject in page], len(found)

    async def set(self, subject: str, request: QuotaRequest, now: float) -> Quota:
        """Give a subject limits, in place of those that it has. What lives beyond them lives on."""
        subject = checked(subject)
        _check(request)
        given = await self._read()
        if subject not in given and len(given) >= MOST:
            raise TooLarge(
                f"{len(given)} subjects have limits of their own, which is the most",
                hint="give those that are alike the same: set 'owner' or 'experiment', and delete their own",
            )
        limit = Limit(**msgspec.structs.asdict(request), updated_at=now)
        table, use = Table({**given, subject: limit}), await self.store.counts(KIND)
        await self.store.change(Put(RECORDS, subject, msgspec.json.encode(limit)), *_forgiven(subject, table, use))
        self._read_at = -math.inf
        return _quota(subject, table, use.get(subject, {}))

    async def delete(self, subject: str) -> None:
        """Take a subject's own limits away."""
        subject = checked(subject)
        table, use = Table(await self._read()), await self.store.counts(KIND)
        if subject not in table.given:
            raise NotFound(f"{subject} has no limits of its own", hint="see 'aenv quota list'")
        await self.store.change(Delete(RECORDS, subject), *_forgiven(subject, table, use))
        self._read_at = -math.inf


def checked(subject: str) -> str:
    """A subject that limits may be given to."""
    kind, colon, name = subject.partition(":")
    if not colon and kind in (PLATFORM, _OWNERS, _EXPERIMENTS):
        return subject
    if kind == _OWNERS and NAME.fullmatch(name):
        return subject
    found = _EXPERIMENT.fullmatch(subject)
    if found is not None and NAME.fullmatch(found[1]) and found[2].isprintable():
        return subject
    known = (PLATFORM, _OWNERS, "owner:NAME", _EXPERIMENTS, "experiment:OWNER/NAME")
    raise Invalid(f"{subject[:128]!r} is nothing that has limits", hint=did_you_mean(subject[:64], known))


def _forgiven(subject: str, table: Table, use: Use) -> list[Add]:
    """What a rate of these limits has used up in advance counts no more, when they become others: a low rate may have
    done so for days."""
    clocks = {one: used[AT] for one, used in use.items() if used.get(AT) and table.source(one) == subject}
    return [Add(KIND, one, {AT: -at}) for one, at in clocks.items()]


def _check(request: QuotaRequest) -> None:
    for name, number in (("instances", request.instances), ("waiting", request.waiting)):
        if number is not None and not 0 <= number <= _LARGEST:
            raise Invalid(f"{name} {number} is not between 0 and {_LARGEST}")
    rate = request.creates_per_second
    if rate is not None and not _SLOWEST <= rate <= _FASTEST:
        hint = "to let nobody create anything, set instances to 0"
        raise Invalid(f"creates_per_second {rate:g} is not between {_SLOWEST:g} and {_FASTEST:g}", hint=hint)
    for name, text in (("cpu", request.cpu), ("memory", request.memory)):
        if text is None:
            continue
        for _, phrase in fields.BY_PATH[f"deployConfig.{name}"].check(text):
            raise Invalid(f"{name} {phrase}, found {text[:64]!r}")
        if not math.isfinite(fields.quantity(text)):
            raise Invalid(f"{name} {text[:64]!r} is too much")


def _concerns(subject: str, caller: Caller) -> bool:
    if caller.admin or ":" not in subject:
        return True
    return subject == f"owner:{caller.owner}" or subject.startswith(f"experiment:{caller.owner}/")


def _quota(subject: str, table: Table, use: Mapping[str, float]) -> Quota:
    given = table.given.get(table.source(subject))
    limits = table.of(subject)
    shown = Quota(subject=subject, used=_shown(use))
    if limits.waiting < math.inf:
        shown.waiting = int(limits.waiting)
    if given is not None:
        shown.instances, shown.creates_per_second = given.instances, given.creates_per_second
        shown.cpu, shown.memory = given.cpu, given.memory
        shown.updated_at = timestamp(given.updated_at) if subject in table.given else ""
    return shown


def _shown(use: Mapping[str, float]) -> dict[str, float]:
    """What is in use, as people count it."""
    found = {name: use[name] for name in (INSTANCES, CPU, MEMORY, WAITING) if use.get(name)}
    if CPU in found:
        found[CPU] /= 1000
    return found


def _number(given: float | None) -> float:
    return math.inf if given is None else given


# Over HTTP

Subject = Annotated[
    str, Query("subject", "platform, owner, owner:NAME, experiment or experiment:OWNER/NAME; NAME is the label's value")
]


class Handlers:
    """What each route of limits does."""

    def __init__(self, quotas: Quotas) -> None:
        self._quotas = quotas

    async def list(self, call: Call, limit: int = PAGE, offset: int = 0) -> Paged[Quota]:
        """Limits, and what is in use under them: of the platform and of the caller, and, for an admin, of everybody.

        `owner` and `experiment` are for each that has no limits of its own.
        """
        return Paged(*await self._quotas.list(call.caller, limit=limit, offset=offset))

    async def set(self, call: Call, subject: Subject, body: QuotaRequest) -> Quota:
        """Limit the platform, an owner or an experiment.

        It replaces all limits that the subject has; what is not given is not limited. What lives beyond a limit lives
        on, and what is asked for then waits. Every server knows within a second.
        """
        call.target = subject
        return await self._quotas.set(subject, body, time.time())

    async def delete(self, call: Call, subject: Subject) -> None:
        """Take a subject's own limits away: then those for each hold for it, where there are any."""
        call.target = subject
        await self._quotas.delete(subject)


def routes(quotas: Quotas) -> list[Route]:
    handle = Handlers(quotas)
    return [
        Route("GET", "/quota", handle.list, Scope.READ),
        Route("PUT", "/quota", handle.set, Scope.ADMIN),
        Route("DELETE", "/quota", handle.delete, Scope.ADMIN),
    ]
