"""Where the time of a start goes: by phase, also while one is under way."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from aenv.api.clock import steady
from aenv.models import told as told


class Phases:
    """Seconds by phase. Phases do not overlap; those of an engine, which are within its own, have a dot."""

    def __init__(self, so_far: Mapping[str, float] | None = None) -> None:
        self._seconds = dict(so_far or {})
        self._under_way: tuple[str, float] | None = None

    @contextmanager
    def of(self, name: str) -> Iterator[None]:
        """A phase for the length of a block."""
        began = steady()
        self._under_way = (name, began)
        try:
            yield
        finally:
            self._under_way = None
            self._seconds[name] = self._seconds.get(name, 0.0) + steady() - began

    def within(self, name: str, seconds: Mapping[str, float]) -> None:
        """What a phase consists of, as whoever did it says."""
        self._seconds |= {f"{name}.{part}": taken for part, taken in seconds.items()}

    @property
    def seconds(self) -> dict[str, float]:
        found = dict(self._seconds)
        if self._under_way is not None:
            name, began = self._under_way
            found[name] = found.get(name, 0.0) + steady() - began
        return {name: round(taken, 6) for name, taken in found.items()}


def laid_out(seconds: Mapping[str, float], began: float) -> Iterator[tuple[str, float, float]]:
    """Each phase with its begin and its end, if the first began then: one follows the other, and what a phase
    consists of is within it."""
    start = began
    for name, taken in seconds.items():
        if "." in name:
            continue
        yield name, start, start + taken
        inner = start
        for part, within in seconds.items():
            if part.startswith(f"{name}."):
                yield part, inner, min(inner + within, start + taken)
                inner += within
        start += taken
