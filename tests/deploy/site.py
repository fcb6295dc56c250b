"""A platform that ``aenv deploy`` put on a real cluster, from a registry that its node pulls from, and its user outside
of the network of pods.

The cluster has no DNS: the Services have addresses that are chosen here, and by which they are called.
"""

from __future__ import annotations

import secrets
import subprocess
import sys
from base64 import b64decode
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from aenv import http
from aenv.deploy import documents
from aenv.engines.docker.daemon import Daemon, failure
from tests import cluster as clusters
from tests import daemons
from tests.daemons import programs, stack
from tests.platform.support import Platform, new_home
from tests.support import Reply

LITTLE = {"requests": {"cpu": "10m", "memory": "32Mi"}}
"""What a pod asks for in tests: the node of a laptop has no room for several that ask for a processor."""
REDIS = "aenv-test/redis-with-cat:test"
PARTS = ("hub", "api", "data", "controller", "redis")
SANDBOX_KINDS = ("pods", "services", "persistentvolumeclaims", "networkpolicies", "leases")


def images(address: str, registry: str) -> dict[str, str]:
    """Platform, base image and Redis in the registry, made by the Docker there; by what they are."""
    base = daemons.base_image(address)
    daemons.platform_image(address, base, stack.PLATFORM)

    async def push() -> dict[str, str]:
        daemon = Daemon(address)
        try:
            await programs.make(daemon, REDIS, "redis-server", "redis-cli", "cat")
            made = {"platform": stack.PLATFORM, "base": base, "redis": REDIS}
            for name, local in made.items():
                repository = f"{registry}/aenv-{name}"
                await daemon.ask("POST", f"/images/{local}/tag", query={"repo": repository, "tag": "test"})
                path, headers = f"/images/{repository}/push", {"X-Registry-Auth": "e30="}
                async for line in daemon.lines("POST", path, query={"tag": "test"}, headers=headers, patience=300.0):
                    assert not failure(line), line
            return {name: f"{registry}/aenv-{name}:test" for name in made}
        finally:
            await http.close()

    found: dict[str, str] = daemons.awaited(push())
    return found


