"""The cluster that tests are given: it is real, runs pods, can be broken and mended, and leaves nothing."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import urllib.request
from pathlib import Path
from typing import Any

import pytest

from aenv.engines.docker.daemon import Daemon
from tests import cluster as clusters
from tests import daemons
from tests.support import ROOT, until

pytestmark = pytest.mark.xdist_group("kubernetes")

API_FROM_A_POD = """
import ssl, urllib.request
held = "/var/run/secrets/kubernetes.io/serviceaccount/"
asked = urllib.request.Request("https://10.96.0.1/version")
asked.add_header("Authorization", "Bearer " + open(held + "token").read())
print(urllib.request.urlopen(asked, context=ssl.create_default_context(cafile=held + "ca.crt")).read().decode())
"""


def pod(name: str, image: str, *command: str, **fields: Any) -> dict[str, Any]:
    container = {"name": "main", "image": image, "command": list(command), "imagePullPolicy": "IfNotPresent"}
    spec = {"containers": [container | fields.pop("container", {})], "terminationGracePeriodSeconds": 0}
    spec |= {"restartPolicy": "Never", **fields}
    return {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": name}, "spec": spec}


async def phase(cluster: clusters.Cluster, namespace: str, name: str, wanted: str) -> dict[str, Any]:
    """The pod, once it is in that phase."""
    found: dict[str, Any] = {}

    def is_there() -> bool:
        found.update(cluster.get(namespace, "pod", name))
        return bool(found["status"]["phase"] == wanted)

    await until(is_there, f"{wanted} of {name}", clusters.PATIENCE)
    return found


def holder(cluster: clusters.Local) -> str:
    return (cluster.ground.folder / "holder").read_text()


def fetch(url: str) -> int:
    with urllib.request.urlopen(url, timeout=30) as answer:
        return int(answer.status)


async def test_a_pod_of_the_base_image_is_dialled_from_here(
    inside: clusters.Cluster, namespace: str, node_image: str
) -> None:
    inside.apply(namespace, pod("served", node_image, "python", "-m", "http.server", "8081"))
    found = await phase(inside, namespace, "served", "Running")
    url = f"http://{found['status']['podIP']}:8081/"

    def is_served() -> bool:
        try:
            return fetch(url) == 200
        except OSError:
            return False

    await until(is_served, "an answer of the pod")
    reader, writer = await asyncio.open_connection(found["status"]["podIP"], 8081)
    writer.write(b"GET / HTTP/1.0\r\n\r\n")
    assert b" 200 " in await reader.readline()
    writer.close()
    script = f"import urllib.request; print(urllib.request.urlopen({url!r}).status)"
    command = [*inside.inside, sys.executable, "-c", script]
    assert subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout == "200\n"


async def test_a_pod_reaches_the_api_as_itself(cluster: clusters.Cluster, namespace: str, node_image: str) -> None:
    cluster.apply(namespace, pod("asks", node_image, "python", "-c", API_FROM_A_POD))
    await phase(cluster, namespace, "asks", "Succeeded")
    assert json.loads(cluster.kubectl("logs", "--namespace", namespace, "asks"))["major"] == "1"


async def test_a_claimed_volume_is_brought(cluster: clusters.Cluster, namespace: str, busybox_image: str) -> None:
    claim = {
        "apiVersion": "v1",
        "kind": "PersistentVolumeClaim",
        "metadata": {"name": "kept"},
        "spec": {"accessModes": ["ReadWriteOnce"], "resources": {"requests": {"storage": "1Mi"}}},
    }
    volumes = [{"name": "kept", "persistentVolumeClaim": {"claimName": "kept"}}]
    mounted = {"volumeMounts": [{"name": "kept", "mountPath": "/kept"}]}
    writes = pod("writes", busybox_image, "sh", "-c", "echo there > /kept/file", volumes=volumes, container=mounted)
    cluster.apply(namespace, claim, writes)
    await phase(cluster, namespace, "writes", "Succeeded")
    cluster.apply(namespace, pod("reads", busybox_image, "cat", "/kept/file", volumes=volumes, container=mounted))
    await phase(cluster, namespace, "reads", "Succeeded")
    assert cluster.kubectl("logs", "--namespace", namespace, "reads") == "there\n"
    assert cluster.left(namespace, "persistentvolumeclaims") == ["persistentvolumeclaim/kept"]


async def test_what_docker_pushes_the_node_pulls(
    breakable: clusters.Local, namespace: str, node_registry: str, dockerd: str, node_image: str
) -> None:
    if os.environ.get("AENV_TEST_DOCKER_HOST"):
        pytest.skip("AENV_TEST_DOCKER_HOST names a daemon that does not know the registry of this run")
    asked, name = Daemon(dockerd), f"{node_registry}/tests/pushed"
    await asked.ask("POST", f"/images/{daemons.BASE}/tag", query={"repo": name, "tag": "1"})
    sent = asked.lines(
        "POST", f"/images/{name}/push", query={"tag": "1"}, headers={"X-Registry-Auth": "e30="}, patience=300.0
    )
    assert not [line async for line in sent if "error" in line]
    breakable.apply(namespace, pod("pulled", f"{name}:1", "python", "-c", "print('here')"))
    await phase(breakable, namespace, "pulled", "Succeeded")
    assert breakable.kubectl("logs", "--namespace", namespace, "pulled") == "here\n"


def test_a_namespace_is_gone_with_what_was_in_it(cluster: clusters.Cluster) -> None:
    with cluster.namespace() as name:
        made = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "kept"}, "data": {}}
        cluster.apply(name, made)
        assert cluster.left(name) == ["configmap/kept"]
    assert f"namespace/{name}" not in cluster.kubectl("get", "namespaces", "--output", "name").split()


def test_the_network_of_before_is_back_after_a_block(breakable: clusters.Local) -> None:
    before = os.readlink("/proc/thread-self/ns/net")
    with breakable.entered():
        assert os.path.samefile("/proc/thread-self/ns/net", f"/proc/{holder(breakable)}/ns/net")
        with clusters.outside():
            assert not os.path.samefile("/proc/thread-self/ns/net", f"/proc/{holder(breakable)}/ns/net")
    assert os.readlink("/proc/thread-self/ns/net") == before


async def test_an_api_server_that_was_killed_comes_back(
    breakable: clusters.Local, namespace: str, busybox_image: str
) -> None:
    breakable.apply(namespace, pod("lasting", busybox_image, "sleep", "600"))
    before = await phase(breakable, namespace, "lasting", "Running")
    breakable.kill("apiserver")
    try:
        with pytest.raises(AssertionError, match="kubectl version"):
            breakable.kubectl("version", "--request-timeout=5s")
    finally:
        breakable.start("apiserver")
    after = await phase(breakable, namespace, "lasting", "Running")
    assert after["metadata"]["uid"] == before["metadata"]["uid"]
    assert after["status"]["containerStatuses"][0]["restartCount"] == 0
    assert breakable.kubectl("exec", "--namespace", namespace, "lasting", "--", "echo", "hello") == "hello\n"


@pytest.mark.parametrize("part", ["apiserver", "etcd"])
def test_what_is_halted_says_no_word(breakable: clusters.Local, namespace: str, part: str) -> None:
    breakable.halt(part)
    try:
        with pytest.raises(AssertionError, match="kubectl create"):
            breakable.kubectl("create", "configmap", part, "--namespace", namespace, "--request-timeout=2s")
    finally:
        breakable.resume(part)
    breakable.up()
    breakable.kubectl("create", "configmap", f"{part}-after", "--namespace", namespace)


async def test_a_node_without_its_kubelet_starts_no_pod(
    breakable: clusters.Local, namespace: str, busybox_image: str
) -> None:
    breakable.kill("kubelet")
    try:
        breakable.apply(namespace, pod("waits", busybox_image, "true"))

        def has_node() -> bool:
            return "nodeName" in breakable.get(namespace, "pod", "waits")["spec"]

        await until(has_node, "a node for the pod", clusters.PATIENCE)
        assert breakable.get(namespace, "pod", "waits")["status"]["phase"] == "Pending"
    finally:
        breakable.start("kubelet")
    await phase(breakable, namespace, "waits", "Succeeded")


KILLED = """
import os, sys
from tests import cluster
from tests.cluster import material
with cluster.cluster(sys.argv[1]) as made:
    made.bring(material.busybox(), material.BUSYBOX)
    made.kubectl("run", "lasting", "--image", material.BUSYBOX, "--command", "--", "sleep", "600")
    made.kubectl("wait", "pod/lasting", "--for=condition=Ready", "--timeout=120s")
    made.halt("etcd")
    print((made.ground.folder / "holder").read_text(), flush=True)
    os.kill(os.getpid(), 9)
"""


async def test_nothing_is_left_of_a_run_that_was_killed() -> None:
    if reason := clusters.missing():
        pytest.skip(reason)
    run = f"kk{os.getpid()}"[:8]
    with subprocess.Popen([sys.executable, "-c", KILLED, run], stdout=subprocess.PIPE, text=True, cwd=ROOT) as killed:
        assert killed.stdout is not None
        holder = killed.stdout.readline().strip()
        assert killed.wait(300) == -9
    await until(lambda: not Path(f"/proc/{holder}/root/proc").exists(), "the end of the cluster")
    folder = daemons.PLACE / run
    with daemons.ground(f"kn{os.getpid()}"):
        assert not folder.exists()
    assert str(folder) not in Path("/proc/mounts").read_text()
    assert list(daemons.GROUPS.glob(f"**/{daemons.group_of(folder)}")) == []
