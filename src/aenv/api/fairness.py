"""Who is next when not all that is asked for has room. Nothing here waits, writes or looks at a clock.

The owner who has the least comes first, and of what that owner asks for, the experiment that has the least; of those
who have as much, the one that has waited longest since it was given something; within an experiment, whoever came
first. Who is stopped by a limit of its own experiment or owner is passed over by others, and holds back only what is
behind it there. Who is next and has no room on the platform holds the place: what becomes free is kept for it, so a
large request is not overtaken for ever; unless nothing is to be kept, since that went on for long in vain: then it
holds back only what is behind it in its experiment. An experiment that was given nothing for long is before all that.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator, Mapping
from heapq import heapify, heappop, heappush

from msgspec import Struct

from aenv.api.charges import AT, BURST, CPU, INSTANCES, MEMORY, PLATFORM, Amounts, Limits, LimitsOf, Use, subjects

LONG = 60.0
"""Seconds after which an experiment that waits, and was given nothing, comes first."""
AT_ONCE = 256
"""Requests that one plan admits at most."""

Group = tuple[str, str]
"""An owner, and an experiment of that owner."""


class Request(Struct, frozen=True):
    """Instances that are admitted together or not at all."""

    id: str
    owner: str
    experiment: str
    since: float
    """When it came."""
    need: Amounts
    elsewhere: bool = False
    """Whether another server has it: it is left room, and admitted there."""

    @property
    def group(self) -> Group:
        return self.owner, self.experiment


class Plan(Struct):
    """What is to be done, and why not more."""

    turns: list[Request]
    """Who is admitted, in this order."""
    holder: Request | None = None
    """Who is next, and has no room on the platform."""
    stopped: dict[str, str] = {}
    """Which subjects have no more room for who is next there, and of what: the name of a number."""


def plan(
    groups: Mapping[Group, Iterable[Request]],
    use: Use,
    limits: LimitsOf,
    *,
    now: float,
    served: Mapping[str, float] | None = None,
    passed: Collection[str] = (),
    keep: bool = True,
    most: int = AT_ONCE,
) -> Plan:
    """Who is admitted now. ``groups`` has who waits, the first first; ``served`` says when each owner and each
    experiment was last given something; requests of ``passed`` are left out; ``keep``: whether room is kept for who is
    next and has none."""
    view = _View(use, limits, now)
    lines = _lines(groups, view, passed, served or {})
    found = Plan([], stopped={})
    closed: set[str] = set()
    for line in _order(lines, view, now, closed, served or {}):
        request = line.head
        if (stop := view.stop(request)) is not None:
            subject, name = stop
            found.stopped[subject] = name
            if subject == PLATFORM and keep:
                found.holder = request
                break
            closed.add(line.subjects[2] if subject == PLATFORM else subject)
            continue
        view.take(request)
        line.advance(now)
        found.turns.append(request)
        if len(found.turns) >= most:
            break
    return found


def order(
    groups: Mapping[Group, Iterable[Request]],
    use: Use,
    limits: LimitsOf,
    *,
    now: float,
    served: Mapping[str, float] | None = None,
) -> Iterator[Request]:
    """All who wait, in the order in which they would be admitted if there were room for one after another."""
    view = _View(use, limits, now)
    for line in _order(_lines(groups, view, (), served or {}), view, now, (), served or {}):
        view.take(line.head)
        yield line.head
        line.advance(now)


class _Line:
    """The requests of one group, the first first."""

    __slots__ = ("_rest", "group", "head", "is_empty", "subjects", "waited")

    def __init__(self, group: Group, requests: Iterator[Request], served: Mapping[str, float]) -> None:
        self.group = group
        self.subjects = subjects(*group)
        self._rest = requests
        self.is_empty = False
        self.head: Request
        self.waited: float
        """Since when its first waits, and it was given nothing."""
        self.advance(served.get(self.subjects[2], 0.0))

    def advance(self, served: float) -> None:
        """It was given something then: who is behind comes first now."""
        head = next(self._rest, None)
        if head is None:
            self.is_empty = True
        else:
            self.head = head
            self.waited = max(head.since, served)


class _View:
    """What is in use, with what this plan adds to it."""

    def __init__(self, use: Use, limits: LimitsOf, now: float) -> None:
        self._use = use
        self._now = now
        self._limits = limits
        self._known: dict[str, tuple[Amounts, Limits]] = {}
        self._scale = limits(PLATFORM)

    def _of(self, subject: str) -> tuple[Amounts, Limits]:
        found = self._known.get(subject)
        if found is None:
            found = self._known[subject] = dict(self._use.get(subject, {})), self._limits(subject)
        return found

    def share(self, subject: str) -> float:
        """How much of the platform a subject has: of what it has most of, where that is limited."""
        used, scale = self._of(subject)[0], self._scale
        shares = [
            used.get(name, 0.0) / most if most else math.inf
            for name, most in ((INSTANCES, scale.instances), (CPU, scale.cpu), (MEMORY, scale.memory))
            if most < math.inf
        ]
        return max(shares) if shares else used.get(INSTANCES, 0.0)

    def is_possible(self, request: Request) -> bool:
        """Whether it would have room if nothing were in use."""
        for subject in subjects(request.owner, request.experiment):
            limits = self._of(subject)[1]
            if any(amount > limits.most(name) for name, amount in request.need.items()):
                return False
        return True

    def stop(self, request: Request) -> tuple[str, str] | None:
        """The narrowest subject that has no room for it, and of what."""
        for subject in reversed(subjects(request.owner, request.experiment)):
            used, limits = self._of(subject)
            for name, amount in request.need.items():
                if used.get(name, 0.0) + amount > limits.most(name):
                    return subject, name
            if limits.rate < math.inf and used.get(AT, 0.0) > self._now + BURST:
                return subject, AT
        return None

    def take(self, request: Request) -> None:
        for subject in subjects(request.owner, request.experiment):
            used, limits = self._of(subject)
            for name, amount in request.need.items():
                used[name] = used.get(name, 0.0) + amount
            if limits.rate < math.inf:
                used[AT] = max(used.get(AT, 0.0), self._now) + request.need[INSTANCES] / limits.rate


def _lines(
    groups: Mapping[Group, Iterable[Request]], view: _View, passed: Collection[str], served: Mapping[str, float]
) -> list[_Line]:
    """Without requests that limits, as they are now, will never let in: they hold back nobody."""

    def waiting(requests: Iterable[Request]) -> Iterator[Request]:
        return (one for one in requests if one.id not in passed and view.is_possible(one))

    lines = (_Line(group, waiting(requests), served) for group, requests in groups.items())
    return [line for line in lines if not line.is_empty]


def _order(
    lines: list[_Line], view: _View, now: float, stopped: Collection[str], served: Mapping[str, float]
) -> Iterator[_Line]:
    """Lines in the order in which they are next. Whoever takes one advances it, or else has put into ``stopped`` what
    is stopped: of that nothing comes any more."""
    long = sorted((line for line in lines if now - line.waited > LONG), key=lambda line: line.waited)
    for line in long:
        if not line.is_empty and not any(subject in stopped for subject in line.subjects):
            yield line
    owners: dict[str, list[_Ranked]] = {}
    last = dict(served)
    for line in lines:
        if not line.is_empty:
            owners.setdefault(line.subjects[1], []).append(_ranked(line, view))

    def rank(owner: str) -> tuple[float, float, str]:
        return view.share(owner), max(owners[owner][0][1], last.get(owner, 0.0)), owner

    for ranked in owners.values():
        heapify(ranked)
    heap = [rank(owner) for owner in owners]
    heapify(heap)
    while heap:
        owner = heappop(heap)[2]
        ranked = owners[owner]
        line = heappop(ranked)[4]
        if owner in stopped:
            continue
        if line.subjects[2] not in stopped:
            first = line.head
            yield line
            if line.is_empty or line.head is not first:
                last[owner] = now
            if not line.is_empty and not any(subject in stopped for subject in line.subjects):
                heappush(ranked, _ranked(line, view))
        if ranked:
            heappush(heap, rank(owner))


_Ranked = tuple[float, float, float, str, _Line]
"""How much it has, since when it waits, and since when its first does; its name; the line."""


def _ranked(line: _Line, view: _View) -> _Ranked:
    return view.share(line.subjects[2]), line.waited, line.head.since, line.group[1], line
