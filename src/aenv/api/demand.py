"""How many warm sandboxes are worth having: from the creates of the last minutes. Nothing here waits or writes."""

from __future__ import annotations

import math

WINDOW = 1.0
"""Seconds of creates that come together, at least; where a sandbox takes longer to be made ready, so long."""
MEMORY = 120.0
"""Seconds in which what was wanted at once is forgotten to about a third."""
HEADROOM = 1.25
QUIET = 600.0
"""Seconds without a create after which no more than the least is kept."""
FORGOTTEN = 3600.0
"""Seconds without a create after which nothing is kept, whatever the least is: nobody comes any more."""


class Demand:
    """The creates of one owner and environment."""

    def __init__(self, now: float, burst: float = 0.0) -> None:
        """``burst`` is what came at once before this was made, as far as is known."""
        self.last = now
        """When something was created last."""
        self._recent = 0.0
        """Creates within about a window."""
        self._peak = burst
        """The most of those lately."""
        self._at = now
        self._ready = 0.0
        """Seconds that one takes to be made ready."""

    def note(self, now: float, count: int) -> None:
        """So many are created."""
        self._pass(now)
        self._recent += count
        self._peak = max(self._peak, self._recent)
        self.last = now

    def took(self, seconds: float) -> None:
        """One was made ready in so many seconds."""
        self._ready = seconds if not self._ready else 0.7 * self._ready + 0.3 * seconds

    def target(self, now: float, least: int, most: int) -> int:
        """How many there should be."""
        self._pass(now)
        quiet = now - self.last
        if quiet >= FORGOTTEN:
            return 0
        wanted = 0 if quiet >= QUIET else math.ceil(self._peak * HEADROOM - 0.5)
        return min(max(wanted, least), most)

    def _pass(self, now: float) -> None:
        passed = max(now - self._at, 0.0)
        self._recent *= math.exp(-passed / max(WINDOW, self._ready))
        self._peak *= math.exp(-passed / MEMORY)
        self._at = now
