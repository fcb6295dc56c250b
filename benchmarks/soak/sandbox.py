"""Calls, cuts, cancellations and time-outs against one sandbox for a long time.

Fails when an answer is wrong, or when memory, descriptors or threads of the sandbox keep growing.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import sys
import time
from collections import Counter
from pathlib import Path

from aenv import CallTimeout, Environment, attach
from aenv.client.serving import run_project
from benchmarks.soak.growth import WARM_UP, State

PROJECT = Path(__file__).parent.parent / "projects" / "soak"
CALLERS = 16


async def caller(env: Environment, done: Counter[str], until: float) -> None:
    """Calls of every kind, each answer checked."""
    while time.monotonic() < until:
        kind = random.choice(("add", "add", "add", "echo", "big", "steps", "time-out", "cancel", "raise", "reward"))
        number = random.randrange(1_000_000)
        if kind == "add":
            assert (await env.call_tool("add", {"a": number, "b": 1})).structured == {"result": number + 1}
        elif kind == "echo":
            assert (await env.call_tool("echo", {"text": str(number)})).text == str(number)
        elif kind == "big":
            assert len((await env.call_tool("big", {"size": 200_000})).text) == 200_000
        elif kind == "steps":
            assert (await env.call_tool("steps", {"n": 3})).text == "done"
        elif kind == "raise":
            assert (await env.call_tool("fail")).is_error
        elif kind == "reward":
            assert await env.call_reward({"answer": number}) == float(number % 2)
        elif kind == "time-out":
            with contextlib.suppress(CallTimeout):
                await env.call_tool("sleep", {"seconds": 30}, timeout=0.05)
        else:
            task = asyncio.create_task(env.call_tool("sleep", {"seconds": 30}))
            await asyncio.sleep(random.random() * 0.05)
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task
        done[kind] += 1


async def cutter(port: int, done: Counter[str], until: float) -> None:
    """Connections that are cut at a random byte of a request, or left in the middle of an answer."""
    body = b'{"size": 100000}'
    request = b"POST /tools/big HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n\r\n%b" % (len(body), body)
    while time.monotonic() < until:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        cut = random.randrange(1, len(request) + 50)
        writer.write(request[:cut])
        if cut >= len(request):
            await reader.read(1000)
        writer.transport.abort()
        done["cut"] += 1
        await asyncio.sleep(0.01)


async def soak(seconds: float) -> int:
    start = time.monotonic()
    until = start + seconds
    done: Counter[str] = Counter()
    async with run_project(PROJECT) as url:
        port = int(url.rpartition(":")[2])
        async with Environment("soak", provision=attach(url)) as env:
            pid = (await env.call_tool("pid")).structured["result"]
            work = [asyncio.create_task(caller(env, done, until)) for _ in range(CALLERS)]
            work.append(asyncio.create_task(cutter(port, done, until)))
            warm: State | None = None
            while time.monotonic() < until and not any(task.done() for task in work):
                await asyncio.sleep(min(10.0, seconds / 10))
                state = State.of(pid)
                passed = time.monotonic() - start
                print(f"{passed:7.0f} s  {done.total():9d} calls  {state}", file=sys.stderr)
                if warm is None and passed > seconds * WARM_UP:
                    warm = state
            await asyncio.gather(*work)
            state = State.of(pid)
    assert warm is not None
    print("  ".join(f"{kind} {count}" for kind, count in sorted(done.items())))
    print(f"after {WARM_UP:.0%} of the time: {warm}\nat the end:            {state}")
    grown = state.grown_since(warm)
    print(f"growing: {', '.join(grown)}" if grown else f"{done.total()} calls in {seconds:.0f} s, nothing grew")
    return 1 if grown else 0
