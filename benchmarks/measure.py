"""Rounds and lines: measuring two sides in turn, and what is kept of it."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import TypeVar

S = TypeVar("S")


@dataclass(frozen=True, slots=True)
class Line:
    """One number of ours beside one to compare it with."""

    name: str
    """Unique, the key in ``ratios.json``."""
    unit: str
    ours: float
    against: str = ""
    """Who or what it is compared with."""
    other: float | None = None
    ratio: float | None = None
    """Cost of ours over cost of the other; below 1 is better for us."""
    limit: float | None = None
    """The most that ``ratio`` may be, wherever it is measured."""


@dataclass(frozen=True, slots=True)
class Effort:
    """How much is measured."""

    quick: bool = False

    def rounds(self, full: int) -> int:
        return max(5, full // 2) if self.quick else full


def interleave(rounds: int, *sides: Callable[[], S]) -> list[list[S]]:
    """The samples of each side. Every round asks all of them, in an order that turns from round to round."""
    samples: list[list[S]] = [[] for _ in sides]
    for number in range(rounds):
        sys.stderr.write(".")
        sys.stderr.flush()
        order = range(len(sides)) if number % 2 == 0 else range(len(sides) - 1, -1, -1)
        for side in order:
            samples[side].append(sides[side]())
    sys.stderr.write("\n")
    return samples


def line(
    name: str,
    unit: str,
    ours: Sequence[float],
    against: str = "",
    other: Sequence[float] | None = None,
    *,
    limit: float | None = None,
    scale: float = 1.0,
) -> Line:
    """A line of costs. Its ratio is the median of the ratios of each round: what slows the machine slows both sides."""
    if other is None:
        return Line(name, unit, median(ours) * scale)
    ratio = median(mine / theirs for mine, theirs in zip(ours, other, strict=True))
    return Line(name, unit, median(ours) * scale, against, median(other) * scale, ratio, limit)


def rate(name: str, ours: Sequence[float], against: str, other: Sequence[float], *, limit: float | None) -> Line:
    """A line of calls a second, from seconds a call. Its ratio is that of the seconds."""
    ratio = median(mine / theirs for mine, theirs in zip(ours, other, strict=True))
    return Line(name, "calls/s", 1 / median(ours), against, 1 / median(other), ratio, limit)
