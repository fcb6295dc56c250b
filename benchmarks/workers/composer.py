"""A program that starts environments which are made of others, in the folder of one of benchmarks/projects.

Requests and answers are lines, as ``benchmarks.workers.owner`` reads and writes them. ``start`` starts an environment
by its name, and answers the seconds to its first answer; ``call`` answers those of each of ``count`` calls of a tool.
``think`` answers those of each of ``count`` answers of an agent in this process.
"""

from __future__ import annotations

import time

from aenv import Environment, http
from benchmarks.workers.owner import serve


class Composer:
    """One environment at a time."""

    async def start(self, name: str) -> float:
        begun = time.perf_counter()
        async with Environment(name) as env:
            await env.call_tool("echo", {"text": "x"})
            return time.perf_counter() - begun

    async def call(self, name: str, tool: str, count: int, argument: str = "text") -> float:
        async with Environment(name) as env:
            await env.call_tool(tool, {argument: "x"})
            begun = time.perf_counter()
            for _ in range(count):
                await env.call_tool(tool, {argument: "x"})
            return (time.perf_counter() - begun) / count

    async def think(self, count: int) -> float:
        from thinker import think

        begun = time.perf_counter()
        for _ in range(count):
            await think("x")
        return (time.perf_counter() - begun) / count

    async def empty(self) -> None:
        """Every request has given its instances back."""

    async def close(self) -> None:
        await http.close()


if __name__ == "__main__":
    import asyncio

    asyncio.run(serve(Composer()))
