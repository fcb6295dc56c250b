"""The proxy between a server and the host's Docker, in deploy/compose: what it lets through, and what it refuses."""

from __future__ import annotations

import http.client
import json
import os
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import aclosing, contextmanager
from typing import Any

import pytest

from aenv.engines.docker.daemon import Daemon
from tests import daemons
from tests.store.servers import free_port
from tests.support import ROOT

pytestmark = pytest.mark.xdist_group("docker")
COMPOSE = ROOT / "deploy" / "compose"


@pytest.fixture(scope="module")
def proxy(dockerd: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[int]:
    """The port of the proxies, before a real Docker."""
    if absent := [name for name in ("haproxy", "nginx") if shutil.which(name) is None]:
        pytest.skip(f"not installed: {', '.join(absent)}")
    if not dockerd.startswith("unix://"):
        pytest.skip("needs a Docker on a unix socket")
    folder = tmp_path_factory.mktemp("proxy")
    port, behind = free_port(), free_port()
    changes = {
        "bind :2375": f"bind 127.0.0.1:{behind}",
        "listen 2375": f"listen 127.0.0.1:{port}",
        "docker-proxy:2375": f"127.0.0.1:{behind}",
        "/var/run/docker.sock": dockerd.removeprefix("unix://"),
        " /tmp/": f" {folder}/",
    }
    for name in ("docker-proxy.cfg", "streams.conf"):
        text = (COMPOSE / name).read_text()
        for old, new in changes.items():
            text = text.replace(old, new)
        (folder / name).write_text(text)
    with (
        _running(["haproxy", "-db", "-f", str(folder / "docker-proxy.cfg")], behind),
        _running(["nginx", "-g", "daemon off; user root;", "-c", str(folder / "streams.conf")], port),
    ):
        yield port


@contextmanager
def _running(command: list[str], port: int) -> Iterator[None]:
    """A server that runs until the block ends."""
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        try:
            deadline = time.monotonic() + 60
            while True:
                assert process.poll() is None, process.stderr and process.stderr.read()
                assert time.monotonic() < deadline
                try:
                    socket.create_connection(("127.0.0.1", port), 5).close()
                    break
                except OSError:
                    time.sleep(0.05)
            yield
        finally:
            process.terminate()  # nginx then ends its workers
            process.wait(60)


def ask(port: int, method: str, path: str, body: Any = None) -> int:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    try:
        data = body if isinstance(body, bytes) or body is None else json.dumps(body).encode()
        connection.request(method, path, data, {"Content-Type": "application/json"})
        return connection.getresponse().status
    finally:
        connection.close()


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/_ping", 200),
        ("GET", "/v1.41/_ping", 200),
        ("GET", "/v1.41/version", 200),
        ("GET", "/v1.41/info", 200),
        ("GET", "/containers/json?all=1", 200),
        ("GET", "/v1.41/images/nothing/of-that:name/json", 404),
        ("POST", "/v1.41/containers/nothing/start", 404),
        ("DELETE", "/v1.41/volumes/nothing", 404),
        ("GET", "/images/json", 403),
        ("GET", "/v1.41/images/x/get", 403),
        ("POST", "/v1.41/images/create?fromSrc=-", 403),
        ("POST", "/v1.41/images/create?fromImage=x&fromSrc=-", 403),
        ("DELETE", "/v1.41/images/x", 403),
        ("POST", "/v1.41/build", 403),
        ("POST", "/v1.41/commit", 403),
        ("POST", "/v1.41/swarm/init", 403),
        ("POST", "/v1.41/networks/create", 403),
        ("GET", "/v1.41/containers/x/archive?path=/", 403),
        ("GET", "/v1.41/containers/x/export", 403),
        ("POST", "/v1.41/containers/x/update", 403),
        ("POST", "/v1.41/volumes/prune", 403),
        ("POST", "/v1.41/containers/x/../../build", 403),
        ("POST", "/v1.41/containers/%63reate", 403),
        ("POST", "/v1.41//build", 403),
        ("POST", "/v1.41/exec/abc/start/../../../build", 403),
        ("POST", "/v1.41/build%3f/../../v1.41/exec/abc/start", 403),
        ("POST", "/v1.41/exec/abc/start%3f", 403),
        ("POST", "/v1.41/containers/nothing/attach?stream=1", 404),
    ],
)
def test_only_what_a_server_needs_is_let_through(proxy: int, method: str, path: str, status: int) -> None:
    assert ask(proxy, method, path) == status


