"""Stable-Baselines3 itself, in a virtual environment of its own, on the example: it learns, and from no failure."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests.integrations.peers import Peer
from tests.support import ROOT

pytestmark = pytest.mark.peer
LIGHTS = ROOT / "examples" / "05-lights"
SCRIPT = ROOT / "tests" / "peers" / "scripts" / "sb3.py"


@pytest.fixture
def peer(tmp_path: Path) -> Peer:
    return Peer("sb3", tmp_path)


@pytest.fixture
def folder(peer: Peer, tmp_path: Path) -> Path:
    """A copy of the example, as its reader has it."""
    return Path(shutil.copytree(LIGHTS, tmp_path / "lights"))


async def test_the_example_does_what_it_says(peer: Peer, folder: Path) -> None:
    said = await peer.ran(folder, "train_sb3.py")
    assert said.startswith("mean reward of an episode: 0.")
    assert "after 8192 steps" in said


@pytest.mark.parametrize("share", [0.0, 0.1])
async def test_it_learns_whatever_is_lost(peer: Peer, folder: Path, share: float) -> None:
    found = await peer.told(folder, SCRIPT, "1", str(share))
    assert found["before"] < 0.35
    assert found["after"] >= 0.6
    assert (found["rows"], found["wrong"]) == (8192, 0)
    assert found["lost"] > 50 if share else found["lost"] == 0


async def test_what_a_trainer_gets(peer: Peer, folder: Path) -> None:
    assert await peer.told(folder, SCRIPT, "api") == {"refused": ["unsupported", "unsupported"]}


async def test_a_failure_without_a_way_back_ends_the_training(peer: Peer, folder: Path) -> None:
    assert await peer.told(folder, SCRIPT, "raises") == {"raised": "sandbox_lost"}


def test_the_check_of_its_installation(peer: Peer) -> None:
    peer.is_checked()
