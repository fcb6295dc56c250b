"""The guard between an engine and a Docker that is not its own: what it lets through, and what it refuses."""

from __future__ import annotations

import asyncio
import http.client
import json
import os
import secrets
import socket
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator, Iterator
from contextlib import aclosing, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from aenv.engines.docker.containers import KIND, PROJECT, SANDBOX, SOCKETS
from aenv.engines.docker.daemon import Daemon
from aenv.errors import Forbidden, NotFound
from aenv.models import State
from tests import daemons
from tests.engines.docker.beside import dual, imported, run
from tests.engines.docker.lab import Harbour, call, probe
from tests.engines.docker.test_warm import READS, write
from tests.platform.support import eventually

__all__ = ["write"]

pytestmark = pytest.mark.xdist_group("docker")
LIMITS = {"CapDrop": ["ALL"], "SecurityOpt": ["no-new-privileges"], "NetworkMode": "none"}
NOTHING = "nothing/of-that:name"


@pytest.fixture(scope="module")
def guard(dockerd: str) -> Iterator[str]:
    """The socket of a guard, before a real Docker."""
    if not dockerd.startswith("unix://"):
        pytest.skip("needs a Docker on a unix socket")
    with tempfile.TemporaryDirectory(prefix="aeg-", dir="/tmp") as folder:
        path = f"{folder}/docker.sock"
        command = [sys.executable, "-m", "aenv.engines.docker.guard", path, "--docker", dockerd.removeprefix("unix://")]
        with subprocess.Popen(command) as process:
            try:
                eventually("the guard", lambda: os.path.exists(path) or process.poll() is not None)
                yield path
            finally:
                process.terminate()


@pytest.fixture(scope="module")
def base(dockerd: str) -> str:
    return os.environ.get("AENV_TEST_BASE_IMAGE") or daemons.base_image(dockerd)


class _Connection(http.client.HTTPConnection):
    def __init__(self, path: str) -> None:
        super().__init__("guard", timeout=60)
        self._path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX)
        self.sock.settimeout(60)
        self.sock.connect(self._path)


def ask(guard: str, method: str, path: str, body: Any = None) -> int:
    connection = _Connection(guard)
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
        ("POST", "/v1.41/containers/nothing/attach?stream=1", 404),
        ("GET", "/images/json", 403),
        ("GET", "/v1.41/images/x/get", 403),
        ("POST", "/v1.41/images/create?fromSrc=-&repo=x", 403),
        ("POST", "/v1.41/images/create?fromSrc=http://x/&repo=localhost/aenv-agent-" + "0" * 32, 403),
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
        ("POST", "/v1.41/exec/abc/start%3f", 403),
        ("POST", "/v1.41/containers/x/start?detachKeys=a", 403),
        ("POST", "/v1.41/containers/x/stop?t=1&t=2", 403),
        ("GET", "/v2.0/_ping", 403),
    ],
)
def test_only_what_an_engine_needs_is_let_through(guard: str, method: str, path: str, status: int) -> None:
    assert ask(guard, method, path) == status


@pytest.mark.parametrize(
    "host",
    [
        {"Privileged": True},
        {"privileged": True},
        {"PidMode": "host"},
        {"IpcMode": "host"},
        {"NetworkMode": "host"},
        {"NetworkMode": "container:x"},
        {"NetworkMode": None},
        {"Binds": ["/:/host"]},
        {"Mounts": [{"Type": "bind", "Source": "/", "Target": "/host"}]},
        {"Mounts": [{"Type": "volume", "Source": "/", "Target": "/host"}]},
        {"Mounts": [{"Type": "volume", "VolumeOptions": {"DriverConfig": {"Name": "local"}}}]},
        {"Devices": [{"PathOnHost": "/dev/kmsg"}]},
        {"CapAdd": ["SYS_ADMIN"]},
        {"CapDrop": []},
        {"SecurityOpt": ["seccomp=unconfined"]},
        {"SecurityOpt": []},
        {"CgroupParent": "/"},
        {"LogConfig": {"Type": "syslog", "Config": {}}},
        {"Init": 1},
    ],
)
def test_a_container_that_takes_something_of_the_host_is_refused(guard: str, host: dict[str, Any]) -> None:
    body = {"Image": NOTHING, "Labels": {KIND: SANDBOX}, "HostConfig": {**LIMITS, **host}}
    assert ask(guard, "POST", "/v1.41/containers/create", body) == 403


