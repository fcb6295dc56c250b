"""What a process holds, seen from outside, and whether it keeps growing."""

from __future__ import annotations

import os
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from benchmarks.processes import resident_mb

WARM_UP = 0.4
"""Share of the time after which a process has grown to its size."""
MOST = 1.25
_ESTABLISHED, _LISTENS = "01", "0A"
_SLACK = {"memory": 4.0, "descriptors": 32, "threads": 16}


class State(NamedTuple):
    """What a process holds."""

    memory: float
    descriptors: int
    """Without the connections that clients keep open to it: how many those are is theirs to say."""
    threads: int

    @classmethod
    def of(cls, pid: int) -> State:
        open_files = os.listdir(f"/proc/{pid}/fd")
        return cls(
            resident_mb(pid), len(open_files) - _of_clients(pid, open_files), len(os.listdir(f"/proc/{pid}/task"))
        )

    def grown_since(self, warm: State) -> list[str]:
        """What is more than noise over what it was."""
        return [name for name, slack in _SLACK.items() if getattr(self, name) > getattr(warm, name) * MOST + slack]

    def __str__(self) -> str:
        return f"{self.memory:6.1f} MB  {self.descriptors:4d} descriptors  {self.threads:4d} threads"


def _of_clients(pid: int, descriptors: Iterable[str]) -> int:
    """Connections to a port that the process listens on, whose other side is open."""
    names = []
    for descriptor in descriptors:
        with suppress(OSError):
            names.append(os.readlink(f"/proc/{pid}/fd/{descriptor}"))
    lines = Path(f"/proc/{pid}/net/tcp").read_text().splitlines()[1:]
    own = [(row[1].rpartition(":")[2], row[3]) for row in map(str.split, lines) if f"socket:[{row[9]}]" in names]
    ports = {port for port, state in own if state == _LISTENS}
    return sum(port in ports and state == _ESTABLISHED for port, state in own)
