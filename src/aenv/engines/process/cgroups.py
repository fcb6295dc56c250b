"""Control groups: limits on cpu, memory and processes, for both versions of the interface.

A spawner has one directory below its own control group, with a leaf for each zygote and instance. A process moves
itself into a leaf by writing ``0`` to files that the spawner opened: writing another's pid costs 13 ms on version 1.
"""

from __future__ import annotations

import os
import signal
import time
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from contextlib import suppress
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

PREFIX = "aenv-"
_CONTROLLERS = ("cpu", "memory", "pids")
_PERIOD = 100_000
"""Microseconds over which cpu time is counted."""
_PATIENCE = 2.0
"""Seconds that a control group may be busy with processes that are on their way out."""


class Limits(NamedTuple):
    """What a leaf may use; None is without limit."""

    cpu: float | None = None
    """Cores."""
    memory: int | None = None
    """Bytes."""
    pids: int | None = None


class Tree(ABC):
    """A spawner's control groups."""

    version: int

    def __init__(self, roots: Mapping[str, Path]) -> None:
        self.roots = dict(roots)
        """Per controller, the spawner's directory."""

    @abstractmethod
    def _files(self, controller: str, limits: Limits) -> Iterable[tuple[str, str]]: ...

    @abstractmethod
    def out_of_memory(self, leaf: str) -> bool:
        """Whether the kernel killed a process of the leaf for want of memory."""

    @abstractmethod
    def processor(self, leaf: str) -> float | None:
        """Seconds of a processor that the leaf used; None where this is not counted."""

    @abstractmethod
    def memory(self, leaf: str) -> int:
        """Bytes that the leaf has in memory, without what the kernel only keeps in case it is read again."""

    @abstractmethod
    def reclaim(self, leaf: str) -> None:
        """Have the kernel take back what it only keeps in case that it is read again. It takes a while: in a thread."""

    @property
    @abstractmethod
    def _joining(self) -> str: ...

    def add(self, leaf: str, limits: Limits) -> None:
        for controller, root in self.roots.items():
            directory = f"{root}/{leaf}"
            with suppress(FileExistsError):
                os.mkdir(directory)
            for name, value in self._files(controller, limits):
                _put(f"{directory}/{name}", value)

    def open(self, leaf: str) -> list[int]:
        """Files that move the process which writes ``0`` to each of them into the leaf."""
        opened: list[int] = []
        try:
            for root in self.roots.values():
                opened.append(os.open(f"{root}/{leaf}/{self._joining}", os.O_WRONLY | os.O_CLOEXEC))  # noqa: PERF401
        except OSError:
            for descriptor in opened:
                os.close(descriptor)
            raise
        return opened

    def let_run(self, leaf: str) -> None:
        """Lift the limit on cpu from processes that are killed: those that may not run cannot end either."""
        with suppress(OSError):
            _put(*self._unlimited(leaf))

    @abstractmethod
    def _unlimited(self, leaf: str) -> tuple[str, str]:
        """The file that limits its cpu, and what lifts that."""

    def paths(self, leaf: str) -> dict[str, str]:
        """Per controller, the leaf as ``/proc/<pid>/cgroup`` writes it."""
        return {controller: f"{path}/{leaf}" for controller, path in self._shown.items()}

    @cached_property
    def _shown(self) -> dict[str, str]:
        mounts = _mounts()
        return {controller: "/" + str(root.relative_to(mounts[controller])) for controller, root in self.roots.items()}

    def processes(self, leaf: str = "") -> set[int]:
        """Every process in the leaf and below it."""
        found: set[int] = set()
        for root in self.roots.values():
            for directory, _, files in os.walk(root / leaf):
                if "cgroup.procs" in files:
                    with suppress(OSError):
                        found.update(map(int, Path(directory, "cgroup.procs").read_text().split()))
        return found

    def remove(self, leaf: str = "") -> bool:
        """Remove a leaf; False while a process is in it still."""
        gone = True
        for root in self.roots.values():
            with suppress(OSError):
                os.rmdir(f"{root}/{leaf}")  # most have nothing below them
                continue
            for directory, _, _ in os.walk(root / leaf, topdown=False):
                try:
                    os.rmdir(directory)
                except FileNotFoundError:
                    continue
                except OSError:
                    gone = False
        return gone


