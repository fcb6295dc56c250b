"""What processes use, as ``/proc`` has it: for sandboxes that no control group counts. Linux only."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path

_TICKS = os.sysconf("SC_CLK_TCK")


def processor(pids: Iterable[int]) -> float:
    """Seconds of a processor that these processes used, and those of their children that they waited for."""
    ticks = 0
    for pid in pids:
        with suppress(OSError):  # it has ended meanwhile
            ticks += sum(map(int, _stat(pid)[11:15]))
    return ticks / _TICKS


def memory(pids: Iterable[int]) -> int:
    """Bytes that these processes have in memory. What several processes share counts for each in part."""
    found = 0
    for pid in pids:
        with suppress(OSError):
            rows = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
            found += next((int(row.split()[1]) * 1024 for row in rows if row.startswith("Pss:")), 0)
    return found


def beside(pid: int) -> set[int]:
    """Every process of the process namespace that ``pid`` is in."""
    wanted = os.readlink(f"/proc/{pid}/ns/pid")
    found = set()
    for other in _everybody():
        with suppress(OSError):
            if os.readlink(f"/proc/{other}/ns/pid") == wanted:
                found.add(other)
    return found


def below(pid: int) -> set[int]:
    """A process, its session, and all that came from them and has not been left to others."""
    parents, found = {}, {pid}
    for other in _everybody():
        with suppress(OSError):
            _, parent, _, session, *_ = _stat(other)
            parents[other] = int(parent)
            if int(session) == pid:
                found.add(other)
    before: set[int] = set()
    while found != before:
        before = set(found)
        found |= {child for child, parent in parents.items() if parent in before}
    return found


def _everybody() -> Iterator[int]:
    return (int(name) for name in os.listdir("/proc") if name.isdigit())


def _stat(pid: int) -> list[str]:
    """From its state on, which follows its name: the parent is the second, the session the fourth."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
