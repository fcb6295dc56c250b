"""A call that the sandbox waits for no longer may go on there, and nobody knows what it did: it is in no journal."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Awaitable, Callable
from functools import partial
from typing import Any

import pytest
import pytest_asyncio

from aenv import CallTimeout
from aenv.client.handle import _cut_short
from aenv.errors import Unsupported
from aenv.http import Response
from tests.rl.bench import Bench, benches, write_env

SLOW = """
import time
from pathlib import Path

from aenv import register_function, register_reward, register_tool

state = {"total": 0}


@register_tool
def add(number: int) -> int:
    state["total"] += number
    return state["total"]


def _slowly() -> int:
    while not Path("go").exists():
        time.sleep(0.01)
    state["total"] += 10
    Path("done").touch()
    return state["total"]


@register_tool
def slow() -> int:
    return _slowly()


@register_function
def slow_function() -> int:
    return _slowly()


@register_reward
def slow_reward() -> float:
    return float(_slowly())


@register_tool
def say() -> dict:
    return {"code": "call_timeout"}
"""
pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def bench() -> AsyncIterator[Bench]:
    async with benches() as found:
        write_env(found.home, "slow", SLOW)
        config = found.home / "envs" / "slow" / "1.0.0" / "config.json"
        deploy = {"deterministic": True, "timeouts": {"call": "1s"}}
        config.write_text(json.dumps({**json.loads(config.read_text()), "deployConfig": deploy}))
        yield found


@pytest.mark.parametrize(
    ("way", "what"),
    [("tool", "slow"), ("function", "slow_function"), ("reward", "slow_reward")],
)
async def test_what_the_sandbox_cuts_short_is_a_gap(bench: Bench, way: str, what: str) -> None:
    async with bench.env("slow", seed=1) as env:
        await env.call_tool("add", {"number": 1})
        ways: dict[str, Callable[[str], Awaitable[Any]]]
        ways = {"tool": env.call_tool, "function": env.call_function, "reward": partial(env.call_reward, None)}
        with pytest.raises(CallTimeout):
            await ways[way](what)
        with pytest.raises(Unsupported, match=f"{way} {what} was cut short, and nobody knows what it did"):
            await env.fork(1)
        await env.upload("go", "")
        while "done" not in (await env.exec("ls")).stdout:
            pass
        assert (await env.call_tool("add", {"number": 0})).text == "11", "it went on"
    await bench.empty()


async def test_what_only_speaks_of_it_is_none(bench: Bench) -> None:
    async with bench.env("slow", seed=1) as env:
        assert (await env.call_tool("say")).structured == {"code": "call_timeout"}
        async with await env.fork(1) as (sibling,):
            assert sibling.forked is not None
            assert sibling.forked.how == "journal"
    await bench.empty()


async def test_it_is_found_at_the_end_of_a_stream() -> None:
    told = {"code": -32000, "message": "slow", "data": {"aenv": CallTimeout("slow").to_wire()}}
    events: list[dict[str, Any]] = [{"method": "notifications/progress", "params": {}}, {"id": 1, "error": told}]
    body = "".join(f"event: message\ndata: {json.dumps({'jsonrpc': '2.0', **event})}\n\n" for event in events)
    assert _cut_short("/mcp", Response(200, {b"content-type": b"text/event-stream"}, body.encode()))
