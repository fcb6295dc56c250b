"""The cheapest client at hand, to drive servers with: ``aenv.http`` sending bytes made once."""

import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from aenv import http
from benchmarks import wire
from benchmarks.workers.loop import Call, Calls, serve


@asynccontextmanager
async def client(url: str) -> AsyncIterator[Calls]:
    def calling(tool: str) -> Call:
        headers = "".join(f"{name}: {value}\r\n" for name, value in wire.headers(tool).items()).encode()
        body = wire.add(tool)

        async def call() -> None:
            # Repeatable, for a server that closes idle connections may do so just when one is taken up again.
            response = await http.request("POST", url, "/mcp", headers=headers, body=body, repeatable=True)
            wire.check(response.status, response.body)

        return call

    yield {tool: calling(tool) for tool in ("add", "add_async")}
    await http.close()


if __name__ == "__main__":
    serve(client(sys.argv[1]))
