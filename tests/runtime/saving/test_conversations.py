"""Conversations of agents, in siblings: of the process where that can be forked, else of what is saved."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from tests.engines.process.lab import isolation_or_skip
from tests.rl.bench import Bench, benches, write_env

pytestmark = pytest.mark.asyncio(loop_scope="module")
AGENT = """
from aenv import *

@register_agent
def counting(message: str, conversation: Conversation) -> str:
    conversation.state["heard"] = conversation.state.get("heard", 0) + 1
    return f"{conversation.state['heard']} of {len(conversation.messages)}"
"""
TOOL = """
kept = []

@register_tool
def keep(word: str) -> None:
    kept.append(word)
"""
PAIR = """
@register_save
def save() -> list:
    return kept

@register_load
def load(found: list) -> None:
    kept[:] = found
"""


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def bench() -> AsyncIterator[Bench]:
    async with benches(isolation_or_skip("auto")) as found:
        yield found


@pytest.mark.parametrize(
    ("name", "more", "how"),
    [("live", TOOL, "live"), ("alone", "", "saved"), ("pair", TOOL + PAIR, "saved")],
    ids=["live", "alone", "pair"],
)
async def test_siblings_go_on_with_them(bench: Bench, name: str, more: str, how: str):
    write_env(bench.home, name, AGENT + more)
    if how == "live":
        config = {"name": name, "version": "1.0.0", "deployConfig": {"forkable": True}}
        (bench.home / "envs" / name / "1.0.0" / "config.json").write_text(json.dumps(config))
    async with bench.env(name) as env:
        for _ in range(2):
            await env.call_tool("chat", {"message": "hello"})
        async with await env.fork(2) as siblings:
            assert [one.forked.how for one in siblings if one.forked] == [how, how]
            for one in siblings:
                assert (await one.call_tool("chat", {"message": "hello"})).text == "3 of 4"
        assert (await env.call_tool("chat", {"message": "hello"})).text == "3 of 4"


async def test_what_a_tool_keeps_must_be_said(bench: Bench):
    write_env(bench.home, "unsaid", AGENT + TOOL)
    async with bench.env("unsaid") as env:
        assert (await env.get_env_info())["saves"] is False
