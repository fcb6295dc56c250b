"""A small MCP server of the official SDK's: on its standard input and output, or at a port that it is told."""

from __future__ import annotations

import asyncio
import sys

from mcp.server import MCPServer
from mcp.server.mcpserver import Context, Image

from tests.integrations.wrapping.shop import PNG

server = MCPServer("notes")
notes: dict[str, str] = {}
hangers: list[object] = []


@server.tool()
def keep(title: str, text: str) -> int:
    """Keep a note, and say how many there are."""
    notes[title] = text
    return len(notes)


@server.tool()
def raises() -> str:
    """Fail."""
    raise ValueError("on purpose")


@server.tool()
def picture() -> Image:
    """One pixel."""
    return Image(data=PNG, format="png")


@server.tool()
async def steps(count: int, ctx: Context) -> str:
    """Tell about each step."""
    for step in range(count):
        await ctx.report_progress(step + 1, count)
    return "done"


@server.tool()
async def hangs() -> str:
    """Wait for ever."""
    hangers.append(None)
    await asyncio.sleep(3600)
    return "never"


@server.tool()
def hanging() -> bool:
    """Whether somebody waits for ever."""
    return bool(hangers)


@server.resource("notes://all")
def every() -> str:
    """Every note."""
    return "\n".join(f"{title}: {text}" for title, text in notes.items())


if __name__ == "__main__":
    if len(sys.argv) > 1:
        server.run("streamable-http", port=int(sys.argv[1]))
    else:
        server.run("stdio")
