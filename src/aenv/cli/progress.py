"""How a run of episodes goes, for a person who watches: one line that changes, or now and then a new one."""

from __future__ import annotations

import asyncio
import sys
import time
from collections import deque

from aenv.cli.output import say
from aenv.rl.groups import Tally

OFTEN, SELDOM = 0.2, 10.0
"""Seconds between two looks: on a terminal, and where every look is a line of its own."""
SILENT = 2.0
"""Seconds for which nothing is said: what is done by then needs no progress."""
WINDOW = 30.0
"""Seconds over which the speed is taken."""


class Progress:
    """Told of every episode that ends; what it says of them is up to ``watch``."""

    def __init__(self, tally: Tally, total: int | None) -> None:
        self._tally = tally
        self._total = total
        self._terminal = sys.stderr.isatty()
        self._begun = time.monotonic()
        self._width = 0
        self._ends: deque[float] = deque(maxlen=2000)

    def ended(self) -> None:
        self._ends.append(time.monotonic())

    async def watch(self) -> None:
        """Say how it goes until this is cancelled, also when nothing ends for a while."""
        await asyncio.sleep(SILENT)
        while True:
            self._show(self.line(time.monotonic()))
            await asyncio.sleep(OFTEN if self._terminal else SELDOM)

    def line(self, now: float) -> str:
        """Done, reward so far, failures by kind, speed, time left."""
        tally = self._tally
        parts = [f"{tally.episodes}/{self._total}" if self._total else str(tally.episodes), "episodes"]
        if tally.mean is not None:
            parts.append(f"  reward {tally.mean:.3f}")
        if tally.failed:
            kinds = ", ".join(f"{kind} {count}" for kind, count in tally.failures.most_common(3))
            parts.append(f"  failed {tally.failed} ({kinds})")
        speed = self._speed(now)
        if speed:
            parts.append(f"  {speed:.3g}/s")
            if self._total and self._total > tally.episodes:
                parts.append(f"  {_length((self._total - tally.episodes) / speed)} left")
        return " ".join(parts)

    def done(self) -> None:
        """Leave the line as it is, and go on below it."""
        if self._width:
            sys.stderr.write("\n")
            self._width = 0

    def _speed(self, now: float) -> float:
        while self._ends and self._ends[0] < now - WINDOW:
            self._ends.popleft()
        since = self._ends[0] if len(self._ends) == self._ends.maxlen else max(self._begun, now - WINDOW)
        return len(self._ends) / (now - since) if now > since else 0.0

    def _show(self, line: str) -> None:
        if not self._terminal:
            say(line)
            return
        sys.stderr.write(f"\r{line.ljust(self._width)}")
        sys.stderr.flush()
        self._width = len(line)


def _length(seconds: float) -> str:
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"
