"""The same as ``platform``, on the engine whose sandboxes are containers: at the end the daemon has nothing of it."""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from aenv.engines.docker.daemon import Daemon
from benchmarks import daemon as daemons
from benchmarks.daemon import Site
from benchmarks.soak.platform import SETTLE, Servers, churn


async def soak(seconds: float) -> int:
    if reason := await asyncio.to_thread(daemons.lacking):
        print(f"skipped: docker ({reason})", file=sys.stderr)
        return 0
    async with _site() as site:
        daemon = Daemon(site.address)

        async def left(servers: Servers) -> list[str]:
            """Containers and volumes that are not gone after a while. What is found is removed."""
            names, deadline = daemons.engines(servers.home), time.monotonic() + SETTLE
            while found := await daemons.left(daemon, names):
                if time.monotonic() > deadline:
                    await daemons.clear(daemon, names)
                    break
                await asyncio.sleep(0.5)
            return found

        return await churn(seconds, left, "--engine", "docker", variables=site.variables)


@asynccontextmanager
async def _site() -> AsyncIterator[Site]:
    """A daemon, from a loop that runs."""
    made = daemons.site()
    found = await asyncio.to_thread(made.__enter__)
    try:
        yield found
    finally:
        await asyncio.to_thread(made.__exit__, None, None, None)
