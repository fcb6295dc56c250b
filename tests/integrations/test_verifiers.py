"""verifiers itself, in a virtual environment of its own: its taskset for OpenEnv plays in an instance of ours."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.peers.support import interpreter
from tests.support import ROOT, sandbox

pytestmark = pytest.mark.peer
KEYPAD = ROOT / "examples" / "06-keypad"
SCRIPT = ROOT / "tests" / "peers" / "scripts" / "verifiers_script.py"
PATIENCE = 240


@pytest.fixture(scope="module")
def python() -> Path:
    return Path(interpreter("verifiers"))


def played(python: Path, *arguments: str) -> dict[str, Any]:
    """What verifiers tells of an episode. Its harness runs in an environment that uv makes."""
    variables = {**os.environ, "PATH": f"{python.parent}{os.pathsep}{os.environ['PATH']}"}
    line = [str(python), str(SCRIPT), *arguments]
    done = subprocess.run(line, capture_output=True, text=True, timeout=PATIENCE, env=variables, check=False)
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def test_its_taskset_plays_an_episode(python: Path) -> None:
    with sandbox(KEYPAD) as running:
        found = played(python, f"{running.url}/openenv")
    assert (found["ok"], found["errors"]) == (True, [])
    (trace,) = found["traces"]
    assert (trace["ok"], trace["rewards"]) == (True, {"openenv_reward": 1.0})


def test_a_lost_instance_is_its_error_and_no_reward(python: Path) -> None:
    with sandbox(KEYPAD) as running:
        found = played(python, f"{running.url}/openenv", str(running.process.pid))
    assert (found["ok"], found["errors"]) == (False, ["EnvError"])
    assert not any(trace["rewards"] for trace in found["traces"])
