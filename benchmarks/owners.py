"""Programs that have instances, each a process of its own, and what there is of the engine behind them."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks import venvs
from benchmarks.processes import OURS, environment, running

PROJECT = venvs.HERE / "projects" / "few"
PATIENCE = 300.0
"""Seconds that filling or emptying a machine may take."""
SPARE = 1
"""Instances that an engine keeps ready for whoever comes next."""
SETTLE = 10.0
"""Seconds until there must be as many instances as there ought to be."""


class Process(NamedTuple):
    pid: int
    parent: int
    places: list[int]
    """Its number in each process namespace, the machine's first."""

    @property
    def is_runtime(self) -> bool:
        return len(self.places) == 4 and self.places[-1] == 2

    @property
    def has_memory(self) -> bool:
        """The first process of an instance has none: it stands in that of its zygote."""
        return len(self.places) < 4 or self.places[-1] != 1


class Family:
    """A process with all that descends from it, an engine's sandboxes among that, and the home that they write to."""

    def __init__(self, pid: int, home: Path) -> None:
        self.pid = pid
        self.home = home
        self._groups: set[Path] = set()

    def members(self) -> list[Process]:
        """Every process that descends from this one, also the dead that nobody has buried."""
        children: dict[int, list[Process]] = {}
        for name in filter(str.isdigit, os.listdir("/proc")):
            with suppress(OSError):
                status = dict(row.split(":\t", 1) for row in Path(f"/proc/{name}/status").read_text().splitlines())
                found = Process(int(name), int(status["PPid"]), list(map(int, status["NSpid"].split())))
                children.setdefault(found.parent, []).append(found)
        family: list[Process] = []
        parents = [self.pid]
        while parents:
            young = children.get(parents.pop(), [])
            family += young
            parents += [child.pid for child in young]
        return family

    def settle(self, count: int) -> list[Process]:
        """Its processes, once so many of them are instances."""
        deadline = time.monotonic() + SETTLE
        while True:
            processes = self.members()
            runtimes = sum(process.is_runtime for process in processes)
            if runtimes == count:
                return processes
            if time.monotonic() > deadline:
                raise RuntimeError(f"{runtimes} instances are alive, not {count}")
            time.sleep(0.05)

    def groups(self) -> set[Path]:
        """The directories in which its engine's control groups are."""
        for file in self.home.glob("run/*/spawner.json"):
            self._groups |= {Path(path) for path in json.loads(file.read_text())["control_groups"].values()}
        return self._groups

    def check_end(self) -> None:
        """Raise when an engine that was closed has left anything."""
        left = [str(process.pid) for process in self.members()]
        left += [str(path) for path in self._groups if path.exists()]
        left += [str(path) for path in self.home.glob("run/*") if path.is_dir()]
        if left:
            raise RuntimeError(f"the engine is closed, but there is still {', '.join(left[:10])}")


class Left(dict[str, int]):
    """What there is of a family, counted."""

    def __init__(self, family: Family) -> None:
        members = family.members()
        unix = Path("/proc/net/unix").read_text()
        super().__init__(
            {
                "processes": len(members),
                "mounts": sum(_lines(f"/proc/{process.pid}/mountinfo") for process in members),
                "control groups": sum(1 for root in family.groups() for path in root.rglob("*") if path.is_dir()),
                "socket files": sum(1 for _ in family.home.rglob("*.sock")),
                "sockets": unix.count(str(family.home)),
                "descriptors of the first": _descriptors(family.pid),
                "descriptors of the others": sum(_descriptors(process.pid) for process in members),
            }
        )

    def check(self, family: Family) -> None:
        """Raise when there is more than there was, and it does not go: who is dead may not be buried yet."""
        deadline = time.monotonic() + SETTLE
        while more := {what: count - self[what] for what, count in Left(family).items() if count > self[what]}:
            if time.monotonic() > deadline:
                shown = ", ".join(f"{count} {what}" for what, count in more.items())
                raise RuntimeError(f"all instances are released, but there are {shown} more than before")
            time.sleep(0.05)


class Owner(Family):
    """A program that has instances: ``benchmarks.workers.owner``."""

    def __init__(self, process: subprocess.Popen[bytes], home: Path) -> None:
        super().__init__(process.pid, home)
        self._process = process

    def ask(self, verb: str, **arguments: object) -> Any:
        self.tell(verb, **arguments)
        return self.hear(verb)

    def tell(self, verb: str, **arguments: object) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({"do": verb, **arguments}).encode() + b"\n")
        self._process.stdin.flush()

    def hear(self, verb: str) -> Any:
        """What came of the verb that it was told."""
        assert self._process.stdout is not None
        if not select.select([self._process.stdout], [], [], PATIENCE)[0]:
            raise RuntimeError(f"{verb} took longer than {PATIENCE:g} s")
        answer = self._process.stdout.readline()
        if not answer:
            raise RuntimeError(f"the owner ended at {verb}")
        return json.loads(answer)


@contextmanager
def owner(
    kind: str = "engine", home: Path | None = None, *, project: Path = PROJECT, **variables: str
) -> Iterator[Owner]:
    """An owner of that kind, see ``benchmarks.workers.owner``; in a home of its own, unless one is given."""
    with nullcontext(home) if home else new_home() as place:
        env = environment(PYTHONPATH=str(venvs.ROOT), AENV_HOME=str(place), AENV_ISOLATION="strict", **variables)
        with running([OURS, "-m", "benchmarks.workers.owner", kind], cwd=project, env=env, piped=True) as process:
            yield Owner(process, place)


@contextmanager
def new_home() -> Iterator[Path]:
    """A home of AEnvironment. Sandboxes that live on in it end with the block."""
    with tempfile.TemporaryDirectory(prefix="aenv-bench-", ignore_cleanup_errors=True) as folder:
        home = Path(folder)
        try:
            yield home
        finally:
            for number in (signal.SIGTERM, signal.SIGKILL):
                _end_spawners(home, number)


def spawner(folder: Path) -> int:
    """The process that holds the sandboxes of a folder in ``run``."""
    pid: int = json.loads((folder / "spawner.json").read_text())["pid"]
    return pid


def _end_spawners(home: Path, number: signal.Signals) -> None:
    for lock in home.glob("run/*/lock"):
        with suppress(OSError):
            os.kill(spawner(lock.parent), number)
    deadline = time.monotonic() + SETTLE
    while any(home.glob("run/*/lock")) and time.monotonic() < deadline:
        time.sleep(0.02)


def _lines(file: str) -> int:
    try:
        return Path(file).read_text().count("\n")
    except OSError:
        return 0


def _descriptors(pid: int) -> int:
    try:
        return len(os.listdir(f"/proc/{pid}/fd"))
    except OSError:
        return 0
