"""A server of the library that the variable LIBRARY names, with our decorators beside it."""

from __future__ import annotations

import asyncio
import os
import sys
import time
from typing import Any

from pydantic import BaseModel

import aenv
from aenv import Image, ToolError, register_reward, register_tool

LIBRARY = os.environ["LIBRARY"]
if LIBRARY == "mcpserver2":
    from mcp.server import MCPServer as Server
    from mcp.server.mcpserver import Context
elif LIBRARY == "fastmcp1":
    from mcp.server.fastmcp import Context
    from mcp.server.fastmcp import FastMCP as Server
else:
    from fastmcp import Context
    from fastmcp import FastMCP as Server

server = Server(LIBRARY)
calls = 0
ended = 0


class Point(BaseModel):
    x: int
    y: int


@server.tool()
def greet(name: str) -> str:
    """Greet somebody."""
    return f"Hello, {name}!"


@server.tool()
def point(x: int, y: int) -> Point:
    """A point."""
    return Point(x=x, y=y)


@server.tool()
def fail() -> str:
    """Fail on every call."""
    raise ValueError("broken")


@server.tool()
async def work(n: int, ctx: Context) -> str:
    """Report progress and log, as this library does it."""
    for step in range(n):
        await ctx.report_progress(step + 1, n, f"step {step + 1}")
        await ctx.info(f"at step {step + 1}")
    return "worked"


@server.tool()
def leave() -> str:
    """Calls sys.exit."""
    sys.exit(3)


@server.tool()
def tally() -> int:
    """How often it was called."""
    global calls
    calls += 1
    return calls


@server.tool()
async def sleep(seconds: float) -> str:
    """Sleep; counts when it is cancelled."""
    global ended
    try:
        await asyncio.sleep(seconds)
    except asyncio.CancelledError:
        ended += 1
        raise
    return "awake"


@server.tool()
def cancelled() -> int:
    """How often sleep() was cancelled."""
    return ended


@server.resource("data://greeting")
def greeting() -> str:
    """A resource."""
    return "Hello from a resource"


@server.resource("data://item/{id}")
def item(id: str) -> str:
    """A template."""
    return f"item {id}"


@server.prompt()
def ask(topic: str) -> str:
    """A prompt."""
    return f"Tell me about {topic}."


@register_tool
def shout(text: str, mark: str = "!") -> str:
    """Make it loud."""
    return text.upper() + mark


@register_tool
def picture() -> Image:
    """A picture."""
    return Image(b"\x89PNG\r\n\x1a\nrest")


@register_tool
def about(ctx: aenv.Context) -> dict[str, Any]:
    """What our context knows."""
    ctx.progress(1, 1, "told")
    return {"instance_id": ctx.instance_id, "arguments": list(ctx.arguments), "seed": ctx.seed}


@register_tool
def refuse() -> str:
    """Fail in words meant for the model."""
    raise ToolError("ask for less")


@register_tool
def late() -> str:
    """Takes longer than the project allows."""
    time.sleep(60)
    return "late"


@register_reward
def score(answer: str) -> float:
    """Full marks for 42."""
    return 1.0 if answer == "42" else 0.0
