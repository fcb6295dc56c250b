"""Kubernetes for the tests of the engine on it."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests import cluster as clusters
from tests.cluster.conftest import (
    api_server,
    breakable,
    busybox_image,
    cluster,
    dockerd,
    ground,
    inside,
    namespace,
    node_image,
)
from tests.engines.kubernetes.lab import Harbour

__all__ = [
    "api_server",
    "breakable",
    "busybox_image",
    "cluster",
    "dockerd",
    "ground",
    "inside",
    "namespace",
    "node_image",
]


@pytest.fixture
async def harbour(inside: clusters.Cluster, namespace: str, node_image: str, tmp_path: Path) -> AsyncIterator[Harbour]:
    """A namespace in which nothing is left of a test."""
    found = Harbour(inside, namespace, node_image, tmp_path)
    yield found
    assert await found.clear() == []
