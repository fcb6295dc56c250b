"""Which processes belong to a shell, and how they are ended."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Iterable, Iterator, Mapping, Set
from contextlib import suppress
from typing import NamedTuple

MARK = "MINI_TERMINAL"
"""The variable by which a process is known as ours when neither its parent nor its session tells."""
PATIENCE = 5.0
"""Seconds for which what does not die is sent another signal."""
_ZOMBIE = "ZXx"
_TITLE = 80


class Process(NamedTuple):
    pid: int
    parent: int
    session: int
    started: int
    """Clock ticks since boot; 0 where it is not known."""
    state: str = "R"


def now() -> int:
    """This moment, as ``Process.started`` counts; 0 where that is not known."""
    if not hasattr(time, "CLOCK_BOOTTIME"):
        return 0
    return int(time.clock_gettime(time.CLOCK_BOOTTIME) * os.sysconf("SC_CLK_TCK"))


def children(pid: int) -> frozenset[int]:
    """The children of a process at this moment; none where the system does not say at once."""
    try:
        with open(f"/proc/{pid}/task/{pid}/children", encoding="ascii") as listed:
            return frozenset(map(int, listed.read().split()))
    except OSError:
        return frozenset()


def table() -> dict[int, Process]:
    """The processes of this machine, or as much of it as can be seen."""
    found = {process.pid: process for process in _from_proc()}
    return found or {process.pid: process for process in _from_ps()}


def _from_proc() -> Iterator[Process]:
    try:
        names = os.listdir("/proc")
    except OSError:
        return
    for name in names:
        if name.isdigit():
            with suppress(OSError, ValueError, IndexError), open(f"/proc/{name}/stat", "rb") as stat:
                fields = stat.read().rpartition(b")")[2].split()
                yield Process(int(name), int(fields[1]), int(fields[3]), int(fields[19]), fields[0].decode())


def _from_ps() -> Iterator[Process]:
    """Where there is no /proc. The group stands in for the session: a shell of ours leads both."""
    with suppress(OSError, subprocess.SubprocessError):
        done = subprocess.run(
            ["ps", "-axo", "pid=,ppid=,pgid=,stat="], capture_output=True, text=True, timeout=5, check=False
        )
        for line in done.stdout.splitlines():
            with suppress(ValueError, IndexError):
                pid, parent, group, state = line.split()[:4]
                yield Process(int(pid), int(parent), int(group), 0, state[:1])


def _marked(pid: int, mark: str) -> bool:
    """Whether a process was given the mark, here and not in a container that this machine runs."""
    try:
        with open(f"/proc/{pid}/environ", "rb") as environ:
            if f"\0{MARK}={mark}\0".encode() not in b"\0" + environ.read():
                return False
        return os.readlink(f"/proc/{pid}/ns/pid") == os.readlink("/proc/self/ns/pid")
    except OSError:
        return False


def _ours(found: Mapping[int, Process], shell: int | None, mark: str, since: int) -> set[int]:
    """The shell, what descends from it, is in its session, or bears the mark."""
    ours = {
        pid
        for pid, process in found.items()
        if pid != os.getpid() and (shell in (pid, process.session) or (process.started >= since and _marked(pid, mark)))
    }
    grown = True
    while grown:
        more = {pid for pid, process in found.items() if process.parent in ours} - ours
        grown = bool(more)
        ours |= more
    return ours


def _victims(shell: int | None, mark: str, since: int, keep: Set[int]) -> list[int]:
    """What is to be ended, parents first: a parent that saw its child end would go on to its next step."""
    found = table()
    ours = _ours(found, shell, mark, since)

    def old(pid: int) -> bool:
        return pid != shell and (pid in keep or found[pid].started < since)

    def ancestors(pid: int) -> Iterator[int]:
        while pid in ours:
            yield pid
            if pid == shell:
                return
            pid = found[pid].parent

    lines = {pid: list(ancestors(pid)) for pid in ours}
    chosen = [pid for pid, line in lines.items() if not any(map(old, line)) and found[pid].state not in _ZOMBIE]
    return sorted(chosen, key=lambda pid: len(lines[pid]))


def others(shell: int | None, mark: str) -> list[int] | None:
    """What runs of a shell's, but for itself; None where that is not known."""
    found = table()
    if not found:
        return None
    return sorted(pid for pid in _ours(found, shell, mark, 0) - {shell} if found[pid].state not in _ZOMBIE)


def title(pid: int) -> str:
    """What a process was called with, as far as it fits into a message."""
    with suppress(OSError), open(f"/proc/{pid}/cmdline", "rb") as line:
        words = line.read(4 * _TITLE).replace(b"\0", b" ").decode(errors="replace").strip()
        shown = "".join(character if character.isprintable() else "?" for character in words)
        return f"{shown[:_TITLE]}..." if len(shown) > _TITLE else shown or "a program"
    return "a program"


def end(shell: int | None, mark: str, *, since: int = 0, keep: Set[int] = frozenset()) -> bool:
    """End a shell and what it started, or only what it started ``since`` then, but for ``keep``; True when all is gone.

    All are stopped before the first is killed: the place of one that is gone could be taken by one that still forks.
    ``shell`` must not have been waited for: until then its number is nobody else's.
    """
    if shell is not None and not table():  # processes cannot be listed here
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(shell, signal.SIGKILL)
        return False
    deadline = time.monotonic() + PATIENCE
    pause = 0.001
    stopped: set[int] = set()
    while (victims := _victims(shell, mark, since, keep)) and time.monotonic() < deadline:
        if not stopped.issuperset(victims):
            _signal(victims, signal.SIGSTOP)
            stopped.update(victims)
            continue
        _signal(reversed(victims), signal.SIGKILL)  # children first: the system wakes what a dead leader leaves stopped
        time.sleep(pause)
        pause = min(pause * 2, 0.05)
    _signal(reversed(victims), signal.SIGKILL)
    for pid in stopped - {shell}:
        with suppress(ChildProcessError):  # most are not our children; orphans are, where we are the first process
            os.waitpid(pid, os.WNOHANG)
    return not victims


def _signal(pids: Iterable[int], number: signal.Signals) -> None:
    for pid in pids:
        with suppress(ProcessLookupError, PermissionError):
            os.kill(pid, number)
