"""What an isolated instance of the process engine costs: to start, to keep, to call and to end.

``python -m benchmarks.instances --count 2000`` fills a machine with more of them than the figures do.
"""

from __future__ import annotations

import argparse
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from statistics import median, quantiles
from typing import NamedTuple

from aenv.engines.process import powers
from benchmarks import owners, report, venvs
from benchmarks.calls import CALLERS, warm_up
from benchmarks.measure import Effort, Line, interleave, line
from benchmarks.owners import SPARE, Left
from benchmarks.processes import OURS, Server, Worker, cpu_seconds, fastmcp, ours, running, server

COUNT = 1000
AT_ONCE = 16
"""Creates under way at a time."""
SEQUENCE = 20
"""Creates one after the other in each round."""
PEERS = 2
"""Processes of the peer that are measured before, and again after."""
IDLE = 6.0
"""Seconds for which idle instances are watched."""
MOST_START, FEWEST_A_SECOND, MOST_MEMORY, MOST_IDLE, MOST_RELEASE, MOST_CALL = 1 / 140, 80.0, 5.0, 1.0, 10.0, 1.3
AIM = 0.006
"""Seconds to a first call that are few enough, however fast the peer starts."""
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
        with owners.owner() as owner:
            opening = owner.ask("open")
            first = owner.ask("sequence", count=1)[0]
            firsts.append(first)
            programs.append(opening + first)
    with owners.owner() as owner:
        owner.ask("sequence", count=5)

        def sequence() -> float:
            seconds: list[float] = owner.ask("sequence", count=SEQUENCE)
            every.extend(seconds)
            return median(seconds)

        mine, other = interleave(effort.rounds(11), sequence, lambda: _peer(peer).start)
    with owners.owner(AENV_SPARE="0") as owner:
        unexpected = owner.ask("sequence", count=SEQUENCE)
    started = line(_START, "ms", mine, "FastMCP", other, limit=MOST_START, scale=1e3)
    if median(mine) < AIM:
        started = replace(started, ratio=min(started.ratio or 0.0, MOST_START))
    return [
        started,
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
    with owners.owner() as owner, server(ours("few")) as bare:
        served = owner.ask("serve")
        (instance,) = (process.pid for process in owner.settle(1) if process.is_runtime)
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
    with owners.owner() as owner:
        owner.ask("sequence", count=5)
        owner.settle(SPARE)
        before = Left(owner)
        filling = owner.ask("fill", count=count, at_once=at_once)
        _say(f"created in {filling:.1f} s")
        calling = owner.ask("call", at_once=at_once)
        _say(f"called, once each, in {calling:.1f} s")
        processes = owner.settle(count + SPARE)
        memory = sum(_proportional_mb(process.pid) for process in processes if process.has_memory) / count
        pids = [owner.pid, *(process.pid for process in processes)]
        begin = sum(map(cpu_seconds, pids))
        time.sleep(idle)
        burnt = (sum(map(cpu_seconds, pids)) - begin) / idle * 100
        emptying = owner.ask("empty")
        _say(f"released in {emptying:.1f} s")
        owner.settle(SPARE)
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


@contextmanager
def _client(target: Server, url: str, token: str) -> Iterator[Worker]:
    with running([OURS, "-m", "benchmarks.workers.bearer", url, token], piped=True) as process:
        yield Worker(process, target)


def _proportional_mb(pid: int) -> float:
    """Memory of a process, what it shares divided by the number of those it shares it with."""
    for row in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
        if row.startswith("Pss:"):
            return int(row.split()[1]) / 1024
    raise RuntimeError(f"process {pid} has no Pss")


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
