"""Docker and Podman for the tests of what runs on them."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from aenv import agent
from aenv.errors import Unsupported
from tests import daemons
from tests.engines.docker.beside import imported, tar
from tests.engines.docker.lab import Harbour

HELLO = """
#include <stdio.h>
#include <unistd.h>
int main(int count, char **arguments) {
    char text[100];
    ssize_t length = read(0, text, sizeof text);
    printf("%d %d %.*s", count, getuid(), (int)length, text);
    return 7;
}
"""


@pytest.fixture(scope="session")
def ground() -> Iterator[daemons.Ground]:
    """Where the daemons of this run live."""
    if reason := daemons.missing():
        pytest.skip(reason)
    with daemons.ground(os.environ.get("PYTEST_XDIST_TESTRUNUID") or str(os.getpid())) as shared:
        yield shared


@pytest.fixture(scope="session")
def dockerd(request: pytest.FixtureRequest) -> str:
    """The address of a Docker daemon."""
    return _address(request, "AENV_TEST_DOCKER_HOST", "dockerd", "containerd", "runc", "iptables")


@pytest.fixture(scope="session")
def podman(request: pytest.FixtureRequest) -> str:
    """The address of a Podman service."""
    return _address(request, "AENV_TEST_PODMAN_HOST", "podman", "runc", "iptables")


@pytest.fixture(scope="session")
def registry(request: pytest.FixtureRequest) -> str:
    """The address of an image registry, as the daemons see it."""
    return _address(request, "AENV_TEST_REGISTRY", "registry", "docker-registry")


def _address(request: pytest.FixtureRequest, variable: str, name: str, *programs: str) -> str:
    """Of what runs already, as the variable says, or of what is started."""
    if given := os.environ.get(variable):
        return given
    if reason := daemons.missing(*([] if name == "registry" else [name]), *programs):
        pytest.skip(reason)
    ground: daemons.Ground = request.getfixturevalue("ground")
    starting = {"dockerd": ground.dockerd, "podman": ground.podman, "registry": ground.registry}
    return starting[name]()


@pytest.fixture(scope="session", params=["docker", "podman"])
def daemon(request: pytest.FixtureRequest) -> str:
    """The address of a daemon: each test runs on both."""
    address: str = request.getfixturevalue("dockerd" if request.param == "docker" else "podman")
    return address


@pytest.fixture(scope="session")
def base_image(daemon: str) -> str:
    """The base image on that daemon, with the sources as they are; or one that is there, as the variable says."""
    return os.environ.get("AENV_TEST_BASE_IMAGE") or daemons.base_image(daemon)


@pytest.fixture
def home(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Where engines keep their state: a short path, since sockets are below it."""
    path = Path(tempfile.mkdtemp(prefix="aed-", dir="/tmp"))
    monkeypatch.setenv("AENV_HOME", str(path))
    yield path
    shutil.rmtree(path, ignore_errors=True)


@pytest.fixture(scope="session")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The agent, which a home of its own for each test would have compiled each time."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("AENV_HOME", str(tmp_path_factory.mktemp("agent")))
        try:
            return agent.binary()
        except Unsupported as exc:
            pytest.skip(f"{exc} ({exc.hint})")


@pytest.fixture
def program(compiled: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The agent, as whoever needs it finds it."""
    monkeypatch.setattr(agent, "binary", lambda architecture=None: compiled)
    return compiled


@pytest.fixture
async def harbour(daemon: str, base_image: str, home: Path) -> AsyncIterator[Harbour]:
    """A daemon on which nothing is left of the test."""
    found = Harbour(daemon, base_image)
    yield found
    await found.clear()


@pytest.fixture
def busybox() -> bytes:
    """An image with a shell and a few tools, and nothing else."""
    found = shutil.which("busybox")
    if found is None or subprocess.run(["ldd", found], capture_output=True, check=False).returncode == 0:
        pytest.skip("no static busybox (on Debian: apt install busybox-static)")
    tools = ("sh", "cat", "echo", "kill", "sleep", "id", "ps", "stty", "tty", "touch", "ls", "mount")
    return tar({"bin/busybox": Path(found).read_bytes()}, {f"bin/{name}": "busybox" for name in tools})


@pytest.fixture
def musl(tmp_path: Path) -> bytes:
    """An image whose only C library is musl."""
    compiler = shutil.which("musl-gcc")
    libraries = list(Path("/lib").glob("ld-musl-*.so.1"))
    if compiler is None or not libraries:
        pytest.skip("no musl-gcc (on Debian: apt install musl-tools)")
    (tmp_path / "hello.c").write_text(HELLO)
    subprocess.run([compiler, "-o", tmp_path / "hello", tmp_path / "hello.c"], check=True, timeout=60)
    found = {"bin/hello": (tmp_path / "hello").read_bytes()}
    return tar({**found, f"lib/{libraries[0].name}": libraries[0].resolve().read_bytes()})


@pytest.fixture
async def image(daemon: str, busybox: bytes, program: Path) -> AsyncIterator[str]:
    """That of ``busybox``, which the daemon has."""
    async with imported(daemon, busybox) as name:
        yield name
