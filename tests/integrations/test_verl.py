"""verl itself, in a virtual environment of its own, on the example: its settings, dataset, workers and queue, with a
model that does as it is told. The rows that its trainer takes are what that model wrote, and none is of a failure."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

import pytest
from benchmarks import venvs

from tests.peers.support import requirements
from tests.support import ROOT

pytestmark = pytest.mark.peer
KEYPAD = ROOT / "examples" / "06-keypad"
SCRIPT = ROOT / "tests" / "peers" / "scripts" / "verl_rows.py"
PATIENCE = 400
LOST = "the sandbox is gone"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the example, as its reader has it."""
    if not venvs.is_made(requirements("verl"), with_package=True):
        pytest.skip("needs the virtual environment verl: run 'make components'")
    return Path(shutil.copytree(KEYPAD, tmp_path_factory.mktemp("verl") / "keypad"))


@pytest.fixture(scope="module")
def found(folder: Path) -> dict[str, Any]:
    """What became of each prompt."""
    (folder.parent / "model").mkdir()
    # -P: the scripts' folder has modules that are called like packages
    printed = asyncio.run(ran(folder, "-P", str(SCRIPT), str(folder.parent / "model")))
    answer: dict[str, Any] = json.loads(printed.splitlines()[-1])
    return answer


async def ran(folder: Path, *line: str) -> str:
    """What a program of that virtual environment prints, in the folder."""
    home = folder.parent / "home"
    own = {"AENV_HOME": str(home / "aenv"), "HOME": str(home), "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    with tempfile.TemporaryDirectory(prefix="ray-", ignore_cleanup_errors=True) as sessions:  # sockets are in it
        rays = {"RAY_TMPDIR": sessions, "RAY_AUTH_MODE": "disabled", "RAY_USAGE_STATS_ENABLED": "0"}
        process = await asyncio.create_subprocess_exec(
            *(str(venvs.python(requirements("verl"), with_package=True)), *line),
            cwd=folder,
            env={**os.environ, **own, **rays},
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
        )
        try:
            printed, complained = await asyncio.wait_for(process.communicate(), PATIENCE)
        except TimeoutError:
            process.terminate()  # Ray ends what it started
            await process.wait()
            raise
    assert process.returncode == 0, complained.decode()
    return printed.decode()


@pytest.mark.parametrize("loop", ["keypad", "keypad_tools", "strict", "strict_tools"])
def test_rows_are_what_the_model_wrote_with_the_reward_of_that(found: dict[str, Any], loop: str) -> None:
    told = found[f"{loop} calm"]
    assert told["wrong"] == []
    assert (told["status"], told["raised"]) == ("finished", [])
    assert len(told["rewards"]) == 4
    assert set(told["rewards"]) <= {0.0, 1.0}


def test_rewards_are_not_all_the_same(found: dict[str, Any]) -> None:
    """Otherwise a reward that is made up would be right, too."""
    rewards = [reward for told in found.values() for reward in told["rewards"]]
    assert 0 < sum(rewards) < len(rewards)


@pytest.mark.parametrize("loop", ["keypad", "keypad_tools"])
def test_an_episode_goes_on_in_another_instance(found: dict[str, Any], loop: str) -> None:
    told = found[f"{loop} lossy"]
    assert (told["status"], len(told["rewards"]), told["wrong"], told["raised"]) == ("finished", 4, [], [])


@pytest.mark.parametrize("loop", ["strict", "strict_tools"])
def test_an_episode_that_is_lost_has_no_row_and_its_siblings_have(found: dict[str, Any], loop: str) -> None:
    told = found[f"{loop} lossy"]
    assert (told["status"], len(told["rewards"]), told["wrong"]) == ("failure", 2, [])
    assert told["raised"]
    assert all(LOST in raised for raised in told["raised"])


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("no episode", "tool press has no episode"),
        ("aborted", "verl broke the request off"),
        ("too long", "tokens, of at most 512"),
        ("wrong task", "offers 'none', which keypad does not have"),
    ],
)
def test_what_cannot_be_played_has_no_row(found: dict[str, Any], name: str, reason: str) -> None:
    told = found[name]
    assert (told["status"], told["rewards"]) == ("failure", [])
    assert told["raised"]
    assert all(reason in raised for raised in told["raised"])


def test_a_prompt_alone_is_a_task(found: dict[str, Any]) -> None:
    told = found["prompt alone"]
    assert (told["status"], len(told["rewards"]), told["wrong"]) == ("finished", 4, [])


async def test_the_check_of_its_installation(folder: Path) -> None:
    found = json.loads(await ran(folder, "-m", "aenv", "train-check", "verl", "-o", "json"))
    assert [(row["check"], row["status"]) for row in found["checks"]] == [
        ("package", "ok"),
        ("adapter", "ok"),
        ("episode", "ok"),
    ]
