"""A sample of the faults on pods of a real cluster."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests import cluster as clusters
from tests.cluster.conftest import cluster, dockerd, ground, inside, namespace, node_image
from tests.engines.kubernetes.lab import Harbour
from tests.rl.bench import Bench, new_home
from tests.rl.faults import samples

__all__ = ["cluster", "dockerd", "ground", "inside", "namespace", "node_image"]
pytestmark = pytest.mark.xdist_group("kubernetes")


@pytest.fixture
async def moored(
    inside: clusters.Cluster,
    namespace: str,
    node_image: str,
    tmp_path: Path,
) -> AsyncIterator[tuple[Bench, Harbour]]:
    """An engine on a namespace, with the saboteur at hand; nothing may be left there."""
    harbour = Harbour(inside, namespace, node_image, tmp_path)
    with new_home() as home:
        async with harbour.engine() as engine:
            bench = Bench(engine, home)
            yield bench, harbour
            await samples.empty(bench)
        assert await harbour.clear() == []


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


@pytest.mark.parametrize("how", ["deleted", "deleted by the engine"])
async def test_a_pod_that_is_ended_in_a_call(moored: tuple[Bench, Harbour], how: str) -> None:
    bench, harbour = moored

    async def strike(id: str) -> None:
        if how == "deleted by the engine":
            await bench.engine.delete(id)
            return
        (pod,) = [pod["metadata"]["name"] for pod in await harbour.pods()]
        await harbour.kubectl("delete", "pod", pod, "--grace-period=0", "--force")

    await samples.struck(bench, strike, swallow=how == "deleted")
