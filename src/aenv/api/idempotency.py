"""Creating once, however often it is asked: a caller's key, what was asked under it, and what came of it.

The note is written in one change with the records of the instances, before an engine is asked. So whoever asks again
finds either nothing of the first request or all of it, whatever ended the server in between.
"""

from __future__ import annotations

import hashlib

import msgspec
from msgspec import Struct

from aenv.errors import Invalid
from aenv.store import Put, Store

KIND = "idempotency"
KEPT_FOR = 24 * 3600.0
"""Seconds that a key is remembered."""
LONGEST = 255
"""Characters of a key."""


class Note(Struct, frozen=True):
    """What was made under a key."""

    body: str
    """Digest of the request."""
    ids: list[str]


class Keys:
    """The keys of one store."""

    def __init__(self, store: Store) -> None:
        self._store = store

    async def find(self, owner: str, key: str, request: Struct) -> list[str] | None:
        """What was made under a key, by its ids; ``Invalid`` when it was for something else."""
        found = await self._store.get(KIND, _name(owner, key))
        if found is None:
            return None
        note = msgspec.json.decode(found.value, type=Note)
        if note.body != _digest(request):
            raise Invalid(
                "this Idempotency-Key was used for another request", hint="make a new key for each new request"
            )
        return note.ids


def note(owner: str, key: str, request: Struct, ids: list[str], now: float) -> Put:
    """The change that keeps a key. It is refused when the key is there already."""
    value = msgspec.json.encode(Note(_digest(request), ids))
    return Put(KIND, _name(owner, key), value, expect=0, expires_at=now + KEPT_FOR)


def check(key: str) -> None:
    if not key.isprintable() or not 1 <= len(key) <= LONGEST:
        raise Invalid(f"Idempotency-Key is not a line of 1 to {LONGEST} characters", hint="use a random text, a UUID")


def _name(owner: str, key: str) -> str:
    return hashlib.sha256(f"{owner}\0{key}".encode()).hexdigest()


def _digest(request: Struct) -> str:
    return hashlib.sha256(msgspec.json.encode(request, order="deterministic")).hexdigest()
