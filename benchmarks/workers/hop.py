"""Small calls and calls with 64 KB both ways, with a token: ``python -m benchmarks.workers.hop URL TOKEN``."""

import json
import os
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from itertools import count

from aenv import http
from benchmarks import wire
from benchmarks.workers.loop import Calls, serve

SIZE = 64 * 1024


@asynccontextmanager
async def client(url: str, token: str) -> AsyncIterator[Calls]:
    bearer = f"Authorization: Bearer {token}\r\n"
    headers = "".join(f"{name}: {value}\r\n" for name, value in wire.headers("add").items())
    small = (headers + bearer).encode(), wire.add()
    large = (f"Content-Type: application/json\r\n{bearer}").encode(), json.dumps({"text": "x" * SIZE}).encode()

    numbers = count(os.getpid() << 32)  # no two calls have the same id, whichever client makes them

    async def add() -> None:
        response = await http.request("POST", url, "/mcp", headers=small[0], body=small[1], repeatable=True)
        wire.check(response.status, response.body)

    async def echo() -> None:
        response = await http.request("POST", url, "/tools/echo", headers=large[0], body=large[1], repeatable=True)
        if response.status != 200 or len(response.body) < SIZE:
            raise RuntimeError(f"wrong answer (status {response.status}): {response.body[:500]!r}")

    async def add_once() -> None:
        headers = b"%bAEnv-Call-Id: %d\r\n" % (small[0], next(numbers))
        response = await http.request("POST", url, "/mcp", headers=headers, body=small[1], repeatable=True)
        wire.check(response.status, response.body)

    yield {"add": add, "echo": echo, "add_once": add_once}
    await http.close()


if __name__ == "__main__":
    serve(client(sys.argv[1], sys.argv[2]))
