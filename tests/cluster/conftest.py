"""Kubernetes for the tests of what runs on it. Other directories import the fixtures from here.

Modules that break a cluster share it with all others of the group ``kubernetes`` of pytest-xdist, on one process.
"""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from tests import cluster as clusters
from tests import daemons
from tests.cluster import api, material
from tests.engines.docker.conftest import dockerd, ground

__all__ = ["dockerd", "ground"]


@pytest.fixture(scope="session")
def cluster() -> Iterator[clusters.Cluster]:
    """A cluster: the one that a kubeconfig names, or one of this run."""
    if kubeconfig := clusters.given():
        yield clusters.Cluster(kubeconfig)
        return
    if reason := clusters.missing():
        pytest.skip(reason)
    with clusters.cluster(os.environ.get("PYTEST_XDIST_TESTRUNUID") or str(os.getpid())) as shared:
        yield shared


@pytest.fixture(scope="session")
def breakable(cluster: clusters.Cluster) -> clusters.Local:
    """A cluster of this run, the programs of which may be killed. A test starts again what it killed."""
    if not isinstance(cluster, clusters.Local):
        pytest.skip("AENV_TEST_KUBECONFIG names a cluster that tests must not break")
    return cluster


@pytest.fixture(scope="module")
def inside(cluster: clusters.Cluster) -> Iterator[clusters.Cluster]:
    """The cluster, in whose network the tests of a module run: they, and what they start, can dial pods."""
    with cluster.entered():
        yield cluster


@pytest.fixture(scope="module")
def namespace(cluster: clusters.Cluster) -> Iterator[str]:
    """A new namespace, which is gone after the tests of a module."""
    with cluster.namespace() as name:
        yield name


@pytest.fixture(scope="session")
def node_image(cluster: clusters.Cluster, request: pytest.FixtureRequest) -> str:
    """The base image as pods have it, with the sources as they are; or one that is there, as the variable says."""
    if named := os.environ.get("AENV_TEST_BASE_IMAGE"):
        return named
    if not isinstance(cluster, clusters.Local):
        pytest.skip("AENV_TEST_BASE_IMAGE is to name an image that the cluster of AENV_TEST_KUBECONFIG has")
    with clusters.outside():  # it is made of packages from elsewhere
        address: str = request.getfixturevalue("dockerd")
        cluster.bring_from(address, daemons.base_image(address), "aenv-base:latest")
    return "aenv-base:latest"


@pytest.fixture(scope="session")
def busybox_image(breakable: clusters.Local) -> str:
    """An image with a shell and its tools, which knows nothing of us."""
    breakable.bring(material.busybox(), material.BUSYBOX)
    return material.BUSYBOX


@pytest.fixture(scope="session")
def node_registry(breakable: clusters.Local) -> str:
    """The address of a registry that the node pulls from, and that Docker of this run pushes to."""
    if reason := daemons.missing("docker-registry"):
        pytest.skip(reason)
    return breakable.ground.registry()


@pytest.fixture(scope="module")
def api_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[api.ApiServer]:
    """An API server alone, for the tests of a module."""
    if reason := api.missing():
        pytest.skip(reason)
    with api.api_server(tmp_path_factory.mktemp("kube")) as running:
        yield running
