"""What a whole episode costs: 1,000 of ten turns at once, isolated, beside OpenEnv; and what rollouts add to it."""

from __future__ import annotations

import json
import select
import subprocess
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from http.client import HTTPConnection
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks import owners, venvs
from benchmarks.measure import Effort, Line, interleave, line
from benchmarks.owners import SPARE, Left, Owner
from benchmarks.processes import OURS, ROUND, START, environment, free_port, running

EPISODES = 1000
TURNS = 10
ALONE, ALONE_AT_ONCE = 4, 2
"""Episodes of the peer with a server process each, and how many at a time: one for each core."""
LONG, REUSE = 10_000, 100
"""Episodes of a run whose instances play several of them, and how many each may."""
MOST_REUSED, MOST_ALONE, MOST_TURN, MOST_GROWTH = 1.0, 1 / 20, 1.0, 1.25
_NAME = f"{EPISODES:,} episodes at once"
_LONG = f"{LONG:,} episodes, {EPISODES:,} at once, instances reused"


def episodes(effort: Effort) -> list[Line]:
    """1,000 concurrent episodes of ten turns, isolated, beside OpenEnv's server, which isolates none of them.

    Its sessions share one process, and begin with a reset. Ours share nothing at any time: in a long run whose
    instances play several episodes, from none started to none left, and with a new instance for each.
    """
    asked = {"episodes": EPISODES, "at_once": EPISODES, "turns": TURNS}
    long = {**asked, "episodes": LONG}
    memory: list[float] = []
    with ExitStack() as stack:
        trainer = stack.enter_context(_trainer())
        trainer.ask("play", episodes=50, at_once=50, turns=TURNS)
        trainer.settle(SPARE)
        before = Left(trainer)
        as_made, tuned = (stack.enter_context(_peer(*mode)) for mode in ((), ("tuned",)))

        def ours(reuse: int = 1, **wanted: int) -> float:
            spent = trainer.ask("play", reuse=reuse, **wanted)
            if reuse == 1:
                memory.append(spent["memory"])
            return float(spent["wall"]) / wanted["episodes"]

        sides = (lambda: ours(**asked), lambda: _played(as_made, asked), lambda: _played(tuned, asked))
        mine, theirs, best = interleave(3 if effort.quick else 7, *sides)
        sides = (lambda: ours(REUSE, **long), lambda: _played(as_made, long))
        reused, sessions = interleave(1 if effort.quick else 3, *sides)
        trainer.settle(SPARE)
        before.check(trainer)
    alone = [_alone() for _ in range(1 if effort.quick else 3)]
    return [
        _rate(_LONG, reused, "OpenEnv", sessions, MOST_REUSED),
        _rate(_NAME, mine, "OpenEnv", theirs),
        _rate(f"{_NAME} (tuned)", mine, "OpenEnv, tuned", best),
        _rate(f"{_NAME} (a process each)", [median(mine)] * len(alone), "OpenEnv, a process each", alone, MOST_ALONE),
        Line(f"{_NAME}, memory", "MB", memory[-1], "the first", memory[0], memory[-1] / memory[0], MOST_GROWTH),
    ]


def overhead(effort: Effort) -> list[Line]:
    """CPU of the trainer for each turn of a rollout, less that of the same calls without one."""
    asked = {"episodes": 200, "at_once": 64, "turns": TURNS}
    calls = asked["episodes"] * asked["turns"]
    with _trainer() as trainer:
        trainer.ask("play", **asked)
        played, plain = interleave(
            effort.rounds(7), lambda: trainer.ask("play", **asked)["cpu"], lambda: trainer.ask("plain", **asked)["cpu"]
        )
    more = median(mine - other for mine, other in zip(played, plain, strict=True)) / calls * 1e3
    shown = max(more, MOST_TURN / 10)  # below that, it makes no difference how much it is
    return [
        Line("rollout, CPU a turn", "ms", more, "the limit", MOST_TURN, shown / MOST_TURN, 1.0),
        line("rollout, CPU a turn, with the call", "ms", [cpu / calls for cpu in played], scale=1e3),
    ]


def _rate(name: str, ours: list[float], against: str, other: list[float], limit: float | None = None) -> Line:
    """A line of episodes a second, from seconds an episode."""
    ratio = median(mine / theirs for mine, theirs in zip(ours, other, strict=True))
    return Line(name, "a second", 1 / median(ours), against, 1 / median(other), ratio, limit)


@contextmanager
def _trainer() -> Iterator[Owner]:
    with owners.new_home() as home:
        env = environment(PYTHONPATH=str(venvs.ROOT), AENV_HOME=str(home), AENV_ISOLATION="strict")
        command = [OURS, "-m", "benchmarks.workers.trainer"]
        with running(command, cwd=owners.PROJECT, env=env, piped=True) as process:
            yield Owner(process, home)


# The peer


@contextmanager
def _peer(*mode: str) -> Iterator[subprocess.Popen[bytes]]:
    """OpenEnv's client, with OpenEnv's server behind it: one process each, which is where it is fastest."""
    with openenv(*mode) as url, _client(venvs.peer("openenv"), url) as client:
        _played(client, {"episodes": 50, "at_once": 50, "turns": TURNS})
        yield client


@contextmanager
def openenv(*mode: str) -> Iterator[str]:
    """OpenEnv's server, and where it is."""
    port = free_port()
    with running([venvs.peer("openenv"), "-m", "benchmarks.servers.openenv_server", str(port), *mode]) as server:
        _wait(server, port)
        yield f"http://127.0.0.1:{port}"


def _alone() -> float:
    """Seconds for an episode that has a server process to itself."""
    with _client(venvs.peer("openenv")) as client:
        return _played(client, {"episodes": ALONE, "at_once": ALONE_AT_ONCE, "turns": TURNS})


@contextmanager
def _client(python: Path, *url: str) -> Iterator[subprocess.Popen[bytes]]:
    with running([python, "-m", "benchmarks.workers.openenv_client", *url], piped=True) as client:
        _line(client, START)
        yield client


def _played(client: subprocess.Popen[bytes], asked: dict[str, int]) -> float:
    """Seconds for each of the episodes that are asked for."""
    assert client.stdin is not None
    client.stdin.write(json.dumps(asked).encode() + b"\n")
    client.stdin.flush()
    spent = _line(client, ROUND)
    if spent["failed"] or spent["done"] != asked["episodes"]:
        raise RuntimeError(f"{spent['failed']} of the peer's episodes failed, {spent['done']} are done")
    return float(spent["wall"]) / asked["episodes"]


def _line(client: subprocess.Popen[bytes], patience: float) -> Any:
    assert client.stdout is not None
    if not select.select([client.stdout], [], [], patience)[0]:
        raise RuntimeError(f"the peer's client did not answer within {patience:g} s")
    return json.loads(client.stdout.readline())


def _wait(server: subprocess.Popen[bytes], port: int) -> None:
    deadline = time.monotonic() + START
    while time.monotonic() < deadline and server.poll() is None:
        connection = HTTPConnection("127.0.0.1", port, timeout=START)
        with suppress(OSError):
            connection.request("GET", "/health")
            connection.getresponse().read()
            return
        time.sleep(0.02)
    raise RuntimeError(f"the peer's server did not answer (exit code {server.poll()})")
