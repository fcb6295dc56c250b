"""FastMCP's client."""

import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from fastmcp import Client

from benchmarks.wire import ARGUMENTS, EXPECTED
from benchmarks.workers.loop import Calls, serve


@asynccontextmanager
async def client(url: str) -> AsyncIterator[Calls]:
    async with Client(f"{url}/mcp") as mcp:

        async def tool() -> None:
            result = await mcp.call_tool("add", ARGUMENTS)
            assert result.structured_content == {"result": EXPECTED}, result

        yield {"add": tool}


if __name__ == "__main__":
    serve(client(sys.argv[1]))
