"""How many episodes go on at a time: as many as are allowed, and fewer while the platform cannot keep up."""

from __future__ import annotations

import asyncio
from collections import deque

from aenv.errors import Invalid, NetworkError, RateLimited, StartFailed
from aenv.rl.trajectory import Failed

CONGESTED = frozenset(kind.code for kind in (RateLimited, NetworkError))
"""Failures that say that too much was asked at a time. So does a start that fails late; one that fails at once does so
for a reason of its own."""
LATE = 10.0
"""Seconds after which a start is late."""
SHRINK = 0.7
"""What is left of the limit when one of them comes."""


class Gate:
    """Lets in so many at a time, in the order in which they came."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.inside = 0
        self._waiting: deque[asyncio.Future[None]] = deque()

    async def enter(self) -> None:
        if self.inside < self.limit and not self._waiting:
            self.inside += 1
            return
        turn = asyncio.get_running_loop().create_future()
        self._waiting.append(turn)
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():  # it was let in, and does not come
                self.leave()
            raise

    def leave(self) -> None:
        self.inside -= 1
        self._admit()

    def resize(self, limit: int) -> None:
        """Another limit from now on. Whoever is inside stays."""
        self.limit = limit
        self._admit()

    def _admit(self) -> None:
        while self._waiting and self.inside < self.limit:
            turn = self._waiting.popleft()
            if not turn.done():
                self.inside += 1
                turn.set_result(None)


class Pace:
    """The limits of a run: they begin at the most, shrink by a share when the platform is congested, and grow by one
    for as many episodes as there are at a time that find it well."""

    def __init__(self, most: int, prefetch: int, *, adaptive: bool) -> None:
        if most < 1:
            raise Invalid(f"concurrency is {most}", hint="give a number from 1 on")
        if prefetch < 0:
            raise Invalid(f"prefetch is {prefetch}", hint="give a number from 0 on")
        self.begun = Gate(most + prefetch)
        """Episodes that are begun, and that nobody has taken yet."""
        self.playing = Gate(most)
        """Of these, the ones whose agent plays."""
        self._most = most
        self._prefetch = prefetch
        self._adaptive = adaptive
        self._exact = float(most)
        self._shrunk = -1.0
        """When it last shrank, in the loop's time."""

    def ended(self, failed: Failed | None, began: float) -> None:
        """An episode that began then has ended so."""
        if not self._adaptive:
            return
        now = asyncio.get_running_loop().time()
        if failed is None:
            self._exact = min(self._exact + 1 / self._exact, self._most)
        elif began > self._shrunk and _is_congestion(failed, now - began):  # of what was asked after the last time
            self._exact = max(self._exact * SHRINK, 1.0)
            self._shrunk = now
        if (limit := int(self._exact)) != self.playing.limit:
            self.playing.resize(limit)
            self.begun.resize(limit + self._prefetch)


def _is_congestion(failed: Failed, seconds: float) -> bool:
    return failed.kind in CONGESTED or (failed.kind == StartFailed.code and seconds > LATE)
