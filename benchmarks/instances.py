"""What an isolated instance of the process engine costs: to start, to keep, to call and to end.

``python -m benchmarks.instances --count 2000`` fills a machine with more of them than the figures do.
"""

from __future__ import annotations

import argparse
import json
import os
import select
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from statistics import median, quantiles
from typing import Any, NamedTuple

from aenv.engines.process import powers
from benchmarks import report, venvs
from benchmarks.calls import CALLERS, warm_up
from benchmarks.measure import Effort, Line, interleave, line
from benchmarks.processes import OURS, Server, Worker, cpu_seconds, environment, fastmcp, ours, running, server

PROJECT = venvs.HERE / "projects" / "few"
PATIENCE = 300.0
"""Seconds that filling or emptying a machine may take."""
COUNT = 1000
AT_ONCE = 16
"""Creates under way at a time."""
SEQUENCE = 20
"""Creates one after the other in each round."""
PEERS = 2
"""Processes of the peer that are measured before, and again after."""
SPARE = 1
"""Instances that the engine keeps ready for whoever comes next."""
SETTLE = 10.0
"""Seconds until there must be as many instances as there ought to be."""
IDLE = 6.0
"""Seconds for which idle instances are watched."""
MOST_START, FEWEST_A_SECOND, MOST_MEMORY, MOST_IDLE, MOST_RELEASE, MOST_CALL = 1 / 140, 80.0, 5.0, 1.0, 10.0, 1.3
_START = "isolated instance, create to first call"


def lacking() -> str:
    """Why none of this can be measured here; empty when it can."""
    if sys.platform != "linux":
        return "needs Linux"
    return "; ".join(f"{lack.what}: {lack.why}" for lack in powers.probe().lacks)


def start(effort: Effort) -> list[Line]:
    """From a new ``Environment``, isolated in every way, to its first answer; the peer is a process of its own."""
    peer = fastmcp(venvs.peer("fastmcp"))
    programs, firsts, every = [], [], []
    for _ in range(2 if effort.quick else 5):
        with _owner() as owner:
            opening = owner.ask("open")
            first = owner.ask("sequence", count=1)[0]
            firsts.append(first)
            programs.append(opening + first)
    with _owner() as owner:
        owner.ask("sequence", count=5)

        def sequence() -> float:
            seconds: list[float] = owner.ask("sequence", count=SEQUENCE)
            every.extend(seconds)
            return median(seconds)

        mine, other = interleave(effort.rounds(11), sequence, lambda: _peer(peer).start)
    with _owner(AENV_SPARE="0") as owner:
        unexpected = owner.ask("sequence", count=SEQUENCE)
    return [
        line(_START, "ms", mine, "FastMCP", other, limit=MOST_START, scale=1e3),
        line(f"{_START}, p99", "ms", [quantiles(every, n=100)[98]], scale=1e3),
        line(f"{_START}, not expected", "ms", unexpected, scale=1e3),
        line("first instance of an environment", "ms", firsts, scale=1e3),
        line("first instance of a program", "ms", programs, scale=1e3),
    ]


def live(effort: Effort) -> list[Line]:
    """1,000 isolated instances at a time: how fast they come and go, what they cost, and that nothing is left."""
    return _live(COUNT, AT_ONCE, IDLE)


def calls(effort: Effort) -> list[Line]:
    """A call to an isolated instance beside one to a runtime that is not isolated, by the same cheap client.

    Only CPU is compared: how long an answer takes depends on how the machine shares its cores among control groups.
    """
    with _owner() as owner, server(ours("few")) as bare:
        served = owner.ask("serve")
        (instance,) = (process.pid for process in _settle(owner, 1) if process.is_runtime)
        with _client(bare, bare.url, "none") as to_bare, _client(bare._replace(pid=instance), **served) as to_instance:
            warm_up(to_bare, to_instance)
            alone, bare_alone = interleave(
                effort.rounds(11), lambda: to_instance.round("add", 200, 1), lambda: to_bare.round("add", 200, 1)
            )
            many, bare_many = interleave(
                effort.rounds(21),
                lambda: to_instance.round("add", 1600, CALLERS),
                lambda: to_bare.round("add", 1600, CALLERS),
            )
    cpu, bare_cpu = [x.server_cpu for x in many], [x.server_cpu for x in bare_many]
    return [
        line("call to an instance, server CPU", "µs", cpu, "bare runtime", bare_cpu, limit=MOST_CALL, scale=1e6),
        line("call to an instance, latency", "µs", [x.wall for x in alone], scale=1e6),
        line("call to a bare runtime, latency", "µs", [x.wall for x in bare_alone], scale=1e6),
    ]


