"""How a replica is: what it answers when it is asked for its health, and how often in a row it did not."""

from __future__ import annotations

import asyncio
from typing import NamedTuple

import msgspec

from aenv import http
from aenv.api.gateway.places import Place
from aenv.errors import AEnvError

PATIENCE = 10.0
"""Seconds that an answer may take."""
OUT, OVER = 3, 6
"""Failures in a row after which a replica is given no calls, and after which it is started again."""
_MOST = 64 * 1024
_LONGEST = 300


class Look(NamedTuple):
    """One look at a replica."""

    reason: str
    """Why it is not well; empty when it is."""
    calls: int | None
    """How many it has in flight, as far as it says; None when it did not answer."""


async def look(place: Place, patience: float = PATIENCE) -> Look:
    """Ask a replica how it is."""
    headers = f"Authorization: Bearer {place.token}\r\n".encode()
    try:
        async with asyncio.timeout(patience):
            answer = await http.request("GET", place.url, "/health", headers=headers, retries=0, most=_MOST)
    except TimeoutError:
        return Look(f"it did not answer its health check within {patience:g} s", None)
    except AEnvError as exc:
        return Look(f"it could not be asked for its health check: {exc.message}", None)
    said = answer.headers.get(b"aenv-calls", b"")
    calls = int(said) if said.isdigit() and len(said) < 10 else 0
    if answer.status == 200:
        return Look("", calls)
    return Look(f"its health check fails: {_said(answer.body) or f'status {answer.status}'}", calls)


def _said(body: bytes) -> str:
    try:
        found = msgspec.json.decode(body, type=dict[str, object])
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return ""
    return str(found.get("error") or "")[:_LONGEST]


class Health:
    """Of the replicas of a service, by their ids."""

    def __init__(self) -> None:
        self._failures: dict[str, int] = {}
        self._reasons: dict[str, str] = {}

    def note(self, id: str, reason: str) -> None:
        """A look at it said this."""
        self._failures[id] = self._failures.get(id, 0) + 1 if reason else 0
        self._reasons[id] = reason

    def reason(self, id: str) -> str:
        """Why it is to have no calls; empty when it may have some."""
        return self._reasons[id] if self._failures.get(id, 0) >= OUT else ""

    def is_over(self, id: str) -> bool:
        """Whether it is to be started again."""
        return self._failures.get(id, 0) >= OVER

    def keep(self, ids: set[str]) -> None:
        """Forget all others."""
        for gone in self._failures.keys() - ids:
            del self._failures[gone], self._reasons[gone]
