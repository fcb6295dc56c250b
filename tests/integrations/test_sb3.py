"""Stable-Baselines3 itself, in a virtual environment of its own, on the example: it learns, and from no failure."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
from benchmarks import venvs

from tests.peers.support import requirements
from tests.support import ROOT

pytestmark = pytest.mark.peer
LIGHTS = ROOT / "examples" / "05-lights"
SCRIPT = ROOT / "tests" / "peers" / "scripts" / "sb3.py"
PATIENCE = 300


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A copy of the example, as its reader has it."""
    if not venvs.is_made(requirements("sb3"), with_package=True):
        pytest.skip("needs the virtual environment sb3: run 'make components'")
    return Path(shutil.copytree(LIGHTS, tmp_path / "lights"))


async def ran(folder: Path, *line: str) -> str:
    """What a program of that virtual environment prints, in the folder."""
    process = await asyncio.create_subprocess_exec(
        *(str(venvs.python(requirements("sb3"), with_package=True)), *line),
        cwd=folder,
        env={**os.environ, "AENV_HOME": str(folder.parent / "home")},
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    printed, complained = await asyncio.wait_for(process.communicate(), PATIENCE)
    assert process.returncode == 0, complained.decode()
    return printed.decode()


async def told(folder: Path, *arguments: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(await ran(folder, str(SCRIPT), *arguments))
    return found


async def test_the_example_does_what_it_says(folder: Path) -> None:
    said = await ran(folder, "train_sb3.py")
    assert said.startswith("mean reward of an episode: 0.")
    assert "after 8192 steps" in said


@pytest.mark.parametrize("share", [0.0, 0.1])
async def test_it_learns_whatever_is_lost(folder: Path, share: float) -> None:
    found = await told(folder, "1", str(share))
    assert found["before"] < 0.35
    assert found["after"] >= 0.6
    assert (found["rows"], found["wrong"]) == (8192, 0)
    assert found["lost"] > 50 if share else found["lost"] == 0


async def test_what_a_trainer_gets(folder: Path) -> None:
    assert await told(folder, "api") == {"refused": ["unsupported", "unsupported"]}


async def test_a_failure_without_a_way_back_ends_the_training(folder: Path) -> None:
    assert await told(folder, "raises") == {"raised": "sandbox_lost"}


async def test_the_check_of_its_installation(folder: Path) -> None:
    found = json.loads(await ran(folder, "-m", "aenv", "train-check", "sb3", "-o", "json"))
    assert [(row["check"], row["status"]) for row in found["checks"]] == [
        ("package", "ok"),
        ("adapter", "ok"),
        ("episode", "ok"),
    ]
