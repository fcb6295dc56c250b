"""TRL itself, in a virtual environment of its own, on the example: it learns, and from no failure."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.integrations.peers import Peer
from tests.support import ROOT

pytestmark = pytest.mark.peer
KEYPAD = ROOT / "examples" / "06-keypad"
SCRIPT = ROOT / "tests" / "peers" / "scripts" / "trl_keypad.py"
STEPS, ROWS = 60, 60 * 32


@pytest.fixture
def peer(tmp_path: Path) -> Peer:
    return Peer("trl", tmp_path)


async def told(peer: Peer, folder: Path, *arguments: str) -> Any:
    return await peer.told(folder, SCRIPT, *arguments, PYTHONPATH=str(folder), HF_HUB_OFFLINE="1")


@pytest.fixture
def folder(peer: Peer, tmp_path: Path) -> Path:
    """A copy of the example, as its reader has it."""
    return Path(shutil.copytree(KEYPAD, tmp_path / "keypad"))


async def test_it_learns(peer: Peer, folder: Path) -> None:
    """The example, whose every row is looked at."""
    found = await told(peer, folder, "1", "0")
    assert found["before"] < 0.3
    assert found["after"] >= 0.6
    assert (found["rows"], found["scored"], found["masked"], found["wrong"]) == (ROWS, ROWS, 0, 0)
    assert found["called"] > 0.8 * ROWS, "or nothing was learned of an environment"


async def test_it_learns_from_no_failure(peer: Peer, folder: Path) -> None:
    found = await told(peer, folder, "1", "0.1")
    assert found["before"] < 0.3
    assert found["after"] >= 0.6
    assert found["lost"] > 0.05 * ROWS
    assert found["masked"] == found["lost"] == ROWS - found["scored"]
    assert (found["rows"], found["wrong"]) == (ROWS, 0)


async def test_what_a_trainer_gets(peer: Peer, folder: Path) -> None:
    found = await told(peer, folder, "api")
    press, odd = found["schemas"]
    assert press == {
        "name": "press",
        "description": "Press a key.",
        "parameters": {
            "type": "object",
            "properties": {"key": {"type": "integer", "description": "Which key."}},
            "required": ["key"],
        },
    }
    assert (odd["name"], odd["description"], odd["parameters"]["required"]) == ("fs-read", "fs-read", ["some"])
    assert odd["parameters"]["properties"] == {
        "maybe": {"type": "string", "nullable": True, "description": "maybe"},
        "some": {"type": "array", "items": {"type": "integer"}, "description": "some"},
        "one": {"type": "string", "enum": ["x", "y"], "description": "one"},
        "either": {"type": ["integer", "string"], "description": "one of two"},
        "any": {"description": "any"},
    }
    assert found["told"] == ["\n\nThe display shows 3.", "Press.\n\nThe display shows 2."]
    assert found["said"] == "You pressed 3."
    assert found["raised"] == ["tool_failed", "tool_failed", "invalid", "episode_failed"]
    assert found["rewards"] == [1.0, 1.0, None]


async def test_rollouts_to_the_token(peer: Peer, folder: Path) -> None:
    found = await told(peer, folder, "rollouts", "5")
    assert found["rows"] == 32
    assert 4 <= found["failed"] < 28
    assert found["of_failed"] == 0
    assert found["of_scored"] >= 2, "what a tool answered is between two turns, and not trained on"
    assert found["exact"]
    assert found["finite"]


async def test_a_batch_without_a_score_ends_the_training(peer: Peer, folder: Path) -> None:
    found = await told(peer, folder, "rollouts", "1")
    assert found["raised"] == "episode_failed"
    assert "no episode of 32 was scored" in found["message"]


def test_the_check_of_its_installation(peer: Peer) -> None:
    peer.is_checked()
