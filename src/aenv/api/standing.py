"""What those who wait in the queue are told: which place they have, how long it may take, and what is in their way."""

from __future__ import annotations

import math
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import chain
from typing import NamedTuple

from aenv.api import charges, fairness
from aenv.api.charges import AT, CPU, INSTANCES, MEMORY, Charged, Use, subjects
from aenv.api.clock import steady
from aenv.api.fairness import Group, Plan, Request
from aenv.api.quotas import Table
from aenv.errors import Invalid

REASON = "waits in the queue"
_GOOD = 20
"""For how many times the processor time that it took to find them places are good."""
_QUICK = 0.002
"""Seconds within which places are found anew for each who comes."""
_HISTORY = 32
"""Admissions from which it is told how long one takes."""
_LATER = 5.0
"""Seconds after which a client that found the queue full may ask again, when nothing is known."""
_NAMES = {INSTANCES: "instances", AT: "creates in a second"}


class Standing(NamedTuple):
    """Where something is in the queue."""

    position: int
    """From 1, among those who wait for the same."""
    estimate: float | None
    """Seconds that it is likely to wait, when enough is known to say."""
    reason: str


class Standings:
    """The places in a queue, as it was looked at last."""

    def __init__(self) -> None:
        self.table = Table({})
        self.use: Use = {}
        self.plan = Plan([])
        self.served: dict[str, float] = {}
        """When something of each owner and experiment was last admitted here, of those who wait."""
        self._history: dict[str, deque[float]] = {}
        """When something of each subject that waits was admitted lately."""
        self._places: dict[str, tuple[int, int, int]] = {}
        """Of each who waits: among all, among its owner's, and in its experiment."""
        self._here: dict[str, int] = {}
        """How many of each subject wait here."""
        self._elsewhere: Counter[str] = Counter()
        self._good_until = self._took = 0.0

    def admitted(self, group: Group, now: float) -> None:
        self.served |= dict.fromkeys(subjects(*group)[1:], now)
        for subject in subjects(*group):
            self._history.setdefault(subject, deque(maxlen=_HISTORY)).append(steady())

    def tidy(self, here: Iterable[Group], elsewhere: Mapping[Group, int] | None = None) -> None:
        """Keep nothing of those who do not wait any more, here or, so many, elsewhere."""
        self._elsewhere = Counter()
        for group, count in (elsewhere or {}).items():
            self._elsewhere.update(dict.fromkeys(subjects(*group), count))
        waiting = {*here, *(elsewhere or ())}
        known = {subject for group in waiting for subject in subjects(*group)}
        self.served = {name: at for name, at in self.served.items() if name in known}
        self._history = {subject: times for subject, times in self._history.items() if subject in known}

    def of(self, request: Request, groups: Callable[[], Mapping[Group, Sequence[Request]]], now: float) -> Standing:
        """Where one of those who wait is. It is counted with those who are stopped by the same limit."""
        if steady() >= self._good_until or (request.id not in self._places and self._took < _QUICK):
            self._rank(groups(), now)
        elif request.id not in self._places:
            self._place(request)  # behind all others, until it is found out
        level, name, subject = 0, "", charges.PLATFORM
        for place, candidate in enumerate(subjects(*request.group)):
            if candidate in self.plan.stopped:
                level, name, subject = place, self.plan.stopped[candidate], candidate
        place, gap = self._places[request.id][level], self._gap(subject)
        position = round(place * (1 + self._elsewhere[subject] / self._here[subject]))
        estimate = None if gap is None else round(gap * place, 1)
        about = "" if estimate is None else f", about {max(estimate, 1):.0f} s"
        why = f" ({_stop(subject, name, self.table)})" if name else ""
        return Standing(position, estimate, f"{REASON}: {_ordinal(position)}{about}{why}")

    def _rank(self, groups: Mapping[Group, Sequence[Request]], now: float) -> None:
        began = time.thread_time()
        self._places, self._here = {}, {}
        ordered = fairness.order(groups, self.use, self.table.of, now=now, served=self.served)
        for request in chain(ordered, *groups.values()):  # some are in the order only when their limits are others
            if request.id not in self._places:
                self._place(request)
        self._took = time.thread_time() - began
        self._good_until = steady() + _GOOD * self._took

    def _place(self, request: Request) -> None:
        """The next place is this one's."""
        names, here = subjects(*request.group), self._here
        for name in names:
            here[name] = here.get(name, 0) + 1
        self._places[request.id] = (here[names[0]], here[names[1]], here[names[2]])

    def _gap(self, subject: str) -> float | None:
        """Seconds between two admissions, as it was lately."""
        times = self._history.get(subject)
        return None if times is None or len(times) < 2 else (steady() - times[0]) / len(times)

    def later(self, subject: str) -> float:
        """Seconds after which somebody who found no place may ask again."""
        gap = self._gap(subject)
        return _LATER if gap is None else min(max(gap, 1.0), 60.0)


def check(made: Sequence[Charged], table: Table) -> None:
    """See to it that these could be admitted together if nothing else were there."""
    need = charges.needed(made)
    for subject in subjects(made[0].owner, made[0].experiment):
        limits = table.of(subject)
        for name, amount in need.items():
            if amount > (most := limits.most(name)):
                raise Invalid(
                    f"{_amount(name, amount)} is asked for, and {subject} may have {_amount(name, most)}",
                    hint="ask for less, or ask an admin for more: 'aenv quota list' shows the limits",
                )


def _stop(subject: str, name: str, table: Table) -> str:
    """What is not to be had now, and why."""
    return f"{subject} may have {_amount(name, table.of(subject).most('rate' if name == AT else name))}"


def _amount(name: str, number: float) -> str:
    if math.isinf(number):
        return "more"
    if name == CPU:
        return f"{number / 1000:g} cpu"
    if name == MEMORY:
        return f"{number / 2**30:.4g}Gi of memory"
    return f"{number:g} {_NAMES[name]}"


def _ordinal(number: int) -> str:
    ending = "th" if 10 <= number % 100 <= 20 else {1: "st", 2: "nd", 3: "rd"}.get(number % 10, "th")
    return f"{number}{ending}"
