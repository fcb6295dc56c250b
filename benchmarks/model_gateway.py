"""What the model gateway adds to a call of the stand-in, and to the first token of a stream."""

from __future__ import annotations

import asyncio
import json
import subprocess
import time
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Any

import psutil

from aenv import http
from benchmarks.measure import Effort, Line, interleave, line
from benchmarks.processes import OURS, running

CALLS = 150
MOST, MOST_FIRST = 3.0, 0.003
"""Times a direct call; seconds of CPU before the first token."""
BODY: dict[str, Any] = {
    "model": "stand-in",
    "messages": [{"role": "user", "content": "say " + "hello there " * 20}],
}
TOKENS = {**BODY, "logprobs": True, "return_token_ids": True}
"""What the gateway asks the server for, whatever its client does."""


def model_gateway(effort: Effort) -> list[Line]:
    """A call through the model gateway beside one without, and the CPU it takes until the first token of a stream."""
    with running([OURS, "-m", "benchmarks.servers.model"], piped=True) as server:
        direct = _address(server)
        with running([OURS, "-m", "benchmarks.servers.model_gateway", direct], piped=True) as gateway:
            through, used = _address(gateway), psutil.Process(gateway.pid).cpu_times

            def first() -> float:
                before = sum(used()[:2])
                asyncio.run(_many(lambda: _first(through)))
                return (sum(used()[:2]) - before) / CALLS

            for url in (direct, through):
                asyncio.run(_many(lambda url=url: _whole(url)))
            ours, same, plain, cpu = interleave(
                effort.rounds(9),
                lambda: asyncio.run(_many(lambda: _whole(through))),
                lambda: asyncio.run(_many(lambda: _whole(direct, TOKENS))),
                lambda: asyncio.run(_many(lambda: _whole(direct))),
                first,
            )
    found = line("model gateway, first token, CPU", "ms", cpu, "3 ms", [MOST_FIRST] * len(cpu), limit=1.0, scale=1e3)
    return [
        line("model gateway, a call", "ms", ours, "the server itself", same, limit=MOST, scale=1e3),
        line("model gateway, a call (no tokens asked)", "ms", ours, "the server itself", plain, scale=1e3),
        replace(found, ratio=max(found.ratio or 0.0, 0.5)),  # below half of its limit, it makes no difference
    ]


def _address(process: subprocess.Popen[bytes]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().decode().strip()


async def _many(call: Callable[[], Awaitable[None]]) -> float:
    begun = time.perf_counter()
    for _ in range(CALLS):
        await call()
    spent = (time.perf_counter() - begun) / CALLS
    await http.close()
    return spent


async def _whole(url: str, body: dict[str, Any] = BODY) -> None:
    answer = await http.request("POST", url, "/chat/completions", body=json.dumps(body).encode())
    if answer.status != 200:
        raise RuntimeError(answer.body[:300])


async def _first(url: str) -> None:
    """Until the first token, and then away."""
    body = json.dumps({**BODY, "stream": True}).encode()
    async with http.stream("POST", url, "/chat/completions", body=body) as stream:
        async for _ in stream:
            return
