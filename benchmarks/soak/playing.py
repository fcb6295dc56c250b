"""Who plays in the long run of rollouts, in which tasks, and what has to come of each: it follows from the task, the
run's seed and the sample."""

from __future__ import annotations

import random
from typing import Any

from aenv.rl import Episode, Task
from aenv.rl.playing import derived

SEED = 7
"""Of the run, which the seeds of all episodes follow from."""
FILE = "start.txt"
MODULUS = 1_000_003
LONGEST_REST = 0.6
"""Seconds."""


def task(number: int) -> dict[str, Any]:
    """One of the tasks. Every fifth has a seed of its own. Every second brings a file, and so has instances of its own;
    the others are played in instances that play several."""
    start = number * 7
    return {
        "id": f"task-{number}",
        **({"files": {FILE: str(start)}} if number % 2 else {}),
        "reward": {"weight": 1 + number % 3},
        "metadata": {"steps": 3 + number % 5, "start": start},
        **({"seed": number} if number % 5 == 0 else {}),
    }


def _drawn(sample_seed: int, steps: int) -> list[int]:
    draws = random.Random(sample_seed)
    return [draws.randrange(1000) for _ in range(steps)]


async def play(env: Episode, task: Task) -> int:
    """The agent."""
    assert env.sample_seed is not None
    if task.files:
        await env.call_tool("load", {"path": FILE})
    else:
        await env.call_tool("step", {"value": task.metadata["start"]})
    for value in _drawn(env.sample_seed, task.metadata["steps"]):
        await env.call_tool("step", {"value": value})
    found = await env.call_tool("rest", {"seconds": random.uniform(0, LONGEST_REST)})
    total: int = found.structured["result"]
    return total


def totals(task: Task, sample: int) -> list[int]:
    """What each call of an episode answers: the number so far."""
    seed = derived(SEED, task.id) if task.seed is None else task.seed
    total = seed % MODULUS
    found = []
    for value in (task.metadata["start"], *_drawn(derived(seed, sample), task.metadata["steps"])):
        total = (total * 31 + value) % MODULUS
        found.append(total)
    return [*found, total]


def score(task: Task, sample: int) -> float:
    """What an episode is scored, if it is scored at all."""
    return float(totals(task, sample)[-1] * task.reward["weight"])
