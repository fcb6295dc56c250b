"""Help for tests of evaluations: a small benchmark with two domains, an oracle, and tasks that go wrong on purpose."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.rl.bench import new_home as plain_home
from tests.rl.bench import write_env

SUMS = '''
"""Sums of two numbers, which follow from the task and the seed."""

import random

from aenv import Invalid, ToolError, register_function, register_reset, register_reward, register_tool

SIZES = {"small": 4, "large": 12, "broken": 3}
now = {"task": "", "right": 0, "given": None, "graded": 0}


@register_function
def tasks(domain: str = "small", most: int = 100, easy: bool = False) -> dict:
    if domain not in SIZES:
        raise Invalid(f"there is no domain {domain!r}", hint="use small, large or broken")
    some = [
        {
            "id": f"{domain}-{number}",
            "instruction": f"Add up the two numbers of {domain} {number}.",
            "system": "You add numbers.",
            "reset": {"task": f"{domain}-{number}", "domain": domain},
            "metadata": {"easy": easy},
        }
        for number in range(SIZES[domain])
    ]
    return {"tasks": some[:most], "source": {"name": "sums", "version": "1.2"}}


def numbers(task: str) -> tuple[int, int]:
    drawn = random.Random(task)
    return drawn.randrange(1000), drawn.randrange(1000)


@register_reset
def begin(task: str, domain: str, seed: int | None = None) -> str:
    if not task.startswith(f"{domain}-"):
        raise Invalid(f"there is no task {task!r}")
    one, other = numbers(task)
    now.update(task=task, right=one + other, given=None, graded=0)
    return f"{one} and {other}; lucky number {random.randrange(10**6)}"


@register_tool
def submit(value: int) -> str:
    """Give the sum.

    Args:
        value: The sum.
    """
    if value < 0:
        raise ToolError("a sum is no less than 0")
    now["given"] = value
    return f"noted {value}"


@register_function
def grade() -> str:
    """What somebody else than the agent does."""
    now["graded"] += 1
    return "graded"


@register_function
def solution(task: str) -> list:
    first = [{"name": "submit", "arguments": {"value": -1}}] if task == "small-3" else []
    return [*first, {"name": "submit", "arguments": {"value": sum(numbers(task))}}, {"function": "grade"}]


@register_reward
def score() -> dict:
    if now["task"] == "broken-1":
        raise ValueError("this one cannot be judged")
    if now["given"] is None:
        return {"score": 0.0, "graded": now["graded"]}
    near = 0.5 if abs(now["given"] - now["right"]) == 1 else 0.0
    return {"score": 1.0 if now["given"] == now["right"] else near, "graded": now["graded"]}
'''
AGENT = """
import asyncio, os, random, re

async def right(env, task):
    one, other = re.findall(r"\\d+", env.observation)[:2]
    await env.call_tool("submit", {"value": int(one) + int(other)})

async def sometimes(env, task):
    one, other = re.findall(r"\\d+", env.observation)[:2]
    off = random.Random(env.sample_seed).choice([0, 0, 1, 5])
    await env.call_tool("submit", {"value": int(one) + int(other) + off})

async def slow(env, task):
    await sometimes(env, task)
    if task.id >= "large-3" and not os.path.exists(os.environ["GO_ON"]):
        await asyncio.sleep(3600)
"""


@contextmanager
def new_home() -> Iterator[Path]:
    """A home with the benchmark in it."""
    with plain_home() as home:
        write_env(home, "sums", SUMS)
        yield home
