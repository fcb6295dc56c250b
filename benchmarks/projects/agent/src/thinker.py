"""An agent that takes as long as its model does, which is the least that a small one takes."""

import asyncio

from aenv import register_agent


@register_agent
async def think(message: str) -> str:
    """Say it again."""
    await asyncio.sleep(0.02)
    return message
