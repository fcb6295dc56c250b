"""The SDK in the wild, from PyPI, as it is: pointed at our platform, with the legacy data plane on.

It knows the ports 8080 and 8081 alone, so the platform has a loopback address of its own. It sends its token on the
control port only, and takes it from ``api_key``. Its command line reads a list of instances as a plain list, and its
scheduler client as an object with ``items``: ours is what the command line reads.
"""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest
from benchmarks import venvs

from tests.peers.support import HERE, requirements
from tests.platform.support import platform

pytestmark = [pytest.mark.peer, pytest.mark.xdist_group("wild")]
ADDRESS = "127.87.80.81"
SOURCE = '''
from aenv import register_function, register_reward, register_tool

guesses = []


@register_tool
def guess(word: str) -> dict:
    """Guess the hidden word."""
    if not word:
        raise ValueError("an empty word")
    guesses.append(word)
    return {"right": sum(a == b for a, b in zip(word, "lemon"))}


@register_reward
def solved() -> float:
    return float(guesses[-1:] == ["lemon"])


@register_function
def hint(letter: int) -> dict:
    return {"letter": "lemon"[letter]}
'''


@pytest.fixture(scope="module")
def report(tmp_path_factory):
    wanted = requirements("wild")
    if not venvs.is_made(wanted):
        pytest.skip("needs the virtual environment wild: run 'make components'")
    folder = tmp_path_factory.mktemp("wild")
    project = folder / "word-game"
    (project / "src").mkdir(parents=True)
    (project / "config.json").write_text(json.dumps({"name": "word-game", "version": "1.0.0"}))
    (project / "src" / "game.py").write_text(SOURCE)
    with platform("--host", ADDRESS, "--legacy-data-plane", ports=(8080, 8081)) as running:
        running.aenv("push", str(project))
        script = Path(HERE / "scripts" / "wild.py")
        command = [str(venvs.python(wanted)), str(script), f"http://{ADDRESS}", running.token, "word-game@1.0.0"]
        ended = subprocess.run(command, capture_output=True, text=True, timeout=120, cwd=folder)
        assert ended.returncode == 0, ended.stderr[-4000:]
        found = json.loads(ended.stdout.splitlines()[-1])
        found["left"] = json.loads(running.aenv("instance", "list", "-o", "json").stdout)
        yield found


def test_an_episode(report):
    found = report["episode"]
    assert found["tools"] == ["word-game@1.0.0/guess"]
    assert json.loads(found["content"][0]["text"]) == {"right": 5}
    assert found["is_error"] is False
    assert found["failed"] is True
    assert found["reward"] == 1.0
    assert found["function"] == {"letter": "e"}
    assert [function["name"] for function in found["functions"]["functions"]] == ["hint"]
    assert found["health"]["success"] is True
    assert found["status"] == "Running"
    assert found["env"] == "word-game@1.0.0"
    assert found["labels"] == {"suite": "wild"}


def test_it_is_released(report):
    alive = [row["id"] for row in report["left"]["items"] if row["status"] in ("Pending", "Creating", "Running")]
    assert report["episode"]["id"] not in alive


def test_its_hub_client(report):
    found = report["hub"]
    assert found["made"] == "from-the-wild"
    assert (found["exists"], found["missing"], found["listed"]) == (True, False, True)
    assert found["got"]["description"] == "changed"
    assert found["got"]["deploy_config"]["memory"] == "2Gi"
    assert isinstance(found["got"]["status"], int)