@pytest.mark.parametrize(
    "host",
    [
        {"Privileged": True},
        {"privileged": True},
        {"PidMode": "host"},
        {"NetworkMode": "host"},
        {"NetworkMode": "container:x"},
        {"Binds": ["/:/host"]},
        {"Mounts": [{"Type": "bind", "Source": "/", "Target": "/host"}]},
        {"Devices": [{"PathOnHost": "/dev/kmsg"}]},
        {"CapAdd": ["SYS_ADMIN"]},
        {"SecurityOpt": ["seccomp=unconfined"]},
        {"CgroupParent": "/"},
        {"Mounts": [{"Type": "volume", "VolumeOptions": {"DriverConfig": {"Name": "local"}}}]},
    ],
)
def test_a_container_that_takes_something_of_the_host_is_refused(proxy: int, host: dict[str, Any]) -> None:
    body = {"Image": "nothing/of-that:name", "HostConfig": host}
    assert ask(proxy, "POST", "/v1.41/containers/create", body) == 403


def test_what_hides_is_refused(proxy: int) -> None:
    place = "/v1.41/containers/create"
    assert ask(proxy, "POST", place, b'{"Image":"x","HostConfig":{"\\u0050rivileged":true}}') == 403
    assert ask(proxy, "POST", place, b'{"Image":"x","HostConfig":{"Privileged"\n:\n true}}') == 403
    assert ask(proxy, "POST", place, {"Image": "x", "Env": ["A=" + "x" * 950_000]}) == 403
    volume = {"Name": "x", "DriverOpts": {"type": "none", "o": "bind", "device": "/"}}
    assert ask(proxy, "POST", "/v1.41/volumes/create", volume) == 403
    assert ask(proxy, "POST", "/v1.41/containers/x/exec", {"Cmd": ["id"], "Privileged": True}) == 403


def test_a_container_as_an_engine_asks_for_is_let_through(proxy: int) -> None:
    body = {
        "Image": "nothing/of-that:name",
        "Env": ["TEXT=" + "é\n" * 50_000, 'JSON={"Privileged": true, "Binds": ["/"]}'],
        "HostConfig": {
            "NetworkMode": "none",
            "IpcMode": "private",
            "Privileged": False,
            "CapDrop": ["ALL"],
            "SecurityOpt": ["no-new-privileges"],
            "Binds": [],
            "Mounts": [{"Type": "volume", "Source": "x", "Target": "/x"}],
        },
    }
    assert ask(proxy, "POST", "/v1.41/containers/create", body) == 404


async def test_a_stream_and_a_connection_go_through(proxy: int, dockerd: str) -> None:
    daemon = await Daemon.find(f"tcp://127.0.0.1:{proxy}")
    image = os.environ.get("AENV_TEST_BASE_IMAGE") or daemons.base_image(dockerd)
    body = {"Image": image, "Entrypoint": ["sleep", "600"], "Cmd": [], "HostConfig": {"NetworkMode": "none"}}
    made = await daemon.ask("POST", "/containers/create", body=body)
    place = f"/containers/{made['Id']}"
    try:
        await daemon.ask("POST", f"{place}/start")
        asked = {"Cmd": ["cat"], "AttachStdin": True, "AttachStdout": True}
        run = await daemon.ask("POST", f"{place}/exec", body=asked)
        async with daemon.hijack(f"/exec/{run['Id']}/start", body={"Detach": False, "Tty": False}) as inside:
            await inside.send(b"through")
            async with aclosing(inside.output()) as output:
                assert await anext(output) == (1, b"through")
    finally:
        await daemon.ask("DELETE", place, query={"force": "1"})
