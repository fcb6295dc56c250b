"""What a service counts, in the text format of Prometheus.

Every call through the gateway is counted here, so a count is an entry of a dict and no more: the usual library takes
ten times as long. How many series a name may have is bounded, whoever chooses the values of its labels.
"""

from __future__ import annotations

import logging
from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TypeVar

from aenv.web.routes import Route

log = logging.getLogger("aenv.web")

MOST_SERIES = 2000
"""Of one name. What comes after that is counted together, under OTHER."""
OTHER = "other"
MILLISECONDS = tuple(float(2**power) for power in range(20))
SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0)
CONTENT_TYPE = "text/plain; version=0.0.4"

F = TypeVar("F", bound="Family")
Labels = tuple[str, ...]
Read = Callable[[], float | Mapping[Labels, float]]
"""What a gauge shows: a number, or one for each combination of its labels."""
Answered = Callable[[Route, int, float, str], None]
"""Told of each answer: its route, its status, the milliseconds it took, and the code of its failure, if it is one."""


class Family:
    """One name, and what is shown under it."""

    kind = ""

    def __init__(self, name: str, about: str, labels: Sequence[str] = ()) -> None:
        self.name = name
        self._head = f"# HELP {name} {about}\n# TYPE {name} {self.kind}"
        self._labels = labels

    def lines(self) -> Iterator[str]:
        yield self._head

    def _line(self, end: str, labels: Labels, value: float, more: str = "") -> str:
        pairs = [f'{name}="{_escaped(label)}"' for name, label in zip(self._labels, labels, strict=True)]
        shown = ",".join([*pairs, more] if more else pairs)
        return f"{self.name}{end}{{{shown}}} {_number(value)}" if shown else f"{self.name}{end} {_number(value)}"


class Counter(Family):
    """Something that only grows."""

    kind = "counter"

    def __init__(self, name: str, about: str, labels: Sequence[str] = ()) -> None:
        super().__init__(name, about, labels)
        self._cells: dict[Labels, list[float]] = {}
        """One number each."""

    def add(self, labels: Labels = (), amount: float = 1) -> None:
        self._cell(labels)[0] += amount

    def adder(self, labels: Labels) -> Callable[[], None]:
        """``add`` of one for these labels, for who does that all the time."""
        cell = self._cell(labels)

        def add() -> None:
            cell[0] += 1

        return add

    def _cell(self, labels: Labels) -> list[float]:
        if labels not in self._cells and len(self._cells) >= MOST_SERIES:
            labels = (OTHER,) * len(labels)
        return self._cells.setdefault(labels, [0.0])

    def lines(self) -> Iterator[str]:
        yield self._head
        for labels, cell in sorted(self._cells.items()):
            yield self._line("", labels, cell[0])


class Histogram(Family):
    """How large something is, each time."""

    kind = "histogram"

    def __init__(self, name: str, about: str, labels: Sequence[str] = (), bounds: Sequence[float] = SECONDS) -> None:
        super().__init__(name, about, labels)
        self._bounds = bounds
        self._most = MOST_SERIES // (len(bounds) + 3)
        self._rows: dict[Labels, list[float]] = {}
        """How many there were up to each bound and above the last, and last their sum."""

    def observe(self, value: float, labels: Labels = ()) -> None:
        row = self._rows.get(labels) or self._row(labels)
        row[bisect_left(self._bounds, value)] += 1
        row[-1] += value

    def observer(self, labels: Labels) -> Callable[[float], None]:
        """``observe`` for these labels, for who does that all the time."""
        row, bounds = self._rows.get(labels) or self._row(labels), self._bounds

        def observe(value: float) -> None:
            row[bisect_left(bounds, value)] += 1
            row[-1] += value

        return observe

    def _row(self, labels: Labels) -> list[float]:
        if len(self._rows) >= self._most:
            labels = (OTHER,) * len(labels)
        return self._rows.setdefault(labels, [0.0] * (len(self._bounds) + 2))

    def lines(self) -> Iterator[str]:
        yield self._head
        for labels, row in sorted(self._rows.items()):
            count = 0.0
            for bound, more in zip((*self._bounds, float("inf")), row[:-1], strict=True):
                count += more
                yield self._line("_bucket", labels, count, f'le="{_number(bound)}"')
            yield self._line("_sum", labels, row[-1])
            yield self._line("_count", labels, count)


class Gauge(Family):
    """Something as it is when it is asked for."""

    kind = "gauge"

    def __init__(self, name: str, about: str, read: Read, labels: Sequence[str] = ()) -> None:
        super().__init__(name, about, labels)
        self._read = read

    def lines(self) -> Iterator[str]:
        found = self._read()
        yield self._head
        rows = {(): found} if isinstance(found, (int, float)) else found
        for labels, value in sorted(rows.items())[:MOST_SERIES]:
            yield self._line("", labels, value)


class Counted(Gauge):
    """Something that only grows, and is counted elsewhere."""

    kind = "counter"


class Metrics:
    """All that one process counts. The answers of its control plane are counted in any case."""

    def __init__(self) -> None:
        self.families: list[Family] = []
        self.listeners: list[Answered] = []
        self.before: list[Callable[[], None]] = []
        """Called before a page is made, by who has something left to count."""
        labels = ("method", "endpoint", "status")
        self._requests = self.counter("aenv_api_requests_total", "Requests to the control plane.", labels)
        self._durations = self.histogram(
            "aenv_api_request_duration_ms", "Milliseconds until their answers began.", labels, MILLISECONDS
        )

    def counter(self, name: str, about: str, labels: Sequence[str] = ()) -> Counter:
        return self._added(Counter(name, about, labels))

    def histogram(
        self, name: str, about: str, labels: Sequence[str] = (), bounds: Sequence[float] = SECONDS
    ) -> Histogram:
        return self._added(Histogram(name, about, labels, bounds))

    def gauge(self, name: str, about: str, read: Read, labels: Sequence[str] = ()) -> Gauge:
        return self._added(Gauge(name, about, read, labels))

    def counted(self, name: str, about: str, read: Read, labels: Sequence[str] = ()) -> Counted:
        return self._added(Counted(name, about, read, labels))

    def _added(self, family: F) -> F:
        self.families.append(family)
        return family

    def answered(self, route: Route, status: int, milliseconds: float, error: str) -> None:
        """The control plane has answered."""
        labels = (route.method or "-", route.path or "-", str(status))
        self._requests.add(labels)
        self._durations.observe(milliseconds, labels)
        for listener in self.listeners:
            listener(route, status, milliseconds, error)

    def text(self) -> str:
        lines: list[str] = []
        for count in self.before:
            count()
        for family in self.families:
            try:
                lines += list(family.lines())
            except Exception:  # what cannot be read is left out, and the rest is shown
                log.exception("%s cannot be shown", family.name)
        return "\n".join([*lines, ""])


def _escaped(label: str) -> str:
    return label.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")


def _number(value: float) -> str:
    if value == float("inf"):
        return "+Inf"
    return str(int(value)) if value == int(value) and abs(value) < 2**53 else repr(float(value))