@pytest.mark.parametrize(
    "driver",
    [
        {"type": "none", "o": "bind", "device": "/"},
        {"type": "tmpfs", "o": "bind", "device": "tmpfs"},
        {"type": "tmpfs", "o": "size=64k,bind", "device": "tmpfs"},
        {"type": "ext4", "o": "nodev", "device": "/dev/sda1"},
        {"type": "tmpfs", "o": "size=64k", "device": "/"},
        {},
    ],
)
def test_a_volume_of_the_host_is_refused(guard: str, driver: dict[str, str]) -> None:
    body = {"Name": "x", "Driver": "local", "DriverOpts": driver, "Labels": {KIND: SOCKETS}}
    assert ask(guard, "POST", "/v1.41/volumes/create", body) == 403


def test_what_hides_is_refused(guard: str) -> None:
    place, labels = "/v1.41/containers/create", f'"Labels":{{"{KIND}":"{SANDBOX}"}}'
    limits = json.dumps(LIMITS)[1:-1]
    for host in ('"\\u0050rivileged":true', '"Privileged"\n:\n true', '"NetworkMode":"host"', '"CapDrop":["ALL"]'):
        body = f'{{"Image":"{NOTHING}",{labels},"HostConfig":{{{limits},{host}}}}}'
        assert ask(guard, "POST", place, body.encode()) == 403, host  # the last two come twice
    assert ask(guard, "POST", place, {"Image": NOTHING, "HostConfig": LIMITS}) == 403
    assert ask(guard, "POST", place, b"[" * 100_000) == 422
    assert ask(guard, "POST", place, {"Image": "x", "Env": ["A=" + "x" * 5_000_000]}) == 413
    assert ask(guard, "POST", "/v1.41/containers/x/start", {"Privileged": True}) == 403
    connection = _Connection(guard)
    connection.request("POST", place, iter([b"{}"]), {"Transfer-Encoding": "chunked"}, encode_chunked=True)
    assert connection.getresponse().status == 403
    connection.close()


def test_a_connection_has_one_request(guard: str) -> None:
    sock = socket.socket(socket.AF_UNIX)
    with sock:
        sock.settimeout(60)
        sock.connect(guard)
        sock.sendall(b"GET /_ping HTTP/1.1\r\nHost: x\r\n\r\nPOST /build HTTP/1.1\r\nHost: x\r\n\r\n")
        answer = b""
        while piece := sock.recv(65536):
            answer += piece
    assert answer.count(b"HTTP/1.1") <= 1


@pytest.mark.parametrize("head", ["Content-Type: text/plain", "Content-Type: application/json"])
async def test_a_stream_that_docker_refuses_is_not_a_way_to_ask_more(
    guard: str, dockerd: str, base: str, head: str
) -> None:
    """An exec of a container that is paused: Docker refuses, and would read what comes next as a request."""
    guarded = Daemon(f"unix://{guard}")
    name = f"smuggled-{secrets.token_hex(5)}"
    hidden = json.dumps({"Image": base, "Labels": {"its": "own"}, "HostConfig": {"Privileged": True}}).encode()
    async with made(guarded, base, {KIND: SANDBOX}) as ours:
        await guarded.ask("POST", f"/containers/{ours}/start")
        run = await guarded.ask("POST", f"/containers/{ours}/exec", body={"Cmd": ["true"]})
        await Daemon(dockerd).ask("POST", f"/containers/{ours}/pause")
        first = f"POST /exec/{run['Id']}/start HTTP/1.1\r\nHost: x\r\n{head}\r\nContent-Length: 2\r\n\r\n{{}}"
        more = f"POST /containers/create?name={name} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
        reader, writer = await asyncio.open_unix_connection(guard)
        writer.write(f"{first}{more}Content-Length: {len(hidden)}\r\n\r\n".encode() + hidden)
        answer = await asyncio.wait_for(reader.read(), 60)
        writer.close()
        assert answer.count(b"HTTP/1.1") == 1
        assert b" 409 " in answer.split(b"\r\n")[0]
        with pytest.raises(NotFound):
            await Daemon(dockerd).ask("GET", f"/containers/{name}/json")


