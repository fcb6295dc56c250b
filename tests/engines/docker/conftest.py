"""Docker and Podman for the tests of what runs on them."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests import daemons


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
