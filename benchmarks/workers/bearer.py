"""The cheap client of ``raw`` with a token: ``python -m benchmarks.workers.bearer URL TOKEN``."""

import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from aenv import http
from benchmarks import wire
from benchmarks.workers.loop import Calls, serve


@asynccontextmanager
async def client(url: str, token: str) -> AsyncIterator[Calls]:
    lines = {**wire.headers("add"), "Authorization": f"Bearer {token}"}
    headers = "".join(f"{name}: {value}\r\n" for name, value in lines.items()).encode()
    body = wire.add()

    async def call() -> None:
        response = await http.request("POST", url, "/mcp", headers=headers, body=body)
        wire.check(response.status, response.body)

    yield {"add": call}
    await http.close()


if __name__ == "__main__":
    serve(client(sys.argv[1], sys.argv[2]))
