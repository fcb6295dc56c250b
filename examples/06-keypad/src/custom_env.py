"""A keypad with a display: the digit that it shows is the key to press. Small enough for a model of any size."""

import random

from aenv import register_reset, register_reward, register_tool

KEYS = 5
now = {"shown": 0, "pressed": []}


@register_reset
def show(seed: int | None = None, digit: int | None = None) -> str:
    """Show another digit: the given one, or one that follows from the seed."""
    shown = random.Random(seed).randrange(KEYS) if digit is None else digit
    if not 0 <= shown < KEYS:
        raise ValueError(f"there are keys 0 to {KEYS - 1}")
    now.update(shown=shown, pressed=[])
    return f"The display shows {shown}."


@register_tool
def press(key: int) -> str:
    """Press a key.

    Args:
        key: Which key.
    """
    if not 0 <= key < KEYS:
        raise ValueError(f"there are keys 0 to {KEYS - 1}")
    now["pressed"].append(key)
    return f"You pressed {key}."


@register_reward
def right() -> float:
    """1 when the first key that was pressed is the one that was shown."""
    return float(now["pressed"][:1] == [now["shown"]])
