"""Tools for the long run."""

import asyncio
import os

from aenv import Context, register_reward, register_tool


@register_tool
def add(a: int, b: int) -> int:
    """Add."""
    return a + b


@register_tool
async def echo(text: str) -> str:
    """Say it back."""
    return text


@register_tool
def big(size: int) -> str:
    """A long answer."""
    return "x" * size


@register_tool
def steps(n: int, ctx: Context) -> str:
    """Progress and logs."""
    for step in range(n):
        ctx.progress(step + 1, n)
    return "done"


@register_tool
async def sleep(seconds: float) -> str:
    """Sleep."""
    await asyncio.sleep(seconds)
    return "awake"


@register_tool
def fail() -> str:
    """Raises."""
    raise ValueError("no")


@register_tool
def pid() -> int:
    """The process that serves."""
    return os.getpid()


@register_tool
def end() -> None:
    """The end of the process that serves."""
    os._exit(1)


@register_reward
def odd(answer: int) -> float:
    """1 for an odd number."""
    return float(answer % 2)
