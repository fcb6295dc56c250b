"""What a process holds, seen from outside, and whether it keeps growing."""

from __future__ import annotations

import os
from typing import NamedTuple

from benchmarks.processes import resident_mb

WARM_UP = 0.2
"""Share of the time after which a process has grown to its size."""
MOST = 1.25
_SLACK = {"memory": 4.0, "descriptors": 32, "threads": 16}


class State(NamedTuple):
    """What a process holds."""

    memory: float
    descriptors: int
    threads: int

    @classmethod
    def of(cls, pid: int) -> State:
        return cls(resident_mb(pid), len(os.listdir(f"/proc/{pid}/fd")), len(os.listdir(f"/proc/{pid}/task")))

    def grown_since(self, warm: State) -> list[str]:
        """What is more than noise over what it was."""
        return [name for name, slack in _SLACK.items() if getattr(self, name) > getattr(warm, name) * MOST + slack]

    def __str__(self) -> str:
        return f"{self.memory:6.1f} MB  {self.descriptors:4d} descriptors  {self.threads:4d} threads"
