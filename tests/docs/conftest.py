"""The daemon of containers and the cluster that pages need."""

from tests.cluster.conftest import breakable, cluster, dockerd, ground, node_registry

__all__ = ["breakable", "cluster", "dockerd", "ground", "node_registry"]
