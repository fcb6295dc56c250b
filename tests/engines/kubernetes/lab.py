"""Help for tests of the engine on pods: engines of one namespace, specs, and what is left in it."""

from __future__ import annotations

import asyncio
import json
import secrets
from pathlib import Path
from typing import Any

from aenv.engines.kubernetes.api import Cluster
from aenv.engines.kubernetes.engine import KubernetesEngine
from tests import cluster as clusters
from tests.engines.docker.lab import call, of_image, over, probe
from tests.support import eventually

__all__ = ["PATIENCE", "Harbour", "asker", "call", "eventually", "of_image", "over", "probe"]

PATIENCE = clusters.PATIENCE
LITTLE = {"requests": {"cpu": "10m", "memory": "32Mi", "ephemeral-storage": "1Mi"}}
"""What a pod asks for in tests: the node of a laptop has no room for several that ask for a processor."""
LEFT = ("pods", "persistentvolumeclaims")


def templates(folder: Path, **pods: Any) -> Path:
    """Templates of a site where every pod asks for little; ``pods`` are more of its pod's fields, by template."""
    containers = [{"name": name, "resources": LITTLE} for name in ("main", "second")]
    porter = [{"name": "porter", "resources": LITTLE}]
    folder.mkdir(parents=True, exist_ok=True)
    for name, body in {"default": {"containers": containers, "initContainers": porter}, **pods}.items():
        (folder / f"{name}.json").write_text(json.dumps({"spec": body}))
    return folder


async def asker(kubeconfig: Path | str) -> Cluster:
    """A cluster, asked as an engine asks it."""
    return await Cluster.find(str(kubeconfig))


class Harbour:
    """A namespace of a cluster, with engines of one state."""

    def __init__(self, cluster: clusters.Cluster, namespace: str, base_image: str, folder: Path) -> None:
        self.cluster, self.namespace, self.base_image = cluster, namespace, base_image
        self.state = f"t{secrets.token_hex(4)}"
        self.key = secrets.token_bytes(32)
        self.templates = templates(folder / "templates")
        self.engines: list[KubernetesEngine] = []

    def engine(self, *, state: str | None = None, **options: Any) -> KubernetesEngine:
        """An engine, of the state that all of this test have by default."""
        given: dict[str, Any] = {
            "kubeconfig": str(self.cluster.kubeconfig),
            "namespace": self.namespace,
            "state": self.state if state is None else state,
            "key": self.key,
            "base_image": self.base_image,
            "templates": str(self.templates),
            "access": "direct",
        }
        made = KubernetesEngine(**{**given, **options})
        self.engines.append(made)
        return made

    async def kubectl(self, *words: str, input: str | None = None) -> str:
        """Run kubectl in the namespace, while the engines go on."""
        return await asyncio.to_thread(self.cluster.kubectl, "--namespace", self.namespace, *words, input=input)

    async def pods(self) -> list[dict[str, Any]]:
        """All that are in the namespace."""
        found: list[dict[str, Any]] = json.loads(await self.kubectl("get", "pods", "--output", "json"))["items"]
        return found

    async def left(self) -> list[str]:
        """Pods and volumes that are in the namespace, and leases that somebody holds."""
        leases = json.loads(await self.kubectl("get", "leases", "--output", "json"))["items"]
        held = [f"lease/{row['metadata']['name']}" for row in leases if row["spec"].get("holderIdentity")]
        return await asyncio.to_thread(self.cluster.left, self.namespace, *LEFT) + held

    async def clear(self) -> list[str]:
        """End the engines; and what was left in the namespace then, which is removed."""
        for engine in self.engines:
            await engine.close()
        left = await self.left()
        for name in left:
            await self.kubectl("delete", name, "--grace-period=0", "--force", "--ignore-not-found")
        return left
