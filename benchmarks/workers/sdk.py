"""Our SDK."""

import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from aenv import Environment, attach
from benchmarks.wire import ARGUMENTS, EXPECTED
from benchmarks.workers.loop import Calls, serve


@asynccontextmanager
async def client(url: str) -> AsyncIterator[Calls]:
    async with Environment("bench-few", provision=attach(url)) as env:

        async def tool() -> None:
            result = await env.call_tool("add", ARGUMENTS)
            assert result.content[0]["text"] == str(EXPECTED), result

        async def reward() -> None:
            assert await env.call_reward(ARGUMENTS) == EXPECTED

        async def function() -> None:
            assert await env.call_function("total", ARGUMENTS) == EXPECTED

        yield {"add": tool, "reward": reward, "function": function}


if __name__ == "__main__":
    serve(client(sys.argv[1]))
