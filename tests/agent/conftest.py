"""The agent, compiled, and live."""

from __future__ import annotations

import platform
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from aenv import agent as package
from aenv.agent import recipe
from tests.agent.running import Agent, running


@pytest.fixture(scope="session")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The agent for this machine, as strictly compiled as it can be."""
    machine = platform.machine()
    if recipe.compiler(machine) is None:
        pytest.skip("no C compiler (on Debian: apt install gcc libc6-dev)")
    sources = Path(package.__file__).parent
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(recipe, "FLAGS", (*recipe.FLAGS, "-Wshadow", "-Werror"))
        return recipe.make(sources, machine, tmp_path_factory.mktemp("agent") / "aenv-agent")


@pytest.fixture
def folder() -> Iterator[Path]:
    """A directory whose name is short enough for a socket."""
    with tempfile.TemporaryDirectory(prefix="aenv-", dir="/tmp") as made:
        yield Path(made)


@pytest.fixture
def agent(program: Path, folder: Path) -> Iterator[Agent]:
    with running([program], folder / "agent.sock") as live:
        yield live
        assert live.process.poll() is None, "the agent ended by itself"
