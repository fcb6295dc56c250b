"""The command as a user meets it: arguments in, exit code, stdout and stderr out."""

import json
from typing import Any, NamedTuple

import pytest

from aenv.cli import main


class Outcome(NamedTuple):
    code: int
    out: str
    err: str

    @property
    def data(self) -> Any:
        """What ``-o json`` printed; stdout must be that and nothing else."""
        return json.loads(self.out)


@pytest.fixture
def home(tmp_path, monkeypatch):
    """A user without settings."""
    folder = tmp_path / "home"
    monkeypatch.setenv("AENV_HOME", str(folder))
    for name in ("AENV_SYSTEM_URL", "AENV_HUB_URL", "AENV_API_KEY", "DUMMY_INSTANCE_IP", "AENV_DEBUG"):
        monkeypatch.delenv(name, raising=False)
    return folder


@pytest.fixture
def here(tmp_path, monkeypatch):
    """An empty directory, and the user is in it."""
    folder = tmp_path / "here"
    folder.mkdir()
    monkeypatch.chdir(folder)
    return folder


@pytest.fixture
def aenv(home, here, capfd):
    def run(*arguments):
        capfd.readouterr()
        code = main([str(argument) for argument in arguments])
        return Outcome(code, *capfd.readouterr())

    return run
