"""Services of others that the tests of this folder wrap, each a process of its own."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.conformance.test_conformance import INSTALL, PREFIX
from tests.platform.support import new_home

EVERYTHING = "@modelcontextprotocol/server-everything"
COMMAND = ["node", f"node_modules/{EVERYTHING}/dist/index.js"]
"""As it is called in a project that has it."""


class Service:
    """A program of this folder, and where it listens."""

    def __init__(self, module: str, *words: str) -> None:
        line = [sys.executable, "-m", f"tests.integrations.wrapping.{module}", *words]
        self.process = subprocess.Popen(line, stdout=subprocess.PIPE, text=True)
        assert self.process.stdout is not None
        told = self.process.stdout.readline().strip()
        self.url = f"http://127.0.0.1:{told}" if told.isdigit() else told
        self.host = self.url.rpartition("/")[2]

    def end(self) -> None:
        self.process.kill()
        self.process.wait()
        assert self.process.stdout is not None
        self.process.stdout.close()


@pytest.fixture
def service() -> Iterator[Callable[..., Service]]:
    """Starts services that end with the test."""
    started: list[Service] = []

    def start(module: str, *words: str) -> Service:
        started.append(Service(module, *words))
        return started[-1]

    yield start
    for one in started:
        one.end()


@pytest.fixture(scope="module")
def shop() -> Iterator[Service]:
    found = Service("shop")
    yield found
    found.end()


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A directory to make projects in, of a user who has nothing else."""
    folder = tmp_path / "here"
    folder.mkdir()
    monkeypatch.chdir(folder)
    with new_home() as home:
        monkeypatch.setenv("AENV_HOME", str(home))
        yield folder


@pytest.fixture(scope="session")
def everything(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A project's directory with the MCP project's own example server in it, as npm puts it there."""
    modules = PREFIX / "node_modules"
    if not (modules / EVERYTHING).is_dir():
        pytest.skip(f"the server {EVERYTHING} is not in {PREFIX}: {INSTALL}")
    if not (shutil.which("node") or "").startswith("/usr/"):
        pytest.skip("needs a Node that sandboxes see, below /usr")
    folder = tmp_path_factory.mktemp("with") / "everything"
    _copy(EVERYTHING, modules, folder / "node_modules")
    return folder


def _copy(package: str, modules: Path, to: Path) -> None:
    """A package with all that it needs."""
    if (to / package).exists() or not (modules / package).is_dir():
        return
    shutil.copytree(modules / package, to / package)
    needs = json.loads((modules / package / "package.json").read_text()).get("dependencies", {})
    for other in needs:
        _copy(other, modules, to)
