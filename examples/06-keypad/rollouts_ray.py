"""Rollouts by actors of Ray's: on this machine, or as a job on all that a cluster has."""

import asyncio
import sys

import ray

from aenv.integrations.ray import rollouts
from aenv.rl import Episode, Task, Trajectory

TASKS = [Task(id=f"digit-{digit}", reset={"digit": digit}) for digit in range(5)]


async def agent(env: Episode, task: Task) -> None:
    """Press the key that the display shows: "The display shows 3."."""
    await env.call_tool("press", {"key": int(env.observation[-2])})


async def play(actors: int, n: int) -> list[Trajectory]:
    """So many episodes of each task, as they come."""
    async with rollouts("keypad", agent, TASKS, n=n, actors=actors, seed=1) as run:
        return [trajectory async for trajectory in run]


if __name__ == "__main__":
    ray.init()  # in a job, the cluster that it was given to
    found = asyncio.run(play(actors=int(sys.argv[1]) if len(sys.argv) > 1 else 2, n=4))
    scores = [trajectory.reward for trajectory in found if trajectory.ok]
    mean = sum(scores) / len(scores)
    print(f"{len(found)} episodes, {len(found) - len(scores)} without a score, mean reward {mean:.2f}")
