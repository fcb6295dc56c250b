"""``python -m benchmarks.simulation.engine KUBECONFIG``: an engine in a process of its own, which does what its parent
asks: a line ``{"do": verb, ...}``, and a line as the answer."""

from __future__ import annotations

import asyncio
import sys
import time
from statistics import median
from typing import Any

from aenv import http
from aenv.engines.base import new_id
from aenv.engines.kubernetes.engine import KEPT_FOR, KubernetesEngine
from aenv.models import EnvRef, SandboxSpec
from benchmarks.workers.owner import each, serve

STATE, KEY = "simulation", b"k" * 32
LIFE = 24 * 3600.0
LOOKS, TIMES = 21, 100
LABELS = {"experiment": "simulation"}


class Engine(KubernetesEngine):
    """The engine, whose looks can be timed."""

    def look(self) -> float:
        """CPU seconds of one look of the reaper: at those whose time is over, and at those that ended long ago."""
        assert self._ground is not None
        cache, now = self._ground.cache, self._ground.cluster.now()
        begin = time.thread_time()
        for _ in range(TIMES):
            assert not cache.due(now)
            assert not cache.over_before(now - KEPT_FOR)
        return (time.thread_time() - begin) / TIMES

    def all_due(self) -> float:
        """The same if the time of every one were over."""
        assert self._ground is not None
        cache, then = self._ground.cache, self._ground.cluster.now() + 2 * LIFE
        begin = time.thread_time()
        found = cache.due(then)
        seconds = time.thread_time() - begin
        assert len(found) == len(cache), f"{len(found)} of {len(cache)}"
        return seconds


class Owner:
    """The engine as its parent asks it."""

    def __init__(self, kubeconfig: str) -> None:
        self._engine = Engine(kubeconfig=kubeconfig, namespace="default", state=STATE, key=KEY, access="direct")
        self._spec = SandboxSpec(
            env=EnvRef("simulated", "1.0.0"),
            image="simulated",
            ttl=LIFE,
            startup_timeout=60.0,
            labels=LABELS,
            network="full",
        )

    async def open(self) -> float:
        """Seconds until it knows all pods that there are."""
        begin = time.perf_counter()
        await self._engine.find({"experiment": "none"})
        return time.perf_counter() - begin

    async def fill(self, count: int, at_once: int) -> list[float]:
        """Make so many, and say how many seconds each took."""
        seconds = []

        async def make() -> None:
            begin = time.perf_counter()
            await self._engine.create(new_id("pod"), self._spec)
            seconds.append(time.perf_counter() - begin)

        await each((make for _ in range(count)), at_once)
        return seconds

    async def look(self) -> dict[str, float]:
        return {
            "look": median(self._engine.look() for _ in range(LOOKS)),
            "all_due": median(self._engine.all_due() for _ in range(LOOKS)),
        }

    async def find(self) -> dict[str, float]:
        """How many there are, and the seconds to find them by a label."""
        begin = time.perf_counter()
        found = await self._engine.find(LABELS)
        seconds = time.perf_counter() - begin
        return {"count": sum(one.state == "Running" for one in found), "seconds": seconds}

    async def traffic(self) -> dict[str, int]:
        return self._engine.traffic._asdict()

    async def empty(self) -> None:
        """Its pods are left to their server, which ends with the run."""

    async def close(self) -> None:
        await self._engine.close()
        await http.close()


async def main(kubeconfig: str) -> None:
    owner: Any = Owner(kubeconfig)
    await serve(owner)


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1]))
