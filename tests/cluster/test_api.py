"""The API server that tests are given without a node."""

from __future__ import annotations

import subprocess

import pytest

from tests.cluster import Cluster
from tests.cluster.api import ApiServer

MAP = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "kept"}, "data": {"a": "b"}}


def test_what_it_keeps_outlives_a_kill(api_server: ApiServer) -> None:
    asked = Cluster(api_server.kubeconfig, api_server.folder / "kubectl")
    asked.apply("default", MAP)
    for part in ("apiserver", "etcd"):
        api_server.kill(part)
        with pytest.raises((AssertionError, subprocess.TimeoutExpired)):
            asked.kubectl("get", "configmap", "kept", "--request-timeout=2s", patience=30)
        api_server.start()
        assert asked.get("default", "configmap", "kept")["data"] == {"a": "b"}


def test_a_halt_ends(api_server: ApiServer) -> None:
    asked = Cluster(api_server.kubeconfig, api_server.folder / "kubectl")
    api_server.halt()
    try:
        with pytest.raises(AssertionError):
            asked.kubectl("get", "namespaces", "--request-timeout=2s")
    finally:
        api_server.resume()
    assert "namespace/default" in asked.kubectl("get", "namespaces", "--output", "name")


def test_a_certificate_is_taken_for_a_token(api_server: ApiServer) -> None:
    asked = Cluster(api_server.certified(), api_server.folder / "kubectl")
    assert asked.kubectl("auth", "can-i", "delete", "nodes").strip() == "yes"
