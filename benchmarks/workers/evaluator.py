"""A program that evaluates: ``python -m benchmarks.workers.evaluator ENV``, with the oracle, as its parent asks.

Requests and answers are lines, as ``benchmarks.workers.owner`` reads and writes them. ``evaluate`` plays every task of
a selection ``n`` times, ``at_once`` at a time, in instances that play several. It answers with the seconds of the
``wall``, how many ``tasks`` there were and ``passed``, and the median seconds of a ``reset``.
"""

from __future__ import annotations

import asyncio
import sys
import time
from statistics import median
from typing import Any

import uvloop

from aenv import http
from aenv.evals import Taskset
from aenv.evals.agents import agent
from aenv.rl import rollouts
from benchmarks.workers.owner import serve


class Evaluator:
    """Evaluations of one environment."""

    def __init__(self, env: str) -> None:
        self._env = env
        self._tasks: dict[str, Taskset] = {}

    async def evaluate(self, selection: dict[str, Any], at_once: int, n: int) -> dict[str, float]:
        known = repr(selection)
        if known not in self._tasks:
            self._tasks[known] = await Taskset.load(self._env, selection)
        tasks = self._tasks[known]
        begun = time.perf_counter()
        run = rollouts(self._env, agent("oracle"), tasks, n=n, concurrency=at_once, reuse=n * len(tasks), seed=1)
        async with run as going:
            played = [trajectory async for trajectory in going]
        wall = time.perf_counter() - begun
        resets = median(trajectory.seconds["reset"] for trajectory in played)
        passed = sum(trajectory.reward == 1.0 for trajectory in played)
        return {"wall": wall, "tasks": len(played), "passed": passed, "reset": resets}

    async def empty(self) -> None:
        """Every run has given its instances back."""

    async def close(self) -> None:
        await http.close()


async def _main(env: str) -> None:
    await serve(Evaluator(env))


if __name__ == "__main__":
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(_main(sys.argv[1]))
