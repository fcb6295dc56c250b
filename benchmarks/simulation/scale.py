"""What one engine costs with so many pods: its memory, its looks, what it hears, how long a create takes, and how long
an engine that starts again needs to know them all."""

from __future__ import annotations

import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from benchmarks.measure import Effort, Line
from benchmarks.owners import Owner
from benchmarks.processes import OURS, START, environment, resident_mb, running
from benchmarks.venvs import ROOT

PODS = 10_000
SHARES = (0.1, 0.25, 0.5, 1.0)
"""Parts of all pods at which it is measured."""
CHECKED = (300, 1200)
"""Pods in ``bench-check``, where there is less time."""
PROBES, PROBES_AT_ONCE = 200, 4
"""Creates that are timed, as the last ones before each measurement."""
AT_ONCE = 32
"""Creates at a time, of the others."""
FIRST = 2 * AT_ONCE
"""Pods before anything is measured."""
_CHUNK = 500
"""Creates that an engine is asked for in one go."""
MOST_EACH, MOST_EVENTS, MOST_CREATE = 1.5, 1.1, 2.0
"""What each pod may cost with most of them over what it costs with the fewest."""


@dataclass(frozen=True, slots=True)
class Level:
    """An engine with so many pods."""

    pods: int
    memory: float
    """MB that the process has grown by."""
    look: float
    """CPU seconds of one look of the reaper, when nothing is over."""
    all_due: float
    """The same, when the time of all of them is."""
    find: float
    """Seconds to find all of them by a label."""
    asked: float
    """Requests for each pod that was made since the level before."""
    heard: float
    """Changes that were heard of each, and their bytes."""
    heard_bytes: float
    p50: float
    """Seconds of a create."""
    p99: float
    rate: float
    """Creates a second, 32 at a time: of this machine, API server and scripted node included."""
    reopened: float
    """Seconds until another engine, which starts, knows them all."""
    reopened_memory: float


def lacking() -> str:
    """Why it cannot be simulated here; empty when it can."""
    try:
        from tests.cluster import api
    except ImportError as exc:
        return f"the tools for development are not installed: {exc}"
    return api.missing()


def simulate(counts: Sequence[int]) -> Iterator[Level]:
    """Make pods up to each of those numbers, and measure there."""
    from tests.cluster import api

    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="aenv-bench-kube-")))
        server = stack.enter_context(api.api_server(folder))
        stack.enter_context(_node(server.kubeconfig))
        engine = stack.enter_context(_engine(server.kubeconfig))
        engine.ask("open")
        engine.ask("fill", count=FIRST, at_once=AT_ONCE)  # everything is loaded then, and as many connections are open
        there = FIRST
        empty = resident_mb(engine.pid)
        for count in counts:
            before, made = engine.ask("traffic"), count - there
            begin = time.perf_counter()
            for start in range(0, made - PROBES, _CHUNK):
                engine.ask("fill", count=min(_CHUNK, made - PROBES - start), at_once=AT_ONCE)
            rate = (made - PROBES) / (time.perf_counter() - begin)
            seconds = sorted(engine.ask("fill", count=PROBES, at_once=PROBES_AT_ONCE))
            there = count
            _settle(engine, there)
            after = engine.ask("traffic")
            each = {name: (after[name] - before[name]) / made for name in after}
            memory, found = resident_mb(engine.pid) - empty, engine.ask("find")
            with _engine(server.kubeconfig) as other:
                plain = resident_mb(other.pid)
                reopened = other.ask("open")
                _settle(other, there)
                reopened_memory = resident_mb(other.pid) - plain
            yield Level(
                pods=count,
                memory=memory,
                **engine.ask("look"),
                find=found["seconds"],
                **each,
                p50=seconds[len(seconds) // 2],
                p99=seconds[int(len(seconds) * 0.99)],
                rate=rate,
                reopened=reopened,
                reopened_memory=reopened_memory,
            )


def _settle(engine: Owner, count: int) -> None:
    """Wait until it has heard that all of them are ready."""
    deadline, last = time.monotonic() + START, -1
    while True:
        heard = engine.ask("traffic")["heard"]
        found = int(engine.ask("find")["count"])
        if found == count and heard == last:
            return
        if time.monotonic() > deadline:
            raise RuntimeError(f"{found} of {count} pods are known to be running")
        last = heard
        time.sleep(0.5)


@contextmanager
def _node(kubeconfig: Path) -> Iterator[None]:
    with running([OURS, "-m", "benchmarks.simulation.node", kubeconfig], piped=True) as process:
        assert process.stdout is not None
        if process.stdout.readline() != b"ready\n":
            raise RuntimeError("the scripted node did not start")
        yield


@contextmanager
def _engine(kubeconfig: Path) -> Iterator[Owner]:
    command = [OURS, "-m", "benchmarks.simulation.engine", kubeconfig]
    with running(command, env=environment(PYTHONPATH=str(ROOT)), piped=True) as process:
        made = Owner(process, kubeconfig.parent)
        made.ask("traffic")  # it is up
        yield made


# What is claimed


def lines(levels: Sequence[Level]) -> list[Line]:
    """What each pod costs with the most of them, beside what it costs with the fewest."""
    first, last = levels[0], levels[-1]
    against = f"with {first.pods:,}"

    def compared(name: str, unit: str, ours: float, other: float, limit: float) -> Line:
        return Line(f"simulated pods, {name}", unit, ours, against, other, ours / other, limit)

    return [
        compared("memory of each", "KB", *(1024 * one.memory / (one.pods - FIRST) for one in (last, first)), MOST_EACH),
        compared("reaper, a look", "µs", 1e6 * last.look, 1e6 * first.look, MOST_EACH),
        compared("changes heard of each", "", last.heard, first.heard, MOST_EVENTS),
        compared("bytes heard of each", "KB", last.heard_bytes / 1024, first.heard_bytes / 1024, MOST_EVENTS),
        compared("requests for each", "", last.asked, first.asked, MOST_EVENTS),
        compared("create, median", "ms", 1e3 * last.p50, 1e3 * first.p50, MOST_CREATE),
    ]


def simulation(effort: Effort) -> list[Line]:
    """1,200 pods on a real API server, by a scripted node, against 300: what each costs an engine stays the same."""
    levels = []
    for level in simulate(CHECKED):
        sys.stderr.write(".")
        sys.stderr.flush()
        levels.append(level)
    sys.stderr.write("\n")
    return lines(levels)
