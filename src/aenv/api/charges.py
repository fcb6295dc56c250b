"""What instances are charged for: numbers in the store, of the platform, of each owner and of each experiment.

They are changed together with the record of the instance, in one change that is refused when somebody else was there
first. So they are at any moment the sum of what the records say, whatever ends a server: what a record counts for is
added when it is written and taken away when it is replaced, and nobody has to count anew.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from typing import Protocol

from msgspec import Struct

from aenv.store import Add

KIND = "use"
PLATFORM = "platform"
INSTANCES, CPU, MEMORY, WAITING, AT = "instances", "cpu", "memory", "waiting", "at"
"""The numbers: how many live, thousandths of a core, bytes, how many wait in the queue, and the Unix time up to which
the creates of a limited rate are used up."""
BURST = 1.0
"""Seconds' worth of a rate that may come at once."""

Amounts = dict[str, float]
Use = Mapping[str, Mapping[str, float]]
"""Numbers by subject."""


class Charge(Struct, frozen=True, array_like=True):
    """What an instance takes while it lives."""

    cpu: int
    """Thousandths of a core."""
    memory: int
    """Bytes."""


class Limits(Struct, frozen=True):
    """What a subject may have at once."""

    instances: float = math.inf
    cpu: float = math.inf
    memory: float = math.inf
    rate: float = math.inf
    """Creates in a second."""
    waiting: float = math.inf

    @property
    def any(self) -> bool:
        """Whether anything may have to wait for it."""
        return min(self.instances, self.cpu, self.memory, self.rate) < math.inf

    def most(self, name: str) -> float:
        return float(getattr(self, name))


LimitsOf = Callable[[str], Limits]
"""The limits of a subject."""
UNLIMITED = Limits()


class Charged(Protocol):
    """A record, as far as it is counted."""

    @property
    def owner(self) -> str: ...
    @property
    def experiment(self) -> str: ...
    @property
    def over(self) -> bool: ...
    @property
    def charge(self) -> Charge | None: ...
    @property
    def queued(self) -> float | None: ...


def subjects(owner: str, experiment: str) -> tuple[str, str, str]:
    """Whom an instance is charged to, the widest first. What has no experiment is one by itself, without a name."""
    return PLATFORM, f"owner:{owner}", f"experiment:{owner}/{experiment}"


def is_named(subject: str) -> bool:
    """Whether a subject is other than what of an owner has no experiment."""
    return subject.find("/") != len(subject) - 1


def counted(record: Charged) -> Amounts:
    """What a record counts for."""
    if record.over or record.charge is None:
        return {}
    if record.queued is not None:
        return {WAITING: 1}
    return {INSTANCES: 1, CPU: record.charge.cpu, MEMORY: record.charge.memory}


def needed(records: Iterable[Charged]) -> Amounts:
    """What these take once they are admitted."""
    found: Amounts = {INSTANCES: 0, CPU: 0, MEMORY: 0}
    for record in records:
        found[INSTANCES] += 1
        if record.charge is not None:
            found[CPU] += record.charge.cpu
            found[MEMORY] += record.charge.memory
    return found


def moved(changes: Iterable[tuple[Charged | None, Charged | None]]) -> dict[str, Amounts]:
    """By how much the numbers change when these records become those. None is a record that is not there."""
    found: dict[str, Amounts] = {}
    for old, new in changes:
        for record, sign in ((old, -1), (new, 1)):
            amounts = counted(record) if record is not None else {}
            if record is None or not amounts:
                continue
            for subject in subjects(record.owner, record.experiment):
                numbers = found.setdefault(subject, {})
                for name, amount in amounts.items():
                    numbers[name] = numbers.get(name, 0) + sign * amount
    return found


def adds(amounts: Mapping[str, Amounts], limits: LimitsOf | None = None, now: float = 0.0) -> list[Add]:
    """The changes of the numbers; with ``limits``, none may grow beyond what its subject may have."""
    return [
        _add(subject, numbers, UNLIMITED if limits is None else limits(subject), now)
        for subject, changed in amounts.items()
        if (numbers := {name: amount for name, amount in changed.items() if amount})
    ]


def _add(subject: str, amounts: Amounts, limits: Limits, now: float) -> Add:
    most = {name: limit for name, amount in amounts.items() if amount > 0 and (limit := limits.most(name)) < math.inf}
    if amounts.get(INSTANCES, 0) <= 0 or limits.rate == math.inf:
        return Add(KIND, subject, amounts, most=most)
    longer = amounts[INSTANCES] / limits.rate
    return Add(KIND, subject, {**amounts, AT: longer}, floors={AT: now}, most={**most, AT: now + BURST + longer})


def unless_waiting(subject: str) -> list[Add]:
    """Changes nothing, and is ``Full`` when something of that subject waits in the queue."""
    return [Add(KIND, subject, {WAITING: 1}, most={WAITING: 1}), Add(KIND, subject, {WAITING: -1})]
