"""Ray, RLlib and SkyRL's environments themselves, in a virtual environment of their own, on the examples."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

import pytest
from benchmarks import venvs

from tests.peers.support import requirements
from tests.support import ROOT, until

pytestmark = [pytest.mark.peer, pytest.mark.xdist_group("ray")]
SCRIPTS = ROOT / "tests" / "peers" / "scripts"
PATIENCE = 400
ALL = list(range(12))


@pytest.fixture
def folder(tmp_path: Path, request: pytest.FixtureRequest) -> Path:
    """A copy of the example, as its reader has it."""
    if not venvs.is_made(requirements("ray"), with_package=True):
        pytest.skip("needs the virtual environment ray: run 'make components'")
    return Path(shutil.copytree(ROOT / "examples" / request.param, tmp_path / "example"))


lights = pytest.mark.parametrize("folder", ["05-lights"], indirect=True)
keypad = pytest.mark.parametrize("folder", ["06-keypad"], indirect=True)


async def ran(folder: Path, *line: str) -> str:
    """What a program of that virtual environment prints, in the folder. Nothing of Ray's goes on after it."""
    home = folder.parent / "home"
    own = {"AENV_HOME": str(home / "aenv"), "HOME": str(home), "OMP_NUM_THREADS": "1", "RAY_USAGE_STATS_ENABLED": "0"}
    with tempfile.TemporaryDirectory(prefix="ray-") as sessions:  # a short name: sockets are in it
        process = await asyncio.create_subprocess_exec(
            *(str(venvs.python(requirements("ray"), with_package=True)), *line),
            cwd=folder,
            env={**os.environ, **own, "RAY_AUTH_MODE": "disabled", "RAY_TMPDIR": sessions},
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
        )
        try:
            printed, complained = await asyncio.wait_for(process.communicate(), PATIENCE)
        except TimeoutError:
            process.terminate()  # Ray ends what it started
            await process.wait()
            raise
        await until(lambda: not of(sessions), "everything of Ray's has ended")
    assert process.returncode == 0, complained.decode()
    return printed.decode()


def of(sessions: str) -> list[str]:
    """Processes that were told where a session of Ray's is."""
    found = []
    for line in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            if sessions.encode() in line.read_bytes():
                found.append(line.parent.name)
    return found


async def told(folder: Path, script: str, *arguments: str) -> Any:
    return json.loads((await ran(folder, str(SCRIPTS / script), *arguments)).splitlines()[-1])


@lights
@pytest.mark.parametrize("share", [0.0, 0.1])
async def test_it_learns_whatever_is_lost(folder: Path, share: float) -> None:
    found = await told(folder, "rllib.py", "1", str(share))
    assert found["before"] < 0.35
    assert found["after"] >= 0.6
    assert (found["rows"], found["wrong"]) == (4096, 0)
    assert found["lost"] > 25 if share else found["lost"] == 0


@lights
async def test_what_rllib_drops_is_not_trained_on(folder: Path) -> None:
    found = await told(folder, "rllib.py", "drops")
    assert found["lost"] > 0
    assert found["rows"] >= 1024
    assert found["wrong"] == 0


@keypad
async def test_rollouts_as_a_job_of_a_cluster(folder: Path) -> None:
    found = await told(folder, "ray_job.py")
    assert found["status"] == "SUCCEEDED", found["logs"]
    assert "20 episodes, 0 without a score, mean reward 1.00" in found["logs"]


@keypad
async def test_an_actor_and_a_node_that_are_killed_cost_no_episode(folder: Path) -> None:
    found = await told(folder, "ray_rollouts.py")
    for killed in ("actor", "node"):
        run = found[killed]
        assert run["nodes"] == 2
        assert (run["episodes"], run["wrong"]) == (ALL, [])
        assert len(run["lost"]) == 3
        assert run["retried"] == run["lost"]
        assert run["kinds"] == ["sandbox_lost"]
    assert found["refused"] == ["invalid", "invalid"]


@keypad
async def test_episodes_of_skyrl(folder: Path) -> None:
    found = await told(folder, "skyrl.py")
    assert found == {
        "scores": [1.0, 0.0] * 5,
        "cut": 1.0,
        "told": ["You pressed 2.", "ValueError: there are keys 0 to 4", "there is no tool ''; available: press"],
        "raised": "sandbox_lost",
    }


@keypad
@pytest.mark.parametrize("framework", ["ray", "rllib", "skyrl"])
async def test_the_check_of_its_installation(folder: Path, framework: str) -> None:
    found = json.loads(await ran(folder, "-m", "aenv", "train-check", framework, "-o", "json"))
    assert [(row["check"], row["status"]) for row in found["checks"]] == [
        ("package", "ok"),
        ("adapter", "ok"),
        ("episode", "ok"),
    ]
