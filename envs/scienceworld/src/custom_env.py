"""ScienceWorld: an agent does experiments in a simulated house, by actions in words."""

from __future__ import annotations

from importlib.metadata import version
from typing import Any

from simulator import NAMES, Simulator, Split, parsed

from aenv import Invalid, register_function, register_reset, register_reward, register_teardown, register_tool
from aenv.errors import did_you_mean

ALL = "all"
_SYSTEM = """\
You are in a simulated house, in which you can walk through doors, look at, take, open, pour, heat, mix and connect \
things. Act with the tool act, one action at a time, such as "open door to kitchen", "go to kitchen", "look at stove", \
"pick up thermometer", "use thermometer on water", "move metal pot to stove", "activate stove", "wait1" or "focus on \
water". The tool actions tells the forms that actions have, and what is within reach. To focus on the wrong thing \
fails the task."""

world = Simulator()


@register_function
def tasks(domain: str = ALL, split: Split = "train", size: int | None = None) -> dict[str, Any]:
    """The variations of one task, or the first of each.

    Args:
        domain: The name of a task, or all.
        split: Which of the benchmark's variations.
        size: How many of each task; all of one, and 1 when all are asked for.
    """
    if domain != ALL and domain not in NAMES:
        raise Invalid(f"ScienceWorld has no task {domain!r}", hint=did_you_mean(domain, (ALL, *NAMES)))
    if size is not None and size < 1:
        raise Invalid(f"size must be 1 or more, found {size}")
    number = 1 if size is None and domain == ALL else size
    found = []
    for name in NAMES if domain == ALL else (domain,):
        for variation in world.variations(name, split)[:number]:
            task = f"{name}-{variation}"
            found.append(
                {
                    "id": task,
                    "instruction": world.description(name, variation),
                    "system": _SYSTEM,
                    "tools": ["act", "actions", "inventory", "look"],
                    "reset": {"task": task},
                    "metadata": {"task": name, "variation": variation, "split": split},
                }
            )
    return {"tasks": found, "source": {"name": "scienceworld", "version": version("scienceworld")}}


@register_reset
def begin(task: str, seed: int | None = None) -> str:
    """Begin a task in a new world. Returns what is seen first."""
    return world.begin(*parsed(task))


@register_tool
def act(action: str) -> dict[str, Any]:
    """Do something. The answer has the observation, and done when the task is over.

    Args:
        action: One action in words, such as open door to kitchen; or a number, when the answer asks which one is meant.
    """
    return world.act(action)


@register_tool(annotations={"readOnlyHint": True})
def look() -> str:
    """Look around, which takes no time."""
    return str(world.free("freeActionLook"))


@register_tool(annotations={"readOnlyHint": True})
def inventory() -> str:
    """See what you carry, which takes no time."""
    return str(world.free("freeActionInventory"))


@register_tool(annotations={"readOnlyHint": True})
def actions() -> dict[str, list[str]]:
    """The forms that actions have, with OBJ for a thing, and the things within reach. Takes no time."""
    return {"actions": list(world.free("getPossibleActions")), "objects": list(world.free("getPossibleObjects"))}


@register_reward
def score() -> dict[str, Any]:
    """The benchmark's score, from 0 to 1. It says -100 when the task was failed, which counts as 0."""
    points = world.points
    return {
        "score": max(points, 0) / 100,
        "points": points,
        "failed": points < 0,
        "completed": bool(world.free("getCompleted")),
        "moves": int(world.free("getNumMoves")),
    }


@register_function
def solution(task: str) -> list[dict[str, Any]]:
    """What an oracle does: the benchmark's own path. Ask before the first action of an episode."""
    return [{"name": "act", "arguments": {"action": action}} for action in world.gold(*parsed(task))]


@register_teardown
def close() -> None:
    """No process is left."""
    world.close()
