"""A number that every call changes, so that a call which is lost, or comes twice, changes the score."""

import asyncio
from pathlib import Path

from aenv import register_reset, register_reward, register_tool

MODULUS = 1_000_003
total = 0


@register_reset
def begin(seed: int | None = None) -> int:
    """Begin at the seed."""
    global total
    total = (seed or 0) % MODULUS
    return total


@register_tool
def step(value: int) -> int:
    """Take a number in."""
    global total
    total = (total * 31 + value) % MODULUS
    return total


@register_tool
def load(path: str) -> int:
    """Take in the number that a file holds."""
    return step(int(Path(path).read_text()))


@register_tool
async def rest(seconds: float) -> int:
    """Take time."""
    await asyncio.sleep(seconds)
    return total


@register_reward
def score(weight: int) -> float:
    """The number, by its weight."""
    return float(total * weight)
