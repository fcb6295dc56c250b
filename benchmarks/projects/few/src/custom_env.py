"""Three tools, a reward and a function with one signature, so that only the way they are called differs.

Nothing is kept from call to call, so the reset, for instances that play several episodes, has nothing to put back.
"""

from aenv import register_function, register_reset, register_reward, register_tool


@register_reset
def begin(seed: int | None = None) -> None:
    """Begin anew."""


@register_tool
def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


@register_tool
async def add_async(a: int, b: int) -> int:
    """Add two numbers on the event loop."""
    return a + b


@register_tool
def subtract(a: int, b: int) -> int:
    """Take one number from another."""
    return a - b


@register_reward
def score(a: int, b: int) -> int:
    """Score an episode."""
    return a + b


@register_function
def total(a: int, b: int) -> int:
    """Add two numbers for the program that runs the agent."""
    return a + b
