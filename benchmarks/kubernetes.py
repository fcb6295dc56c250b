"""What pods cost: to make one and have it run, beside a bare pod that ``kubectl run`` would make; one that waits; many
at once; and what the API server is asked for each."""

from __future__ import annotations

import asyncio
import hashlib
import json
import secrets
import time
from collections.abc import Callable, Coroutine, Sequence
from contextlib import aclosing, suppress
from statistics import median
from typing import Any

import msgspec

from aenv import http, project
from aenv.api.gateway.places import Place
from aenv.api.specialising import specialised
from aenv.engines.base import new_id
from aenv.engines.kubernetes.api import Cluster
from aenv.engines.kubernetes.engine import KubernetesEngine
from aenv.engines.specs import complete
from aenv.errors import NotFound
from aenv.models import EnvRef, SandboxSpec
from benchmarks import cluster as clusters
from benchmarks import owners
from benchmarks.cluster import Site
from benchmarks.measure import Effort, Line, interleave, line

MOST_CREATE, MOST_MANY, MOST_ASKED = 1.3, 1.5, 1.25
MOST_WARM = 0.1
"""Seconds that a claim may take. It is held as the part of a create that this is in the same run."""
SEQUENCE = 3
"""Pods one after the other, of each side in each round."""
MANY = 30
"""Pods at once."""
_PATIENCE = 120.0
_OWNER = "bench"
_Work = Callable[[int], Coroutine[Any, Any, list[float]]]


def lacking() -> str:
    """Why pods cannot be measured here; empty when they can."""
    return clusters.lacking()


def kubernetes(effort: Effort) -> list[Line]:
    """From a request to a pod that runs and answers: made anew, one that waited, and 30 at once; beside bare pods."""
    with clusters.site() as site, asyncio.Runner() as runner:
        side = runner.run(Side.open(site))
        try:

            def run(work: _Work, count: int) -> Callable[[], list[float]]:
                return lambda: runner.run(work(count))

            for work in (side.make, side.claim, side.bare):
                run(work, 1)()
            made, claimed, bare = interleave(
                3 if effort.quick else 7, run(side.make, SEQUENCE), run(side.claim, 1), run(side.bare, SEQUENCE)
            )
            together, apart = interleave(2 if effort.quick else 3, run(side.many, MANY), run(side.bare_many, MANY))
        finally:
            runner.run(side.close())
    cold = _flat(made)
    return [
        _line("pod, create to running", cold, "a bare pod", _flat(bare), MOST_CREATE),
        _line("warm pod, claimed", _flat(claimed), "a create", cold, MOST_WARM / median(cold)),
        line(f"{MANY} pods at once", "s", _flat(together), "bare pods", _flat(apart), limit=MOST_MANY),
        line(
            "requests to the API server, each of 30",
            "",
            [side.asked[MANY]],
            "of one",
            [side.asked[1]],
            limit=MOST_ASKED,
        ),
    ]


def _flat(rounds: Sequence[Sequence[float]]) -> list[float]:
    return [seconds for one in rounds for seconds in one]


def _line(name: str, ours: Sequence[float], against: str, other: Sequence[float], limit: float) -> Line:
    """A line of milliseconds. A node looks at its containers once a second, so that starts of the same round differ by
    as much: the ratio is that of the medians of all."""
    mine, theirs = median(ours), median(other)
    return Line(name, "ms", 1e3 * mine, against, 1e3 * theirs, mine / theirs, limit)


