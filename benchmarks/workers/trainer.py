"""A program that trains on the project in its directory: it plays rounds of episodes as its parent asks.

Requests and answers are lines, as ``benchmarks.workers.owner`` reads and writes them. ``play`` runs episodes with
``aenv.rl``, as ``aenv rollout`` does; ``plain`` does the same calls without it. Both answer with seconds of the
``wall`` and of this process's ``cpu``, and with the ``memory`` in MB that it holds then.
"""

from __future__ import annotations

import asyncio
import os
import time
from pathlib import Path

import uvloop

from aenv import Environment, http, project
from aenv.rl import Episode, Task, rollouts
from benchmarks.processes import resident_mb
from benchmarks.wire import ARGUMENTS, EXPECTED
from benchmarks.workers.owner import LIFE, each, serve


class Trainer:
    """Episodes of so many turns, each in an instance of its own."""

    def __init__(self) -> None:
        self._name = project.read(Path.cwd()).name
        self._turns = 0

    async def play(self, episodes: int, at_once: int, turns: int, reuse: int = 1) -> dict[str, float]:
        self._turns = turns
        tasks = (Task(id=str(number), reward={"a": number, "b": turns}) for number in range(episodes))
        env = Environment(self._name, ttl=LIFE)
        spent = _Spent()
        done = 0
        async with rollouts(env, self._agent, tasks, concurrency=at_once, seed=1, reuse=reuse) as run:
            async for trajectory in run:
                assert trajectory.reward == int(trajectory.task.id) + turns, trajectory.outcome
                assert len(trajectory.turns) == turns, trajectory
                done += 1
        assert done == episodes, done
        return spent.told()

    async def plain(self, episodes: int, at_once: int, turns: int) -> dict[str, float]:
        spent = _Spent()

        async def episode() -> None:
            async with Environment(self._name, ttl=LIFE) as env:
                for _ in range(turns):
                    await _add(env)
                assert await env.call_reward({"a": 1, "b": turns}) == 1 + turns

        await each((episode for _ in range(episodes)), at_once)
        return spent.told()

    async def _agent(self, env: Episode, task: Task) -> None:
        for _ in range(self._turns):
            await _add(env)

    async def empty(self) -> None:
        """Every episode has given its instance back."""

    async def close(self) -> None:
        await http.close()


class _Spent:
    def __init__(self) -> None:
        self._wall, self._cpu = time.perf_counter(), time.process_time()

    def told(self) -> dict[str, float]:
        memory = resident_mb(os.getpid())
        return {"wall": time.perf_counter() - self._wall, "cpu": time.process_time() - self._cpu, "memory": memory}


async def _add(env: Environment) -> None:
    result = await env.call_tool("add", ARGUMENTS)
    assert result.structured == {"result": EXPECTED}, result


async def _main() -> None:
    await serve(Trainer())


if __name__ == "__main__":
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(_main())