class Site(Platform):
    """A release in namespaces of its own."""

    def __init__(self, home: Path, cluster: clusters.Cluster, images: dict[str, str], **values: Any) -> None:
        self.cluster = cluster
        self.namespace = f"aenv-test-{secrets.token_hex(4)}"
        self.sandboxes = f"{self.namespace}-sandboxes"
        net = secrets.randbelow(200) + 20
        addresses = {part: f"10.96.{net}.{number}" for number, part in enumerate(PARTS, 1)}
        self.hub = f"http://{addresses['hub']}:8080"
        super().__init__(home)
        self.control, self.data = f"http://{addresses['api']}:8080", f"http://{addresses['data']}:8081"
        self.values = home / "values.yaml"
        self.image = images["platform"]
        repository, _, tag = self.image.rpartition(":")
        given = {
            "image": {"repository": repository, "tag": tag, "pullPolicy": "Always"},
            "clusterIPs": addresses,
            "allowedHosts": sorted(addresses.values()),
            "hub": {"resources": LITTLE, "packages": {"size": "64Mi"}},
            "api": {"dataUrl": self.data, "resources": LITTLE, "drainSeconds": 3, "graceSeconds": 10},
            "controller": {"resources": LITTLE},
            "redis": {"image": images["redis"], "pullPolicy": "Always", "size": "64Mi", "resources": LITTLE},
            "sandboxes": {"baseImage": images["base"]},
            "podTemplates": {
                "default": {"spec": {"containers": [{"name": "main", "resources": LITTLE}]}},
                "dualcontainer": {
                    "spec": {
                        "containers": [{"name": "second", "resources": LITTLE}],
                        "initContainers": [{"name": "porter", "resources": LITTLE}],
                    }
                },
            },
        }
        self.values.write_text(documents.dump(given | values))

    def deploy(self, *options: str) -> str:
        """Run ``aenv deploy`` for it; what it says."""
        where = ["--kubeconfig", str(self.cluster.kubeconfig), "--namespace", self.namespace]
        done = subprocess.run(
            [sys.executable, "-m", "aenv", "deploy", *where, "--values", str(self.values), *options],
            env=self.environment,
            capture_output=True,
            text=True,
            timeout=600,
            check=False,
        )
        assert done.returncode == 0, f"aenv deploy {' '.join(options)}:\n{done.stderr}\n{self.told_by_servers()}"
        if "--delete" not in options:
            self.token = self.first_token
            self._variables |= {"AENV_HUB_URL": self.hub, "AENV_API_KEY": self.token}
        return done.stderr

    @property
    def first_token(self) -> str:
        return self.token_in("aenv-first-token")

    def token_in(self, secret: str) -> str:
        """The token that a Secret of the release holds."""
        return b64decode(self.cluster.get(self.namespace, "secret", secret)["data"]["token"]).decode()

    def told_by_servers(self) -> str:
        """How the servers are, and what they printed last."""
        parts = [self.cluster.kubectl("get", "pods", "--namespace", self.namespace, "--output", "wide")]
        for pod in self.cluster.get(self.namespace, "pods")["items"]:
            name = pod["metadata"]["name"]
            words = ("logs", "--namespace", self.namespace, name, "--tail=20", "--ignore-errors")
            try:
                parts.append(f"{name}:\n{self.cluster.kubectl(*words)}")
            except AssertionError as exc:
                parts.append(str(exc))
        return "\n".join(parts)

    def ask(self, method: str, path: str, body: Any = None, **options: Any) -> Reply:
        """One request to the control plane, or to the hub, as the path says."""
        api = self.control
        try:
            self.control = self.hub if path.startswith("/env/") else api
            return super().ask(method, path, body, **options)
        finally:
            self.control = api

    @property
    def stands_in(self) -> dict[str, str]:
        """What there is in its place, by a pattern of what a page of the documentation calls it."""
        return {
            r"\baenv-sandboxes\b(?!/)": self.sandboxes,
            r"(?<=serviceaccount:)aenv(?=:)": self.namespace,
            r"\bregistry\.example\.org/aenv-platform:[\d.]+": self.image,
            r"https://api\.example\.org": self.control,
            r"https://hub\.example\.org": self.hub,
        }

    # What is there

    def pods(self, component: str = "") -> list[dict[str, Any]]:
        """The sandboxes; or the servers of a kind."""
        if not component:
            found = self.cluster.get(self.sandboxes, "pods")
        else:
            found = self.cluster.get(self.namespace, "pods", "-l", f"app.kubernetes.io/component={component}")
        return list(found["items"])

    def left(self, *kinds: str) -> list[str]:
        """What is in the namespace of sandboxes, but for what the release itself put there."""
        found = []
        for kind in kinds or SANDBOX_KINDS:
            rows = self.cluster.get(self.sandboxes, kind)["items"]
            mine = (row["metadata"] for row in rows)
            found += [
                f"{kind}/{about['name']}"
                for about in mine
                if about.get("labels", {}).get("app.kubernetes.io/part-of") != "aenvironment"
            ]
        return found

    def gone(self, id: str) -> bool:
        """Whether no pod of a sandbox is left."""
        return f"pods/{id}" not in self.left("pods")

    def delete_pod(self, namespace: str, name: str) -> None:
        """End a pod at once, as somebody who knows nothing of us does."""
        self.cluster.kubectl("delete", "pod", name, "--namespace", namespace, "--grace-period=0", "--force")


@contextmanager
def planned(cluster: clusters.Cluster, images: dict[str, str], **values: Any) -> Iterator[Site]:
    """One that nobody has deployed. Nothing of it is left after the block, whatever was done."""
    with new_home() as home:
        found = Site(home, cluster, images, **values)
        try:
            yield found
        finally:
            for name in (found.sandboxes, found.namespace):
                if f"namespace/{name}" in cluster.kubectl("get", "namespaces", "--output", "name").split():
                    words = ("--namespace", name, "--grace-period=0", "--force", "--wait=false")
                    cluster.kubectl("delete", "deployments,statefulsets,pods", "--all", *words)
                    cluster.kubectl("delete", "namespace", name, f"--timeout={clusters.PATIENCE:g}s", patience=190)


@contextmanager
def site(cluster: clusters.Cluster, images: dict[str, str], **values: Any) -> Iterator[Site]:
    """One whose servers are up."""
    with planned(cluster, images, **values) as found:
        found.deploy()
        yield found
