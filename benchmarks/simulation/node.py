"""``python -m benchmarks.simulation.node KUBECONFIG``: a node that runs nothing. It takes every pod of the namespace,
says of each what a kubelet would, and answers for all of them at one address as a runtime does that takes what it is
brought and is well."""

from __future__ import annotations

import asyncio
import json
import sys
from contextlib import aclosing, suppress
from datetime import UTC, datetime
from typing import Any

from aenv.engines.kubernetes.api import MERGE, Cluster
from aenv.engines.kubernetes.manifests import MAIN, PORT
from aenv.errors import AEnvError, Conflict, NotFound

ADDRESS = "127.81.0.1"
"""Of every pod. An address of the loopback that nobody else has, since the port is always the same."""
NAME = "simulated"
_PODS = "/api/v1/namespaces/default/pods"
_HEALTHY = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: 2\r\naenv-boot: simulated\r\n\r\n{}"


class Node:
    """What it has seen."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self._taken: set[str] = set()
        self._work: set[asyncio.Task[None]] = set()
        self._version = "0"

    async def run(self) -> None:
        """Follow what there is, for as long as the program lives."""
        while True:
            try:
                await self._follow()
            except AEnvError as exc:
                print(f"following pods: {exc}", file=sys.stderr, flush=True)
                await asyncio.sleep(0.1)

    async def _follow(self) -> None:
        query = {"watch": "1", "resourceVersion": self._version, "allowWatchBookmarks": "true"}
        async with aclosing(self._cluster.lines(_PODS, query)) as lines:
            async for line in lines:
                if not line:
                    continue
                event = json.loads(line)
                if event["type"] == "ERROR":
                    self._version = "0"
                    return
                self._version = event["object"]["metadata"]["resourceVersion"]
                if event["type"] != "BOOKMARK":
                    self._see(event["type"], event["object"])

    def _see(self, kind: str, pod: dict[str, Any]) -> None:
        name = pod["metadata"]["name"]
        if kind == "DELETED":
            self._taken.discard(name)
        elif pod["metadata"].get("deletionTimestamp"):
            self._later(self._end(name))
        elif name not in self._taken:
            self._taken.add(name)
            self._later(self._take(name))

    def _later(self, work: Any) -> None:
        task = asyncio.create_task(work)
        self._work.add(task)
        task.add_done_callback(self._work.discard)

    async def _take(self, name: str) -> None:
        """What happens to a pod until it is ready: it is bound, its container runs, its node finds it well."""
        target = {"apiVersion": "v1", "kind": "Node", "name": NAME}
        body = {"apiVersion": "v1", "kind": "Binding", "metadata": {"name": name}, "target": target}
        with suppress(NotFound):
            await self._insist("POST", f"{_PODS}/{name}/binding", body)
            for ready in (False, True):
                await self._insist("PATCH", f"{_PODS}/{name}/status", {"status": _status(ready)}, MERGE)

    async def _end(self, name: str) -> None:
        with suppress(NotFound):
            await self._insist("DELETE", f"{_PODS}/{name}", {"gracePeriodSeconds": 0})

    async def _insist(self, method: str, path: str, body: Any, kind: str = "application/json") -> None:
        """Ask until it is done. That a pod is bound already is as well."""
        while True:
            try:
                await self._cluster.fetch(method, path, body, None, kind)
                return
            except NotFound:
                raise
            except Conflict:
                if method == "POST":
                    return
            except AEnvError as exc:
                print(f"{method} {path}: {exc}", file=sys.stderr, flush=True)
            await asyncio.sleep(0.1)


def _status(ready: bool) -> dict[str, Any]:
    now = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    truth = {"Initialized": True, "PodScheduled": True, "ContainersReady": ready, "Ready": ready}
    container = {
        "name": MAIN,
        "image": "docker.io/library/simulated:latest",
        "imageID": f"sha256:{'0' * 64}",
        "containerID": f"containerd://{'0' * 64}",
        "ready": ready,
        "started": ready,
        "restartCount": 0,
        "state": {"running": {"startedAt": now}},
    }
    return {
        "phase": "Running",
        "hostIP": ADDRESS,
        "podIP": ADDRESS,
        "podIPs": [{"ip": ADDRESS}],
        "qosClass": "Guaranteed",
        "startTime": now,
        "conditions": [
            {"type": kind, "status": str(holds), "lastTransitionTime": now} for kind, holds in truth.items()
        ],
        "containerStatuses": [container],
    }


async def _answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """One connection to the runtime that they share: whatever is asked, all is well."""
    with suppress(asyncio.IncompleteReadError, ConnectionError):
        while True:
            head = (await reader.readuntil(b"\r\n\r\n")).lower()
            for row in head.split(b"\r\n"):
                if row.startswith(b"content-length:"):
                    await reader.readexactly(int(row.partition(b":")[2]))
            writer.write(_HEALTHY)
            await writer.drain()
    writer.close()


async def main(kubeconfig: str) -> None:
    cluster = await Cluster.find(kubeconfig)
    async with await asyncio.start_server(_answer, ADDRESS, PORT, backlog=1024):
        print("ready", flush=True)
        await Node(cluster).run()


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1]))
