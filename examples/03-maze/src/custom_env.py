"""A corridor of rooms. One door of each leads on; behind every other there is no way back."""

import random

from aenv import register_reset, register_reward, register_tool

ROOMS, DOORS = 8, 4
now = {"right": [], "room": 0, "stuck": False}


@register_reset
def begin(seed: int | None = None) -> dict:
    draws = random.Random(seed)
    now.update(right=[draws.randrange(DOORS) for _ in range(ROOMS)], room=0, stuck=False)
    return {"rooms": ROOMS, "doors": DOORS}


@register_tool
def open_door(number: int) -> dict:
    """Go through a door of the room you are in.

    Args:
        number: Which door, from 0.
    """
    if not 0 <= number < DOORS:
        raise ValueError(f"there are doors 0 to {DOORS - 1}")
    if now["stuck"] or now["room"] == ROOMS:
        raise ValueError("there is no door here")
    if number == now["right"][now["room"]]:
        now["room"] += 1
    else:
        now["stuck"] = True
    return {"room": now["room"], "stuck": now["stuck"]}


@register_reward
def out() -> float:
    """1 at the end of the corridor."""
    return float(now["room"] == ROOMS)
