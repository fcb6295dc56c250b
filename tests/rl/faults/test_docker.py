"""A sample of the faults on containers of a real Docker."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests import daemons
from tests.engines.docker.conftest import dockerd, ground
from tests.engines.docker.lab import Harbour
from tests.rl.bench import Bench, new_home
from tests.rl.faults import samples

__all__ = ["dockerd", "ground"]
pytestmark = pytest.mark.xdist_group("docker")


@pytest.fixture
async def moored(dockerd: str) -> AsyncIterator[tuple[Bench, Harbour]]:
    """An engine on a daemon, with the saboteur at hand; nothing may be left there."""

    harbour = Harbour(dockerd, os.environ.get("AENV_TEST_BASE_IMAGE") or daemons.base_image(dockerd))
    with new_home() as home:
        async with harbour.engine() as engine:
            bench = Bench(engine, Path(home))
            yield bench, harbour
            await samples.empty(bench)
        left = await harbour.left()
        await harbour.clear()
        assert left == []


@pytest.mark.parametrize(
    "sample",
    [
        samples.goes_well,
        samples.reward_is_no_number,
        samples.out_of_memory,
        samples.time_to_live_over,
    ],
)
async def test_a_sample(moored: tuple[Bench, Harbour], sample: object) -> None:
    assert callable(sample)
    await sample(moored[0])


@pytest.mark.parametrize("how", ["killed", "removed", "deleted by the engine"])
@pytest.mark.parametrize("swallow", [False, True])
async def test_a_container_that_is_ended_in_a_call(moored: tuple[Bench, Harbour], how: str, swallow: bool) -> None:
    bench, harbour = moored

    async def strike(id: str) -> None:
        if how == "deleted by the engine":
            await bench.engine.delete(id)
            return
        (name,) = [name for name in await harbour.left() if id in name and name.startswith("/")]
        if how == "killed":
            await harbour.daemon.ask("POST", f"/containers{name}/kill")
        else:
            await harbour.daemon.ask("DELETE", f"/containers{name}", query={"force": "1"})

    await samples.struck(bench, strike, swallow=swallow)
