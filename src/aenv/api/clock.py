"""What time it is for expiry, and what becomes of expiry when the wall clock jumps.

The times in records are of the wall clock, since servers that share a store, and the same server after a restart,
share nothing else. A wall clock may be set, an hour forward or back, and then every instance would be over at once, or
live on. So each look at the clock compares it with one that cannot be set and that goes on while the machine sleeps.
Where the two part by more than ``JUMP``, the wall clock was set: whoever keeps times is told by how much, and moves
them along, so that everything has as much time left as before. What is slower than that (a clock that is being slewed)
is followed. A clock that is set while no server runs is not noticed; it costs, or gives, what it was set by, once.
"""

from __future__ import annotations

import time
from collections.abc import Callable

JUMP = 2.0
"""Seconds by which the wall clock may run ahead or behind between two looks."""
_STEADY = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)


def steady() -> float:
    """Seconds of a clock that nobody sets."""
    return time.clock_gettime(_STEADY)


class Clock:
    """The wall clock, with a word to ``moved`` when it jumps. To be looked at every few seconds."""

    def __init__(
        self,
        moved: Callable[[float], None],
        *,
        wall: Callable[[], float] = time.time,
        steady: Callable[[], float] = steady,
    ) -> None:
        self._moved = moved
        self._wall = wall
        self._steady = steady
        self._offset = wall() - steady()

    def now(self) -> float:
        wall = self._wall()
        offset = wall - self._steady()
        jump, self._offset = offset - self._offset, offset
        if abs(jump) > JUMP:
            self._moved(jump)
        return wall
