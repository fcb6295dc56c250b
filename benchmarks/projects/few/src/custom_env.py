"""Three tools, a reward and a function with one signature, so that only the way they are called differs.

The reset is for instances that play several episodes; as OpenEnv's does, it begins to count the turns anew.
"""

from aenv import register_function, register_reset, register_reward, register_tool

turns = 0


@register_reset
def begin(seed: int | None = None) -> None:
    """Begin at the first turn."""
    global turns
    turns = 0


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
