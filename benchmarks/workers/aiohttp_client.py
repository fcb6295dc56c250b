"""aiohttp, one session for all requests."""

import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import aiohttp

from benchmarks import wire
from benchmarks.workers.loop import Calls, serve


@asynccontextmanager
async def client(url: str) -> AsyncIterator[Calls]:
    headers, body = wire.headers("add_async"), wire.add("add_async")
    async with aiohttp.ClientSession() as session:

        async def call() -> None:
            async with session.post(f"{url}/mcp", data=body, headers=headers) as response:
                wire.check(response.status, await response.read())

        yield {"add_async": call}


if __name__ == "__main__":
    serve(client(sys.argv[1]))
