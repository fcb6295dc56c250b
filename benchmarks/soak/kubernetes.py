"""The same as ``platform``, on the engine whose sandboxes are pods, with instances that crash, expire, or have waited.

At the end its namespace has nothing but the one lease of the platform's engine, and what keeps its sandboxes to the one
network that they all have."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import time
from collections import Counter
from contextlib import suppress

from aenv import AEnvError, Environment
from aenv.client.platform import Platform
from aenv.wire import InstanceRequest
from benchmarks import cluster as clusters
from benchmarks.cluster import Site
from benchmarks.kubernetes import Side
from benchmarks.processes import START
from benchmarks.soak.platform import ENV, SETTLE, Run, Servers, churn

KINDS = ("pods", "services", "persistentvolumeclaims", "networkpolicies", "leases")
KEPT = {"lease": 1, "networkpolicy": 2}
"""How many stay, of what all sandboxes share: the lease of a platform, and a policy for each kind of network."""
LIFE = 5.0
"""Seconds that an instance lives which nobody ends."""


async def soak(seconds: float) -> int:
    if reason := clusters.lacking():
        print(f"skipped: kubernetes ({reason})", file=sys.stderr)
        return 0
    with clusters.site() as site:  # in this thread, which can dial pods then, as can what it starts
        side = await Side.open(site)
        try:

            async def warming(run: Run) -> None:
                """Sandboxes that wait, and become an instance."""
                while run.goes_on:
                    run.took["claim"] += await side.claim(1)
                    run.done["claim"] += 1

            async def left(servers: Servers) -> list[str]:
                """What is not gone after a while."""
                await side.close()
                deadline = time.monotonic() + SETTLE
                while True:
                    found = _beyond(await asyncio.to_thread(_objects, site))
                    if not found or time.monotonic() > deadline:
                        return found
                    await asyncio.sleep(0.5)

            more = (crashing, expiring, warming)
            return await churn(seconds, left, "--engine", "kubernetes", more=more, variables=site.variables)
        finally:
            await side.close()


async def crashing(run: Run) -> None:
    """Instances whose process ends under their client."""
    while run.goes_on:
        env = Environment(ENV, provision=Platform(run.urls[0], run.key), ttl="10m", labels={"experiment": "crash"})
        async with env:
            with suppress(AEnvError):
                await env.call_tool("end")
        run.done["crashed"] += 1


async def expiring(run: Run) -> None:
    """Instances that live until their time is over."""
    while run.goes_on:
        request = InstanceRequest(env_name=ENV, ttl=LIFE, labels={"experiment": "expire"})
        await run.client().create(request, wait=START, key=None)
        run.done["expired"] += 1
        await asyncio.sleep(LIFE / 2)


def _beyond(found: list[str]) -> list[str]:
    """What there is more than stays."""
    kinds = Counter[str]()
    more = []
    for name in found:
        kind = name.partition("/")[0].partition(".")[0]
        kinds[kind] += 1
        if kinds[kind] > KEPT.get(kind, 0):
            more.append(name)
    return more


def _objects(site: Site) -> list[str]:
    """All that there is in the namespace, as ``pod/name``."""
    command = ["kubectl", "--kubeconfig", site.kubeconfig, "--namespace", site.namespace, "get", "--output", "name"]
    done = subprocess.run([*command, ",".join(KINDS)], capture_output=True, text=True, timeout=START, check=True)
    return done.stdout.split()