class Side:
    """An engine on a cluster, and the same cluster without it. Each answers with seconds; removing what was made is not
    counted."""

    def __init__(self, site: Site, engine: KubernetesEngine, cluster: Cluster) -> None:
        self._site, self._engine, self._cluster = site, engine, cluster
        self.token = secrets.token_hex(16)
        wanted = SandboxSpec(
            env=EnvRef("bench"),
            owner=_OWNER,
            owner_token_sha256=hashlib.sha256(self.token.encode()).hexdigest(),
            startup_timeout=_PATIENCE,
        )
        self._spec = complete(wanted, project.read(owners.PROJECT))
        self._pods = f"/api/v1/namespaces/{site.namespace}/pods"
        self.asked: dict[int, float] = {}
        """Requests for each of so many at once, from its create to its end."""

    @classmethod
    async def open(cls, site: Site) -> Side:
        engine = KubernetesEngine(
            kubeconfig=str(site.kubeconfig),
            namespace=site.namespace,
            base_image=site.image,
            templates=str(site.templates),
            access="direct",
        )
        await engine.find()
        return cls(site, engine, await Cluster.find(str(site.kubeconfig)))

    async def close(self) -> None:
        await self._engine.close()
        await http.close()

    async def make(self, count: int) -> list[float]:
        """One after the other, until it runs."""
        return [(await self.many(1))[0] for _ in range(count)]

    async def many(self, count: int) -> list[float]:
        """So many at once, until all run; the seconds of all."""
        ids, before = [new_id("bench") for _ in range(count)], self._engine.traffic.asked
        begin = time.perf_counter()
        await asyncio.gather(*(self._engine.create(id, self._spec) for id in ids))
        seconds = time.perf_counter() - begin
        await asyncio.gather(*(self._engine.delete(id) for id in ids))
        self.asked[count] = (self._engine.traffic.asked - before) / count
        return [seconds]

    async def claim(self, count: int) -> list[float]:
        """One after the other that waits, until it is an instance."""
        return [await self._claimed() for _ in range(count)]

    async def _claimed(self) -> float:
        id = new_id("bench")
        warm = await self._engine.create(id, msgspec.structs.replace(self._spec, warm=True))
        try:
            place = Place(id, warm.url, _OWNER, self.token)
            begin = time.perf_counter()
            made = await specialised(self._engine, id, self._spec, place, token=self.token, phases={})
            seconds = time.perf_counter() - begin
            assert made is not None, "the sandbox that waited is of no use"
            answer = await http.request("GET", made.url, "/health")
            assert json.loads(answer.body)["data"]["status"] != "warm", answer.body
        finally:
            await self._engine.delete(id)
        return seconds

    async def bare(self, count: int) -> list[float]:
        """Bare pods one after the other, until each is ready."""
        return [(await self.bare_many(1))[0] for _ in range(count)]

    async def bare_many(self, count: int) -> list[float]:
        """So many bare pods at once, made by a request each and watched, until all are ready."""
        run, names = secrets.token_hex(4), [f"bare-{secrets.token_hex(6)}" for _ in range(count)]
        try:
            begin = time.perf_counter()
            async with asyncio.timeout(_PATIENCE):
                await asyncio.gather(*(self._cluster.fetch("POST", self._pods, self._pod(name, run)) for name in names))
                await self._ready(run, count)
            return [time.perf_counter() - begin]
        finally:
            await self._remove(run, names)

    async def _remove(self, run: str, names: Sequence[str]) -> None:
        """End bare pods. Back when nothing runs in them any more, so that it disturbs nobody."""
        for name in names:
            with suppress(NotFound):
                await self._cluster.fetch("DELETE", f"{self._pods}/{name}")
        async with asyncio.timeout(_PATIENCE):
            query = {"labelSelector": f"run={run}"}
            while any(map(_runs, (await self._cluster.ask("GET", self._pods, query=query))["items"])):
                await asyncio.sleep(0.2)
        for name in names:
            with suppress(NotFound):
                await self._cluster.fetch("DELETE", f"{self._pods}/{name}", query={"gracePeriodSeconds": "0"})

    def _pod(self, name: str, run: str) -> dict[str, object]:
        """As ``kubectl run`` asks for it, with a command that does nothing."""
        container = {
            "name": name,
            "image": self._site.image,
            "imagePullPolicy": "IfNotPresent",
            "command": ["sh", "-c", "trap exit TERM; sleep infinity & wait"],
        }
        return {
            "apiVersion": "v1",
            "kind": "Pod",
            "metadata": {"name": name, "labels": {"run": run}},
            "spec": {"containers": [container], "restartPolicy": "Never", "terminationGracePeriodSeconds": 2},
        }

    async def _ready(self, run: str, count: int) -> None:
        """Watch the pods of a run until so many are ready."""
        ready: set[str] = set()
        query = {"watch": "1", "labelSelector": f"run={run}", "resourceVersion": "0"}
        async with aclosing(self._cluster.lines(self._pods, query)) as lines:
            async for row in lines:
                if row and _is_ready(pod := json.loads(row)["object"]):
                    ready.add(pod["metadata"]["name"])
                if len(ready) == count:
                    return


def _is_ready(pod: dict[str, Any]) -> bool:
    return any(row["type"] == "Ready" and row["status"] == "True" for row in pod["status"].get("conditions", ()))


def _runs(pod: dict[str, Any]) -> bool:
    return any("running" in row["state"] for row in pod["status"].get("containerStatuses", ()))
