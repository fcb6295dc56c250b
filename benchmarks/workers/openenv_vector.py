"""Steps of as many OpenEnv sessions, each waiting for all: ``python -m benchmarks.workers.openenv_vector URL``.

Rounds are those of ``vector``, and so is their answer.
"""

import asyncio
import json
import random
import sys
import time
from contextlib import AsyncExitStack

from openenv.core import GenericEnvClient

from benchmarks.processes import START

ENVS = 64


async def main(url: str) -> None:
    """Step until stdin ends."""
    async with AsyncExitStack() as stack:
        envs = [
            await stack.enter_async_context(GenericEnvClient(base_url=url, connect_timeout_s=START))
            for _ in range(ENVS)
        ]
        _answer({"ready": True})
        while line := await asyncio.to_thread(sys.stdin.readline):
            draw = random.Random(1)
            await asyncio.gather(*(env.reset(seed=1 + place) for place, env in enumerate(envs)))
            steps = json.loads(line)["steps"]
            over = [False] * ENVS
            wall, cpu = time.perf_counter(), time.process_time()
            for _ in range(steps):
                work = [
                    env.reset() if over[place] else env.step({"press": draw.randrange(2)})
                    for place, env in enumerate(envs)
                ]
                over = [result.done for result in await asyncio.gather(*work)]
            _answer({"wall": time.perf_counter() - wall, "cpu": time.process_time() - cpu})


def _answer(value: dict[str, object]) -> None:
    sys.stdout.write(json.dumps(value) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1]))
