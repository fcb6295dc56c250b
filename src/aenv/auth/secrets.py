"""Secrets of an owner: set, listed by name, given to instances, and taken out of whatever is shown."""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Iterable, Sequence

import msgspec
from msgspec import Struct

from aenv.auth.callers import Caller
from aenv.auth.tokens import checked_owner
from aenv.errors import Conflict, Invalid, NotFound, TooLarge, did_you_mean
from aenv.runtime.hidden import LEAST, Hidden
from aenv.store.base import LARGEST_PAGE, PAGE, Delete, Put, Record, Store
from aenv.wire import Secret, timestamp

NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,127}")
LARGEST = 64 * 1024
"""Bytes of a value."""
MOST = 256
"""Secrets of one owner."""
_KIND = "secret"

Found = tuple[list[Secret], int]


class _Kept(Struct, frozen=True, kw_only=True):
    """A secret as it is in the store, under its owner and name."""

    value: str
    created_at: float
    updated_at: float


class Secrets:
    """The secrets in a store."""

    def __init__(self, store: Store) -> None:
        self._store = store

    async def set(self, caller: Caller, name: str, value: str, *, owner: str | None = None) -> Secret:
        """Keep a value under a name, in place of the one that is there."""
        owner = _owner(caller, owner)
        _check_name(name)
        _check_value(name, value)
        key = f"{owner}/{name}"
        now = time.time()
        there = await self._store.get(_KIND, key)
        if there is None and (await self._store.find(_KIND, {"owner": owner}, limit=0)).total >= MOST:
            raise Conflict(f"{owner} has {MOST} secrets, which is the most", hint="delete some: see 'aenv secret list'")
        created = now if there is None else _kept(there).created_at
        kept = _Kept(value=value, created_at=created, updated_at=now)
        await self._store.change(Put(_KIND, key, msgspec.json.encode(kept), tags={"owner": [owner]}))
        return _shown(key, kept)

    async def delete(self, caller: Caller, name: str, *, owner: str | None = None) -> None:
        owner = _owner(caller, owner)
        _check_name(name)
        record = await self._store.get(_KIND, f"{owner}/{name}")
        if record is None:
            hint = did_you_mean(name, await self._names(owner))
            raise NotFound(f"{owner} has no secret {name!r}", hint=hint)
        await self._store.change(Delete(_KIND, record.key))

    async def list(self, caller: Caller, *, owner: str | None = None, limit: int = PAGE, offset: int = 0) -> Found:
        """The caller's secrets without their values, or, for an admin, everybody's; by name, and how many there are."""
        if owner is not None or not caller.admin:
            owner = _owner(caller, owner)
        page = await self._store.find(_KIND, {"owner": owner} if owner else None, limit=limit, offset=offset)
        return [_shown(record.key, _kept(record)) for record in page.records], page.total

    async def values(self, owner: str, names: Sequence[str]) -> dict[str, str]:
        """What an instance of that owner is given. ``Invalid`` names those that are not set."""
        names = list(dict.fromkeys(names))
        for name in names:
            _check_name(name)
        records = await asyncio.gather(*(self._store.get(_KIND, f"{owner}/{name}") for name in names))
        found = {name: _kept(record).value for name, record in zip(names, records, strict=True) if record is not None}
        if missing := [name for name in names if name not in found]:
            what = "the secret" if len(missing) == 1 else "the secrets"
            raise Invalid(
                f"{owner} has not set {what} {', '.join(missing)}", hint=f"run 'aenv secret set {missing[0]}'"
            )
        return found

    async def _names(self, owner: str) -> Sequence[str]:
        page = await self._store.find(_KIND, {"owner": owner}, limit=LARGEST_PAGE)
        return [record.key.partition("/")[2] for record in page.records]


def hide(text: str, values: Iterable[str]) -> str:
    """``text`` with ``***`` for each of these values, as they are, as they are written in JSON, and by longer lines."""
    hidden = Hidden(values)
    return hidden.text(text) if hidden.any else text


def _owner(caller: Caller, owner: str | None) -> str:
    return caller.owner if owner is None else checked_owner(caller, owner, "secrets")


def _check_name(name: str) -> None:
    if not NAME.fullmatch(name):
        raise Invalid(
            f"{name[:64]!r} is not a secret's name",
            hint="it is a variable's: letters, digits and '_', at most 128, and no digit first",
        )


def _check_value(name: str, value: str) -> None:
    """What is wrong with a value is said without it."""
    try:
        size = len(value.encode())
    except UnicodeEncodeError:
        raise Invalid(f"the value of {name} has half a character", hint="give text in UTF-8") from None
    if size > LARGEST:
        raise TooLarge(f"the value of {name} has {size} bytes; {LARGEST} is the most")
    if "\0" in value:
        raise Invalid(f"the value of {name} has a NUL character", hint="a variable cannot hold one: encode it as text")
    if len(value.strip()) < LEAST:
        raise Invalid(
            f"the value of {name} is too short to be kept out of logs",
            hint=f"give at least {LEAST} characters; what is no secret belongs into environment_variables",
        )
    if value != value.strip() and "\n" not in value.strip():
        raise Invalid(
            f"the value of {name} has white space at its beginning or end",
            hint="leave it out: logs may show it without",
        )


def _kept(record: Record) -> _Kept:
    return msgspec.json.decode(record.value, type=_Kept)


def _shown(key: str, kept: _Kept) -> Secret:
    owner, _, name = key.partition("/")
    return Secret(name=name, owner=owner, created_at=timestamp(kept.created_at), updated_at=timestamp(kept.updated_at))