class Version1(Tree):
    """A hierarchy for each controller."""

    version = 1
    _joining = "tasks"

    def _files(self, controller: str, limits: Limits) -> Iterable[tuple[str, str]]:
        if controller == "memory" and limits.memory is not None:
            yield "memory.limit_in_bytes", str(limits.memory)
            # What is under way between sockets is counted apart, and else not at all.
            if (self.roots[controller].parent / "memory.kmem.tcp.limit_in_bytes").exists():
                yield "memory.kmem.tcp.limit_in_bytes", str(limits.memory // 4)
        elif controller == "pids" and limits.pids is not None:
            yield "pids.max", str(limits.pids)
        elif controller == "cpu" and limits.cpu is not None:
            yield "cpu.cfs_period_us", str(_PERIOD)
            yield "cpu.cfs_quota_us", str(max(1000, int(limits.cpu * _PERIOD)))

    def _unlimited(self, leaf: str) -> tuple[str, str]:
        return f"{self.roots['cpu']}/{leaf}/cpu.cfs_quota_us", "-1"

    def out_of_memory(self, leaf: str) -> bool:
        return _counter(self.roots["memory"] / leaf / "memory.oom_control", "oom_kill") > 0

    def processor(self, leaf: str) -> float | None:
        file = self.roots["cpu"] / leaf / "cpuacct.usage"  # where the two are one hierarchy
        return int(file.read_text()) / 1e9 if file.exists() else None

    def memory(self, leaf: str) -> int:
        place = self.roots["memory"] / leaf
        used = int((place / "memory.usage_in_bytes").read_text())
        return max(used - _counter(place / "memory.stat", "total_inactive_file"), 0)

    def reclaim(self, leaf: str) -> None:
        with suppress(OSError):  # newer kernels may be built without it
            _put(self.roots["memory"] / leaf / "memory.force_empty", "0")


class Version2(Tree):
    """One hierarchy; its controllers are switched on level by level."""

    version = 2
    _joining = "cgroup.procs"

    def _files(self, controller: str, limits: Limits) -> Iterable[tuple[str, str]]:
        if limits.memory is not None:
            yield "memory.max", str(limits.memory)
            yield "memory.swap.max", "0"
            yield "memory.oom.group", "1"
        if limits.pids is not None:
            yield "pids.max", str(limits.pids)
        if limits.cpu is not None:
            yield "cpu.max", f"{max(1000, int(limits.cpu * _PERIOD))} {_PERIOD}"

    def _unlimited(self, leaf: str) -> tuple[str, str]:
        return f"{self.roots['']}/{leaf}/cpu.max", "max"

    def out_of_memory(self, leaf: str) -> bool:
        return _counter(self.roots[""] / leaf / "memory.events", "oom_kill") > 0

    def processor(self, leaf: str) -> float | None:
        return _counter(self.roots[""] / leaf / "cpu.stat", "usage_usec") / 1e6

    def memory(self, leaf: str) -> int:
        place = self.roots[""] / leaf
        used = int((place / "memory.current").read_text())
        return max(used - _counter(place / "memory.stat", "inactive_file"), 0)

    def reclaim(self, leaf: str) -> None:
        place = self.roots[""] / leaf
        kept = sum(_counter(place / "memory.stat", name) for name in ("inactive_file", "active_file"))
        if kept:
            with suppress(OSError):  # before Linux 5.19 there is no such file; and less than that may be to be had
                _put(place / "memory.reclaim", str(kept))


def make(name: str) -> Tree:
    """Directories for a spawner of that name; ``OSError`` says why this machine gives none."""
    mounts = _mounts()
    own = _own()
    name = f"{PREFIX}{os.getpid()}-{name}"
    if all(controller in mounts for controller in _CONTROLLERS):
        roots = {controller: mounts[controller] / own[controller].lstrip("/") / name for controller in _CONTROLLERS}
        return _made(Version1(roots))
    if "" not in mounts:
        raise OSError("no control groups are mounted")
    return _below(mounts[""], mounts[""] / own[""].lstrip("/"), name)


def unified(name: str) -> Path:
    """A directory in version 2's hierarchy, below this process's group, whether there are controllers or none."""
    mounts = _mounts()
    if "" not in mounts:
        raise OSError("version 2 of control groups is not mounted")
    return mounts[""] / _own()[""].lstrip("/") / name


def _below(top: Path, own: Path, name: str) -> Tree:
    """A version 2 directory in the nearest group above this process that can have one with limits.

    A group with processes of its own, as this one's is, cannot hand its controllers down. Its parents can.
    """
    refused: OSError | None = None
    for parent in (own, *own.parents):
        try:
            _switch_on(parent)
            return _made(Version2({"": parent / name}))
        except OSError as exc:
            refused = refused or exc
        if parent == top:
            break
    raise refused or OSError(f"{own} is not below {top}")


def _made(tree: Tree) -> Tree:
    made: list[Path] = []
    try:
        for root in tree.roots.values():
            root.mkdir()
            made.append(root)
            if tree.version == 2:
                _switch_on(root)
    except OSError:
        for root in made:
            root.rmdir()
        raise
    return tree


def found(roots: Mapping[str, str]) -> Tree:
    """The tree whose directories were written down by a spawner that may be gone."""
    kind = Version2 if "" in roots else Version1
    return kind({controller: Path(root) for controller, root in roots.items()})


def remove_soon(tree: Tree, leaf: str = "", *, kill: bool = False) -> bool:
    """Remove a leaf whose processes are dying, or are to be killed; False when some do not go."""
    deadline = time.monotonic() + _PATIENCE
    while not tree.remove(leaf):
        if time.monotonic() > deadline:
            return False
        for pid in tree.processes(leaf) if kill else ():
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.002)
    return True