async def test_a_form_does_not_change_what_was_looked_at(guard: str, dockerd: str) -> None:
    name = f"smuggled-{secrets.token_hex(5)}"
    agent = "localhost/aenv-agent-" + "0" * 32
    body = f"fromSrc=-&repo={name}&tag=latest".encode()
    connection = _Connection(guard)
    path = f"/v1.41/images/create?fromSrc=-&repo={agent}"
    connection.request("POST", path, body, {"Content-Type": "application/x-www-form-urlencoded"})
    connection.getresponse().read()
    connection.close()
    with pytest.raises(NotFound):
        await Daemon(dockerd).ask("GET", f"/images/{name}/json")


def test_a_runtime_that_it_was_not_told_of_is_refused(guard: str) -> None:
    body = {"Image": NOTHING, "Labels": {KIND: SANDBOX}, "HostConfig": {**LIMITS, "Runtime": "nvidia"}}
    assert ask(guard, "POST", "/v1.41/containers/create", body) == 403


async def test_what_keeps_files_is_known_by_its_id(guard: str, base: str) -> None:
    guarded = Daemon(f"unix://{guard}")
    async with made(guarded, base, {KIND: PROJECT}) as keeper:
        id = (await guarded.ask("GET", f"/containers/{keeper}/json"))["Id"]
        async with made(guarded, base, {KIND: SANDBOX}, VolumesFrom=[f"{keeper}:ro"]) as sandbox:
            found = await guarded.ask("GET", f"/containers/{sandbox}/json")
        assert found["HostConfig"]["VolumesFrom"] == [f"{id}:ro"]
        with pytest.raises(Forbidden):
            async with made(guarded, base, {KIND: SANDBOX}, VolumesFrom=[f"{keeper}:ro"] * 5):
                pass


def test_a_container_as_an_engine_asks_for_is_let_through(guard: str) -> None:
    body = {
        "Image": NOTHING,
        "Labels": {KIND: SANDBOX},
        "Env": ["TEXT=" + "é\n" * 50_000, 'JSON={"Privileged": true, "Binds": ["/"]}'],
        "HostConfig": {**LIMITS, "IpcMode": "private", "Mounts": [], "Tmpfs": {"/tmp": "rw,size=64k"}},
    }
    assert ask(guard, "POST", "/v1.41/containers/create", body) == 404


@asynccontextmanager
async def made(daemon: Daemon, image: str, labels: dict[str, str], **more: Any) -> AsyncIterator[str]:
    """A container, until the block ends; its name."""
    name = f"guarded-{secrets.token_hex(5)}"
    host = {**LIMITS, **more}
    body = {"Image": image, "Entrypoint": ["sleep", "600"], "Cmd": [], "Labels": labels, "HostConfig": host}
    await daemon.ask("POST", "/containers/create", query={"name": name}, body=body)
    try:
        yield name
    finally:
        await daemon.ask("DELETE", f"/containers/{name}", query={"force": "1", "v": "1"})