def _live(count: int, at_once: int, idle: float) -> list[Line]:
    command = fastmcp(venvs.peer("fastmcp"))
    peers = [_peer(command) for _ in range(PEERS)]
    with _owner() as owner:
        owner.ask("sequence", count=5)
        _settle(owner, SPARE)
        before = _Left(owner)
        filling = owner.ask("fill", count=count, at_once=at_once)
        _say(f"created in {filling:.1f} s")
        calling = owner.ask("call", at_once=at_once)
        _say(f"called, once each, in {calling:.1f} s")
        processes = _settle(owner, count + SPARE)
        memory = sum(_proportional_mb(process.pid) for process in processes if process.has_memory) / count
        pids = [owner.pid, *(process.pid for process in processes)]
        begin = sum(map(cpu_seconds, pids))
        time.sleep(idle)
        burnt = (sum(map(cpu_seconds, pids)) - begin) / idle * 100
        emptying = owner.ask("empty")
        _say(f"released in {emptying:.1f} s")
        _settle(owner, SPARE)
        before.check(owner)
        owner.ask("close")
        owner.check_end()
    peers += [_peer(command) for _ in range(PEERS)]
    started, held, ended = (median(x) for x in zip(*peers, strict=True))
    most_idle = MOST_IDLE * count / COUNT
    return [
        _held(f"{count:,} live, created", "a second", filling / count, started, 1 / FEWEST_A_SECOND, inverse=True),
        _held(f"{count:,} live, memory of each", "MB", memory, held, MOST_MEMORY),
        _quiet(f"{count:,} live, idle, all together", burnt, most_idle),
        _held(f"{count:,} live, released", "s", emptying, ended * count, MOST_RELEASE * count / COUNT),
    ]


def _held(name: str, unit: str, cost: float, other: float, most: float, *, inverse: bool = False) -> Line:
    """A line whose limit is a number, not a ratio: it is shown and held as the ratio that it would be in this run."""
    shown = (1 / cost, 1 / other) if inverse else (cost, other)
    return Line(name, unit, shown[0], "FastMCP", shown[1], cost / other, most / other)


def _quiet(name: str, burnt: float, most: float) -> Line:
    """A line that is next to nothing: up to half of what it may be, it makes no difference how much it is."""
    return Line(name, "% of a core", burnt, "the limit", most, max(burnt, most / 2) / most, 1.0)


# The peer


class _Peer(NamedTuple):
    start: float
    """Seconds to its first answer."""
    memory: float
    end: float


def _peer(command: Sequence[str | Path]) -> _Peer:
    with server(command) as started:
        memory = _proportional_mb(started.pid)
        ending = time.perf_counter()
    return _Peer(started.first_answer, memory, time.perf_counter() - ending)


# The owner of the instances


class _Owner:
    """A program that has instances, in a process of its own and with a home of its own."""

    def __init__(self, process: subprocess.Popen[bytes], home: Path) -> None:
        self._process = process
        self.pid = process.pid
        self.home = home
        self._groups: list[Path] = []

    def ask(self, verb: str, **arguments: object) -> Any:
        process = self._process
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(json.dumps({"do": verb, **arguments}).encode() + b"\n")
        process.stdin.flush()
        if not select.select([process.stdout], [], [], PATIENCE)[0]:
            raise RuntimeError(f"{verb} took longer than {PATIENCE:g} s")
        answer = process.stdout.readline()
        if not answer:
            raise RuntimeError(f"the owner ended at {verb}")
        return json.loads(answer)

    def groups(self) -> list[Path]:
        """The directories in which its engine's control groups are."""
        for file in self.home.glob("run/*/spawner.json"):
            self._groups = [Path(path) for path in json.loads(file.read_text())["control_groups"].values()]
        return self._groups

    def check_end(self) -> None:
        """Raise when an engine that was closed has left anything."""
        left = [str(process.pid) for process in _below(self.pid)]
        left += [str(path) for path in self._groups if path.exists()]
        left += [str(path) for path in self.home.glob("run/*") if path.is_dir()]
        if left:
            raise RuntimeError(f"the engine is closed, but there is still {', '.join(left[:10])}")


