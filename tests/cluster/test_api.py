"""The API server that tests are given without a node."""

from __future__ import annotations

import asyncio
import subprocess
from pathlib import Path

import pytest

from aenv import http
from aenv.engines.kubernetes.api import Cluster as Asked
from tests.cluster import Cluster, api
from tests.cluster.api import ApiServer

MAP = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "kept"}, "data": {"a": "b"}}


async def test_its_namespace_is_there_as_soon_as_it_is_up(tmp_path: Path) -> None:
    if reason := api.missing():
        pytest.skip(reason)
    running = api.ApiServer(tmp_path)
    asked = await Asked.find(str(running.kubeconfig))
    try:
        await asyncio.to_thread(running.start)
        assert (await asked.ask("GET", "/api/v1/namespaces/default"))["status"]["phase"] == "Active"
    finally:
        running.end()
        await http.close()


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
