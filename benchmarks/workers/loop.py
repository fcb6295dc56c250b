"""What every client process does: open a client, then run the rounds that its parent asks for on stdin.

A round is a line ``{"call": name, "calls": n, "callers": n}``. Its answer is a line with the seconds of this process's
``cpu``, of the ``user`` part of it, and of the ``wall``. The standard library only: it also runs inside the peers'
environments.
"""

import asyncio
import json
import os
import sys
import time
from collections.abc import Awaitable, Callable, Mapping
from contextlib import AbstractAsyncContextManager

Call = Callable[[], Awaitable[None]]
"""Make one call and check its answer."""
Calls = Mapping[str, Call]


def serve(client: AbstractAsyncContextManager[Calls]) -> None:
    """Run rounds until stdin ends."""
    asyncio.run(_serve(client))


async def _serve(client: AbstractAsyncContextManager[Calls]) -> None:
    async with client as calls:
        _answer({"ready": True})
        # In a thread, so that a client whose connections need the loop is alive between rounds.
        while line := await asyncio.to_thread(sys.stdin.readline):
            wanted = json.loads(line)
            _answer(await _round(calls[wanted["call"]], wanted["calls"], wanted["callers"]))


async def _round(call: Call, calls: int, callers: int) -> dict[str, float]:
    async def caller() -> None:
        for _ in range(calls // callers):
            await call()

    wall, cpu, user = time.perf_counter(), time.process_time(), os.times().user
    await asyncio.gather(*(caller() for _ in range(callers)))
    spent = {"cpu": time.process_time() - cpu, "user": os.times().user - user}
    return {**spent, "wall": time.perf_counter() - wall}


def _answer(value: dict[str, float]) -> None:
    sys.stdout.write(json.dumps(value) + "\n")
    sys.stdout.flush()