@contextmanager
def _owner(**variables: str) -> Iterator[_Owner]:
    with tempfile.TemporaryDirectory(prefix="aenv-bench-") as home:
        env = environment(PYTHONPATH=str(venvs.ROOT), AENV_HOME=home, **variables)
        with running([OURS, "-m", "benchmarks.workers.owner", PROJECT], env=env, piped=True) as process:
            yield _Owner(process, Path(home))


@contextmanager
def _client(target: Server, url: str, token: str) -> Iterator[Worker]:
    with running([OURS, "-m", "benchmarks.workers.bearer", url, token], piped=True) as process:
        yield Worker(process, target)


# What there is


class _Process(NamedTuple):
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


def _below(pid: int) -> list[_Process]:
    """Every process that descends from this one, also the dead that nobody has buried."""
    children: dict[int, list[_Process]] = {}
    for name in filter(str.isdigit, os.listdir("/proc")):
        with suppress(OSError):
            status = dict(row.split(":\t", 1) for row in Path(f"/proc/{name}/status").read_text().splitlines())
            found = _Process(int(name), int(status["PPid"]), list(map(int, status["NSpid"].split())))
            children.setdefault(found.parent, []).append(found)
    family: list[_Process] = []
    parents = [pid]
    while parents:
        young = children.get(parents.pop(), [])
        family += young
        parents += [child.pid for child in young]
    return family


def _proportional_mb(pid: int) -> float:
    """Memory of a process, what it shares divided by the number of those it shares it with."""
    for row in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
        if row.startswith("Pss:"):
            return int(row.split()[1]) / 1024
    raise RuntimeError(f"process {pid} has no Pss")


class _Left(dict[str, int]):
    """What there is of the engine of an owner, counted."""

    def __init__(self, owner: _Owner) -> None:
        family = _below(owner.pid)
        unix = Path("/proc/net/unix").read_text()
        super().__init__(
            {
                "processes": len(family),
                "mounts": sum(_lines(f"/proc/{process.pid}/mountinfo") for process in family),
                "control groups": sum(1 for root in owner.groups() for path in root.rglob("*") if path.is_dir()),
                "socket files": sum(1 for _ in owner.home.rglob("*.sock")),
                "sockets": unix.count(str(owner.home)),
                "descriptors of the owner": _descriptors(owner.pid),
                "descriptors of its engine": sum(_descriptors(process.pid) for process in family),
            }
        )

    def check(self, owner: _Owner) -> None:
        """Raise when there is more than there was, and it does not go: who is dead may not be buried yet."""
        deadline = time.monotonic() + SETTLE
        while more := {what: count - self[what] for what, count in _Left(owner).items() if count > self[what]}:
            if time.monotonic() > deadline:
                shown = ", ".join(f"{count} {what}" for what, count in more.items())
                raise RuntimeError(f"all instances are released, but there are {shown} more than before")
            time.sleep(0.05)


def _settle(owner: _Owner, count: int) -> list[_Process]:
    """The processes of an owner, once so many of them are instances."""
    deadline = time.monotonic() + SETTLE
    while True:
        processes = _below(owner.pid)
        runtimes = sum(process.is_runtime for process in processes)
        if runtimes == count:
            return processes
        if time.monotonic() > deadline:
            raise RuntimeError(f"{runtimes} instances are alive, not {count}")
        time.sleep(0.05)


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


def _say(text: str) -> None:
    sys.stderr.write(f"  {text}\n")


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.instances", description=__doc__)
    parser.add_argument("--count", type=int, default=2000, help="instances that live at a time")
    parser.add_argument("--at-once", type=int, default=AT_ONCE, help="creates under way at a time")
    parser.add_argument("--idle", type=float, default=IDLE, help="seconds to watch them do nothing")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    if reason := lacking():
        print(f"isolated instances cannot be had here: {reason}")
        return 1
    print(report.table(_live(options.count, options.at_once, options.idle), {}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
