"""A model gateway with one episode: ``python -m benchmarks.servers.model_gateway URL`` prints its URL and key."""

from __future__ import annotations

import asyncio
import os
import sys

from aenv.rl.model_gateway import ModelGateway
from aenv.runtime.server import loop_factory


async def main() -> None:
    """Serve until the standard input ends."""
    async with ModelGateway(sys.argv[1:]) as gateway, gateway.episode() as episode:
        print(episode.path_url, flush=True)
        await asyncio.get_running_loop().run_in_executor(None, sys.stdin.read)
        os._exit(0)


if __name__ == "__main__":
    with asyncio.Runner(loop_factory=loop_factory()) as runner:
        runner.run(main())
