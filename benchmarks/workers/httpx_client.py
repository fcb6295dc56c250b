"""httpx, one client for all requests."""

import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import httpx

from benchmarks import wire
from benchmarks.workers.loop import Calls, serve


@asynccontextmanager
async def client(url: str) -> AsyncIterator[Calls]:
    headers, body = wire.headers("add_async"), wire.add("add_async")
    async with httpx.AsyncClient() as session:

        async def call() -> None:
            response = await session.post(f"{url}/mcp", content=body, headers=headers)
            wire.check(response.status_code, response.content)

        yield {"add_async": call}


if __name__ == "__main__":
    serve(client(sys.argv[1]))
