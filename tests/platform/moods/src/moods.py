"""An environment that starts as it is told to, and tools that are hard to be rid of."""

from __future__ import annotations

import asyncio
import os
import sys
import time
from pathlib import Path

from aenv import register_health, register_tool

MOOD = os.environ.get("MOOD", "good")
if MOOD == "missing":
    import nothing_like_this  # noqa: F401
elif MOOD == "hanging":
    print("this import does not end", flush=True)
    time.sleep(3600)
elif MOOD == "leaving":
    sys.exit("not in the mood")
elif MOOD == "dying":
    os._exit(9)


@register_health
def health() -> dict[str, str]:
    return {"status": "tired" if MOOD == "tired" else "healthy"}


@register_tool
async def stay(name: str) -> None:
    """Go on for as long as nobody ends it.

    Args:
        name: What its files are called.
    """
    Path(f"{name}.begun").touch()
    try:
        await asyncio.sleep(3600)
    finally:
        Path(f"{name}.ended").touch()


@register_tool
def flood(size: int) -> str:
    """Answer with much.

    Args:
        size: How many characters.
    """
    return "x" * size


@register_tool
def eat(size: int) -> int:
    """Take memory, and use it.

    Args:
        size: How many bytes.
    """
    return len(bytearray(b"\1" * size))
