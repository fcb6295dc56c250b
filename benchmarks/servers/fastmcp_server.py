"""The same tools on FastMCP: ``python -m benchmarks.servers.fastmcp_server PORT``."""

import sys

from fastmcp import FastMCP

mcp = FastMCP("bench")


@mcp.tool
def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


@mcp.tool
async def add_async(a: int, b: int) -> int:
    """Add two numbers on the event loop."""
    return a + b


@mcp.tool
def subtract(a: int, b: int) -> int:
    """Take one number from another."""
    return a - b


if __name__ == "__main__":
    # Quiet, so that no side pays for a line of log on each call.
    mcp.run(transport="http", host="127.0.0.1", port=int(sys.argv[1]), show_banner=False, log_level="ERROR")
