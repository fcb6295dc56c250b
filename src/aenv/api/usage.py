"""What was used, by hour, owner and experiment: how it is kept, found and forgotten.

All of it is numbers of the store that are only ever added to. Those of one day are a kind of their own, so that a
question about a day reads that day, and an old day is forgotten as a whole.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Iterator
from contextlib import suppress
from datetime import UTC, datetime
from itertools import islice

from aenv.auth.callers import Caller
from aenv.auth.tokens import checked_owner
from aenv.errors import Conflict, Invalid
from aenv.store import Add, Put, Store
from aenv.wire import Usage, timestamp

KIND = "usage"
HOUR = 3600
DAY = 24 * HOUR
KEPT_FOR = 400
"""Days."""
LONGEST = 100
"""Days that one question may be about."""
MOST = 1000
"""Experiments of one owner and hour that a server tells apart: their names are the callers' to choose."""
OTHERS = "(others)"
"""What the rest of them are called."""
_OLDEST = "oldest"
"""The record that says which day is the oldest that is kept."""
_DAYS, _ROWS = 2, 2000
"""Most days and rows that are forgotten at once: a clock that is wrong for a while does not cost everything."""


class Used:
    """Amounts that are to be added to what is kept."""

    def __init__(self) -> None:
        self._rows: dict[tuple[int, str, str], dict[str, float]] = {}

    def __bool__(self) -> bool:
        return bool(self._rows)

    def add(self, at: float, owner: str, experiment: str, number: str, amount: float) -> None:
        """Add to a number of the hour in which ``at`` is."""
        row = self._rows.setdefault((int(at // HOUR), owner, experiment), {})
        row[number] = row.get(number, 0) + amount

    def span(self, began: float, ended: float, owner: str, experiment: str) -> None:
        """Add the seconds of an instance that ran so long, each to its hour."""
        for at, seconds in _pieces(began, ended):
            self.add(at, owner, experiment, "instance_seconds", seconds)

    def rows(self) -> Iterator[tuple[int, str, str, dict[str, float]]]:
        for (hour, owner, experiment), numbers in self._rows.items():
            yield hour, owner, experiment, numbers


class Ledger:
    """What is kept of usage in a store."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._hour = 0
        self._experiments: dict[str, set[str]] = {}
        """Of the newest hour, by owner."""

    def changes(self, used: Used) -> list[Add]:
        """What adds this to what is kept."""
        return [
            Add(_kind(hour // 24), f"{hour % 24:02}/{owner}/{self._known(hour, owner, experiment)}", numbers)
            for hour, owner, experiment, numbers in used.rows()
        ]

    def _known(self, hour: int, owner: str, experiment: str) -> str:
        if hour > self._hour:
            self._hour, self._experiments = hour, {}
        known = self._experiments.setdefault(owner, set())
        if experiment not in known:
            if len(known) >= MOST:
                return OTHERS
            known.add(experiment)
        return experiment

    async def find(
        self,
        caller: Caller,
        *,
        since: float,
        until: float,
        owner: str | None = None,
        experiment: str | None = None,
        limit: int,
        offset: int,
    ) -> tuple[list[Usage], int]:
        """A page of the caller's usage, or, for an admin, of everybody's, in the hours from ``since`` to ``until``, the
        newest first; and how many rows there are."""
        if owner is not None:
            checked_owner(caller, owner, "usage figures")
        elif not caller.admin:
            owner = caller.owner
        if not since < until:
            raise Invalid(f"{timestamp(since)} is not before {timestamp(until)}")
        if until - since > LONGEST * DAY:
            raise Invalid(f"usage of more than {LONGEST} days is asked for", hint="ask for a part of them at a time")
        first, end = int(since // HOUR), math.ceil(until / HOUR)
        found = []
        for day in range((end - 1) // 24, first // 24 - 1, -1):
            for key, numbers in (await self._store.counts(_kind(day))).items():
                hour, whose, label = key.split("/", 2)
                at = day * 24 + int(hour)
                if first <= at < end and owner in (None, whose) and experiment in (None, label):
                    found.append((-at, whose, label, numbers))
            await asyncio.sleep(0)  # many days keep nobody waiting
        found.sort(key=lambda row: row[:3])
        page = [_usage(*row) for row in found[offset : offset + limit]]
        return page, len(found)

    async def forget(self, now: float) -> None:
        """Remove some of what is too old. Of several servers one does it: each changes the same record first."""
        today = int(now // DAY)
        found = await self._store.get(KIND, _OLDEST)
        if found is None:
            with suppress(Conflict):
                await self._store.change(Put(KIND, _OLDEST, b"%d" % today, expect=0))
            return
        day, revision = int(found.value), found.revision
        for _ in range(_DAYS):
            if day >= today - KEPT_FOR:
                return
            kind = _kind(day)
            numbers = await self._store.counts(kind)
            old = [
                Add(kind, key, {name: -amount for name, amount in amounts.items()})
                for key, amounts in islice(numbers.items(), _ROWS)
            ]
            day += len(numbers) <= _ROWS
            try:
                revision, *_ = await self._store.change(Put(KIND, _OLDEST, b"%d" % day, expect=revision), *old)
            except Conflict:
                return


def _kind(day: int) -> str:
    return f"{KIND}/{datetime.fromtimestamp(day * DAY, UTC):%Y-%m-%d}"


def _pieces(began: float, ended: float) -> Iterator[tuple[float, float]]:
    """A time, cut where an hour ends: when each piece begins, and its seconds."""
    while began < ended:
        end = min((began // HOUR + 1) * HOUR, ended)
        yield began, end - began
        began = end


def _usage(minus_hour: int, owner: str, experiment: str, numbers: dict[str, float]) -> Usage:
    return Usage(
        hour=timestamp(-minus_hour * HOUR),
        owner=owner,
        experiment=experiment,
        instances=round(numbers.get("instances", 0)),
        instance_seconds=round(numbers.get("instance_seconds", 0.0), 3),
        cpu_seconds=round(numbers.get("cpu_seconds", 0.0), 3),
        calls=round(numbers.get("calls", 0)),
    )