def strays() -> list[Path]:
    """Control groups with our prefix that hold no process, and whose maker is gone."""
    own = _own()
    found: set[Path] = set()
    for controller, mounted in _mounts().items():
        here = mounted / own.get(controller, "/").lstrip("/")
        # Those of version 2 may have been made in a parent.
        places = (
            [here, *(place for place in here.parents if place.is_relative_to(mounted))] if not controller else [here]
        )
        for place in places:
            made = filter(_is_left_over, place.glob(f"{PREFIX}*"))
            found.update(path for path in made if not Version1({controller: path}).processes())
    return sorted(found)


def _is_left_over(path: Path) -> bool:
    """Whether the process that its name names is gone. One that names none is somebody else's."""
    pid = path.name.removeprefix(PREFIX).partition("-")[0]
    return pid.isdigit() and not os.path.exists(f"/proc/{pid}")


def remove(path: Path) -> None:
    """Remove one directory of control groups, with what is below it."""
    Version1({"": path}).remove()


def _switch_on(directory: Path) -> None:
    """Let the children of a version 2 control group have limits."""
    there = set((directory / "cgroup.controllers").read_text().split())
    if missing := [name for name in _CONTROLLERS if name not in there]:
        raise OSError(f"the control group {directory} has no controller {', '.join(missing)}")
    on = set((directory / "cgroup.subtree_control").read_text().split())
    if wanted := [f"+{name}" for name in _CONTROLLERS if name not in on]:
        _put(directory / "cgroup.subtree_control", " ".join(wanted))


def _put(file: str | Path, value: str) -> None:
    try:
        opened = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC)
        try:
            os.write(opened, value.encode())
        finally:
            os.close(opened)
    except OSError as exc:
        raise OSError(exc.errno, f"{file} does not take {value!r}: {exc.strerror}") from exc


def _counter(file: Path, name: str) -> int:
    try:
        rows = dict(line.split() for line in file.read_text().splitlines())
    except OSError:
        return 0
    return int(rows.get(name, 0))


_mounted: dict[str, Path] = {}


def _mounts() -> dict[str, Path]:
    """Where each controller is mounted; version 2's hierarchy has the name ``""``."""
    if _mounted:
        return _mounted
    with open("/proc/self/mounts") as file:
        for line in file:
            _, where, kind, options, *_ = line.split()
            if kind == "cgroup2":
                _mounted[""] = Path(where)
            elif kind == "cgroup":
                _mounted.update((option, Path(where)) for option in options.split(",") if option.isalpha())
    return _mounted


def _own() -> dict[str, str]:
    with open("/proc/self/cgroup") as file:
        rows = (line.rstrip("\n").split(":", 2) for line in file)
        return {controller: path for _, controllers, path in rows for controller in controllers.split(",")}
