"""Pods that are reached through the API server, by an engine that is not in their network."""

from __future__ import annotations

import asyncio
import os

import pytest

from aenv.engines import conformance
from aenv.engines.kubernetes.tunnel import frame
from aenv.models import State
from tests import cluster as clusters
from tests.engines.kubernetes.lab import Harbour, call, probe

pytestmark = pytest.mark.xdist_group("kubernetes")
SOME = ("create", "restart", "serves-every-route", "files-go-both-ways", "delete-during-a-call", "crash", "warm")


async def test_what_an_engine_promises_holds_through_a_tunnel(harbour: Harbour) -> None:
    """From outside of the pods' network, with the API server as the only way in."""
    with clusters.outside():
        async with harbour.engine(access="tunnel") as engine:
            results = await conformance.run(
                engine, only=SOME, another=lambda: harbour.engine(access="tunnel"), limit=300, at_once=2
            )
    assert [f"{one.name}: {one.detail}" for one in results if one.status != "pass"] == []


async def test_many_calls_and_large_ones_pass(harbour: Harbour) -> None:
    with clusters.outside():
        async with harbour.engine(access="tunnel") as engine:
            sandbox = await engine.create("one", probe())
            assert sandbox.url.startswith("unix:")
            content = os.urandom(3 * 1024 * 1024)
            await engine.upload("one", "large", content)
            assert await engine.download("one", "large") == content
            answers = await asyncio.gather(*(call(sandbox, "echo", text=f"{n}") for n in range(20)))
            assert answers == [f"{n}" for n in range(20)]
            await engine.delete("one")
            assert not os.path.exists(sandbox.url.removeprefix("unix:"))


async def test_one_that_is_left_outside_reaches_no_address_of_its_own_accord(harbour: Harbour) -> None:
    """By default an address is only dialled by a process that is in a pod of the cluster."""
    with clusters.outside():
        async with harbour.engine(access="auto") as engine:
            assert (await engine.create("one", probe())).state is State.RUNNING
            assert (await engine.get("one")).url.startswith("unix:")
            await engine.delete("one")


def test_frames_are_those_of_websockets() -> None:
    for size, head in (
        (5, b"\x82\x85"),
        (200, b"\x82\xfe\x00\xc8"),
        (70_000, b"\x82\xff" + (70_000).to_bytes(8, "big")),
    ):
        data = os.urandom(size)
        made = frame(0x2, data)
        assert made.startswith(head)
        mask, rest = made[len(head) : len(head) + 4], made[len(head) + 4 :]
        assert bytes(byte ^ mask[place % 4] for place, byte in enumerate(rest)) == data
