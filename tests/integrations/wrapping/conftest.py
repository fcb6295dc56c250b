"""Services of others that the tests of this folder wrap, each a process of its own."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from aenv.cli import main
from aenv.rl import Trajectory, files
from tests.cli.conftest import Outcome
from tests.conformance.test_conformance import INSTALL, PREFIX
from tests.platform.support import new_home
from tests.support import ROOT

EVERYTHING = "@modelcontextprotocol/server-everything"
COMMAND = ["node", f"node_modules/{EVERYTHING}/dist/index.js"]
"""As it is called in a project that has it."""


class Service:
    """A program of this folder, and where it listens."""

    def __init__(self, module: str, *words: str) -> None:
        line = [sys.executable, "-m", f"tests.integrations.wrapping.{module}", *words]
        self.process = subprocess.Popen(line, stdout=subprocess.PIPE, text=True, cwd=ROOT)
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


@pytest.fixture
def everything(here: Path) -> Path:
    """A project's directory in ``here`` with the MCP project's own example server in it, as npm puts it there."""
    modules = PREFIX / "node_modules"
    if not (modules / EVERYTHING).is_dir():
        pytest.skip(f"the server {EVERYTHING} is not in {PREFIX}: {INSTALL}")
    if not (shutil.which("node") or "").startswith("/usr/"):
        pytest.skip("needs a Node that sandboxes see, below /usr")
    folder = here / "everything"
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


@pytest.fixture
def aenv(here: Path, capfd: pytest.CaptureFixture[str]) -> Callable[..., Outcome]:
    def run(*arguments: str) -> Outcome:
        capfd.readouterr()
        code = main(list(arguments))
        return Outcome(code, *capfd.readouterr())

    return run


@pytest.fixture
def played(aenv: Callable[..., Outcome], here: Path) -> Callable[..., list[Trajectory]]:
    """Plays an agent's code on a project of ``here``, a task for each reward, and reads what was recorded."""

    def play(project: str, agent: str, *tasks: dict[str, Any], options: Sequence[str] = ()) -> list[Trajectory]:
        folder = here / project
        (folder / "agent.py").write_text(agent)
        (folder / "tasks.jsonl").write_text("".join(json.dumps(task) + "\n" for task in tasks))
        with pytest.MonkeyPatch.context() as patch:
            patch.chdir(folder)
            line = ["rollout", project, "--agent", "agent.py:play", "--tasks", "tasks.jsonl", "--out", "run"]
            aenv(*line, "--retries", "0", *options)
            sys.modules.pop("agent", None)
        return sorted(files.read(folder / "run" / "trajectories.jsonl"), key=lambda one: one.task.id)

    return play
