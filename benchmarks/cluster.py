"""The cluster that pods are measured on: the one that tests are given, else one of one node that is started for the
run."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import NamedTuple

_CLUSTER, _IMAGE = "AENV_TEST_KUBECONFIG", "AENV_TEST_BASE_IMAGE"
_SMALL = {"requests": {"cpu": "10m", "memory": "32Mi", "ephemeral-storage": "1Mi"}}
_TEMPLATE = {"spec": {"containers": [{"name": "main", "resources": _SMALL}]}}
"""Many pods fit on a small machine that way; how much each may use stays the same."""


class Site(NamedTuple):
    """A cluster, a namespace of it, and the base image that its nodes have."""

    kubeconfig: Path
    namespace: str
    image: str
    templates: Path

    @property
    def variables(self) -> dict[str, str]:
        """For programs that have their sandboxes there."""
        return {
            "AENV_KUBECONFIG": str(self.kubeconfig),
            "AENV_NAMESPACE": self.namespace,
            "AENV_BASE_IMAGE": self.image,
            "AENV_POD_TEMPLATES": str(self.templates),
            "AENV_POD_ACCESS": "direct",
        }


def lacking() -> str:
    """Why nothing can be measured on a cluster here; empty when it can."""
    if os.environ.get(_CLUSTER):
        if shutil.which("kubectl") is None:
            return "not installed: kubectl"
        return "" if os.environ.get(_IMAGE) else f"{_IMAGE} is to name an image that the cluster of {_CLUSTER} has"
    try:
        from tests import cluster
        from tests.daemons import rootfs
    except ImportError as exc:
        return f"no cluster is named, and the tools for development are not installed: {exc}"
    if reason := cluster.missing():
        return f"no cluster is named, and none can be started: {reason}"
    return "" if rootfs.archive().exists() else "no cluster is named, and there is no root file system: make components"


@contextmanager
def site() -> Iterator[Site]:
    """A new namespace of a cluster for the length of a block, in which this thread can dial pods."""
    from tests import cluster as clusters
    from tests import daemons

    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="aenv-bench-templates-")))
        (folder / "default.json").write_text(json.dumps(_TEMPLATE))
        if named := os.environ.get(_CLUSTER):
            cluster, image = clusters.Cluster(Path(named)), os.environ[_IMAGE]
        else:
            local = stack.enter_context(clusters.cluster(f"bench-{os.getpid()}"))
            address = local.ground.dockerd()
            local.bring_from(address, daemons.base_image(address), "aenv-base:latest")
            local.ground.kill("docker")  # it has done what it was for
            cluster, image = local, "aenv-base:latest"
        namespace = stack.enter_context(cluster.namespace())
        stack.enter_context(cluster.entered())
        yield Site(cluster.kubeconfig, namespace, image, folder)