async def test_what_is_not_ours_does_not_exist(guard: str, dockerd: str, base: str) -> None:
    docker, guarded = Daemon(dockerd), Daemon(f"unix://{guard}")
    volume = f"guarded-{secrets.token_hex(5)}"
    asked = {"Cmd": ["true"]}
    async with made(docker, base, {"its": "own"}) as other, made(guarded, base, {KIND: SANDBOX}) as ours:
        await docker.ask("POST", "/volumes/create", body={"Name": volume})
        try:
            rows = await guarded.ask("GET", "/containers/json", query={"all": "1"})
            names = {name for row in rows for name in row["Names"]}
            assert f"/{ours}" in names
            assert f"/{other}" not in names
            listed = (await guarded.ask("GET", "/volumes"))["Volumes"] or ()
            assert volume not in {row["Name"] for row in listed}

            await docker.ask("POST", f"/containers/{other}/start")
            started = await docker.ask("POST", f"/containers/{other}/exec", body=asked)
            for method, path, body in (
                ("GET", f"/containers/{other}/json", None),
                ("GET", f"/containers/{other}/logs", None),
                ("POST", f"/containers/{other}/kill", None),
                ("POST", f"/containers/{other}/exec", asked),
                ("POST", f"/exec/{started['Id']}/start", {"Detach": False, "Tty": False}),
                ("DELETE", f"/containers/{other}", None),
                ("GET", f"/volumes/{volume}", None),
                ("DELETE", f"/volumes/{volume}", None),
            ):
                with pytest.raises(NotFound):
                    await guarded.ask(method, path, body=body)
            with pytest.raises(NotFound):
                await guarded.put(f"/containers/{other}/archive", query={"path": "/"}, content=b"\0" * 10240)
            for more in (
                {"Mounts": [{"Type": "volume", "Source": volume, "Target": "/x"}]},
                {"VolumesFrom": [f"{other}:ro"]},
            ):
                with pytest.raises(NotFound):
                    async with made(guarded, base, {KIND: SANDBOX}, **more):
                        pass
        finally:
            await docker.ask("DELETE", f"/volumes/{volume}")


async def test_what_keeps_files_never_runs_and_what_runs_is_not_filled(guard: str, base: str) -> None:
    guarded = Daemon(f"unix://{guard}")
    async with made(guarded, base, {KIND: PROJECT}) as keeper, made(guarded, base, {KIND: SANDBOX}) as sandbox:
        for path in ("start", "exec"):
            with pytest.raises(Forbidden):
                await guarded.ask(
                    "POST", f"/containers/{keeper}/{path}", body={"Cmd": ["id"]} if path == "exec" else None
                )
        with pytest.raises(Forbidden):
            await guarded.put(f"/containers/{sandbox}/archive", query={"path": "/"}, content=b"\0" * 10240)
        await guarded.put(f"/containers/{keeper}/archive", query={"path": "/tmp"}, content=b"\0" * 10240)
        with pytest.raises(Forbidden):
            async with made(guarded, base, {KIND: SANDBOX}, VolumesFrom=[f"{sandbox}:ro"]):
                pass


async def test_a_stream_goes_through(guard: str, base: str) -> None:
    guarded = Daemon(f"unix://{guard}")
    async with made(guarded, base, {KIND: SANDBOX}) as name:
        await guarded.ask("POST", f"/containers/{name}/start")
        asked = {"Cmd": ["cat"], "AttachStdin": True, "AttachStdout": True}
        with pytest.raises(Forbidden):
            await guarded.ask("POST", f"/containers/{name}/exec", body={**asked, "Privileged": True})
        run = await guarded.ask("POST", f"/containers/{name}/exec", body=asked)
        async with guarded.hijack(f"/exec/{run['Id']}/start", body={"Detach": False, "Tty": False}) as inside:
            await inside.send(b"through")
            async with aclosing(inside.output()) as output:
                assert await anext(output) == (1, b"through")
                inside.end_input()
                assert [piece async for piece in output] == []


async def test_an_engine_lives_behind_it(
    guard: str, dockerd: str, base: str, busybox: bytes, program: Path, home: Path, write: Any
) -> None:
    """Sandboxes, of a project and with a second container, found again by another engine, and gone."""
    harbour = Harbour(f"unix://{guard}", base)
    try:
        async with imported(dockerd, busybox) as image:
            async with harbour.engine() as engine:
                one = await engine.create("one", probe())
                assert await call(one, "echo", text="here") == "here"
                warm = await engine.create("warm", probe(write(READS), warm=True))
                assert warm.state is State.RUNNING
                await engine.delete("warm")
                two = await engine.create("two", dual(image))
                assert await run(two, "echo hello") == "hello\n"
            async with harbour.engine() as engine:
                assert {one.id: one.state for one in await engine.find()} == dict.fromkeys(
                    ("one", "two"), State.RUNNING
                )
                assert await call(await engine.get("two"), "echo", text="again") == "again"
                assert (await harbour.run(engine, "one", "echo", "inside")) == (0, "inside\n")
                for id in ("one", "two"):
                    await engine.delete(id)
                assert await harbour.left() == []
    finally:
        await harbour.clear()
