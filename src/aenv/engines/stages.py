"""Where the time of a start goes, as whoever starts it sees it: one phase after the other, named when it begins."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from time import monotonic


class Stages:
    """The phases of one start, in the order in which they came."""

    def __init__(self, before: Mapping[str, float] | None = None) -> None:
        """``before``: seconds by phase that had passed already."""
        self._before = dict(before or {})
        self._marks: list[tuple[float, str]] = []
        """When each phase began; no name is none."""
        self._followed: list[tuple[float, Stages, float | None]] = []

    def begin(self, name: str) -> None:
        """The next phase begins, and with it ends the one before."""
        self._marks.append((monotonic(), name))

    def end(self) -> None:
        """The last phase ends."""
        self._marks.append((monotonic(), ""))

    @contextmanager
    def following(self, other: Stages) -> Iterator[None]:
        """For the length of a block, what is waited for is another start."""
        self.end()
        place, began = len(self._followed), monotonic()
        self._followed.append((began, other, None))
        try:
            yield
        finally:
            self._followed[place] = (began, other, monotonic())

    @property
    def seconds(self) -> dict[str, float]:
        """Seconds by phase, so far."""
        now = monotonic()
        spans = list(self._between(0.0, now))
        if self._followed:
            for began, other, ended in self._followed:
                spans += other._between(began, now if ended is None else ended)
            spans.sort()
        found = dict(self._before)
        for began, name, ended in spans:
            found[name] = found.get(name, 0.0) + ended - began
        return {name: round(taken, 6) for name, taken in found.items()}

    def _between(self, first: float, last: float) -> Iterator[tuple[float, str, float]]:
        for place, (began, name) in enumerate(self._marks):
            ended = self._marks[place + 1][0] if place + 1 < len(self._marks) else last
            start, end = max(began, first), min(ended, last)
            if name and end > start:
                yield start, name, end
