"""Forks over HTTP draw other random numbers than their parent and each other, unless the same are asked for."""

from __future__ import annotations

import sys
from collections.abc import AsyncIterator
from typing import Any

import msgspec
import pytest
import pytest_asyncio

from aenv.wire import Instance
from tests.api.ground import Api, Platform, call, on_processes
from tests.engines.process.lab import isolation_or_skip

pytestmark = [
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.skipif(sys.platform != "linux", reason="the process engine needs Linux"),
]

DICE = """
import random

from aenv import Context, register_tool

thrown = []


@register_tool
def throw(context: Context) -> dict[str, object]:
    thrown.append(random.random())
    return {"thrown": thrown, "seed": context.seed}
"""


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def platform() -> AsyncIterator[Platform]:
    isolation_or_skip("auto")
    async with on_processes(lambda shelf, home: shelf.publish(home, "dice", module=DICE, forkable=True)) as running:
        yield running


@pytest_asyncio.fixture(loop_scope="module")
async def alice(platform: Platform) -> Api:
    return await platform.api("alice")


async def fork(api: Api, of: Instance, **wanted: Any) -> list[Instance]:
    """Two of them."""
    headers = {"Prefer": "wait=60"}
    answer = await api.ask("POST", f"/env-instance/{of.id}/fork", {"count": 2, **wanted}, headers=headers)
    made = msgspec.convert(answer.data, list[Instance])
    assert [one.status for one in made] == ["Running"] * 2, [one.reason for one in made]
    return made


async def thrown(*made: Instance) -> list[list[float]]:
    """What each has thrown, its parent's included, after another throw."""
    return [(await call(one, "throw"))["thrown"] for one in made]


async def test_each_fork_draws_others_unless_the_same_are_wanted(alice: Api) -> None:
    parent = (await alice.create("dice", seed=7)).instance
    [first] = await thrown(parent)
    own, same = await fork(alice, parent), await fork(alice, parent, same_random=True)
    found = await thrown(parent, *own, *same)
    assert [before for *before, _ in found] == [first] * 5, "they begin where it was"
    assert found[3:] == found[:1] * 2
    assert len({last for *_, last in found}) == 3
    seeds = [(await call(one, "throw"))["seed"] for one in (parent, *own, *same)]
    assert seeds[0] == seeds[3] == seeds[4] == 7
    assert len(set(seeds)) == 3
    again = await fork(alice, own[0])
    assert len({last for *_, last in await thrown(own[0], *again)}) == 3


async def test_a_fork_that_a_client_makes_draws_the_same_unless_it_says_otherwise(alice: Api) -> None:
    """A client has seeds of its own for siblings, and none for a checkpoint."""
    parent = (await alice.create("dice", seed=7)).instance
    same = (await alice.create("dice", seed=7, forked_from=parent.id)).instance
    other = (await alice.create("dice", seed=7, forked_from=parent.id, own_random=True)).instance
    found = await thrown(parent, same, other)
    assert found[0] == found[1] != found[2]


async def test_only_forks_have_others_to_differ_from(alice: Api) -> None:
    refused = await alice.create("dice", own_random=True)
    assert refused.status == 422
    assert "own_random" in refused.json["message"]
