"""A call that was given up does not stop a blocking function: nothing is saved or loaded until that has returned."""

from __future__ import annotations

import asyncio
import threading

import pytest

from aenv import Environment
from aenv.errors import Conflict
from aenv.runtime.threads import Threads
from tests.engines.process.lab import eventually
from tests.rl.bench import Bench
from tests.runtime.saving.support import PAIR, put, saves, told, written

pytestmark = pytest.mark.asyncio(loop_scope="module")

TRANSFER = (
    PAIR
    + """
@register_tool
def transfer() -> None:
    Path("/tmp/first").touch()
    while not Path("/tmp/go").exists():
        time.sleep(0.005)
    Path("/tmp/second").touch()
"""
)
PATIENCE = 30


async def _there(env: Environment, path: str) -> bool:
    return bool((await env.check_health({"path": path}))["there"])


async def test_what_still_runs_is_not_saved_halfway(bench: Bench, victim: tuple[Environment, bytes]) -> None:
    name = written(bench, TRANSFER)
    async with bench.env(name) as env:
        call = asyncio.create_task(env.call_tool("transfer"))
        await eventually("the call", lambda: _there(env, "/tmp/first"))
        call.cancel()
        await asyncio.wait((call,))

        async def is_given_up() -> bool:
            response = await env._fetch("/state")
            return response.status != 409 or not told(response).message.startswith("calls under way")

        await eventually("the end of the call", is_given_up)
        for response in (await env._fetch("/state"), await put(env, victim[1])):
            error = told(response)
            assert type(error) is Conflict
            assert error.message == "calls that were given up still run: 1"
        with pytest.raises(Conflict, match="given up"):
            await env.fork()
        await env.upload("/tmp/go", b"")
        await eventually("the end of the function", lambda: saves(env))
        async with await env.fork() as (sibling,):
            assert sibling.forked is not None
            assert sibling.forked.how == "saved"
            assert await _there(sibling, "/tmp/second")


async def test_threads_tell_how_many_were_left_alone() -> None:
    threads, go = Threads(2), threading.Event()
    kept, left, waits = (asyncio.create_task(threads.run(lambda: go.wait(PATIENCE))) for _ in range(3))
    await asyncio.sleep(0)
    assert threads.abandoned == 0  # somebody waits for them
    left.cancel()
    waits.cancel()  # it never ran
    await asyncio.wait((left, waits))
    assert threads.abandoned == 1
    go.set()
    await kept
    meeting = threading.Barrier(2, timeout=PATIENCE)
    await asyncio.gather(*(threads.run(meeting.wait) for _ in range(2)))  # both are free again
    assert threads.abandoned == 0
