"""PettingZoo itself, in a virtual environment of its own: its games as environments of ours, and those as its own."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.integrations.peers import Peer
from tests.runtime.wire import send
from tests.support import ROOT, Sandbox, sandbox

pytestmark = pytest.mark.peer
GAMES = ROOT / "tests" / "peers" / "projects" / "games"
SCRIPT = ROOT / "tests" / "peers" / "scripts" / "pettingzoo_games.py"


@pytest.fixture(scope="module")
def peer(tmp_path_factory: pytest.TempPathFactory) -> Peer:
    return Peer("pettingzoo", tmp_path_factory.mktemp("pettingzoo"))


async def test_its_own_tests_pass_on_instances(peer: Peer) -> None:
    """Its tests of the two faces and of seeds, then the same moves in its own games."""
    folder = Path(shutil.copytree(GAMES, peer.folder / "games"))
    printed = await peer.ran(folder, SCRIPT)
    assert "Passed API test" in printed
    assert "Passed Parallel API test" in printed
    found = json.loads(printed.splitlines()[-1])
    assert found.pop("other") == ["not_found", None]  # no game of PettingZoo's, and no instance left
    assert found == {"same": True, "moves": 9, "lost": "sandbox_lost", "together": True}


@pytest.fixture(scope="module")
def game(peer: Peer) -> Iterator[Sandbox]:
    with sandbox(GAMES, python=str(peer.scripts / "python")) as running:
        yield running


def ask(game: Sandbox, path: str, body: dict[str, Any], agent: str = "") -> Any:
    return send(game.port, "POST", path, body, {"AEnv-Agent": agent} if agent else None)


def test_each_agent_plays_with_tools_of_its_own(game: Sandbox) -> None:
    first, second = "player_1", "player_2"
    assert "no episode has begun" in ask(game, "/task/reward", {}, first).json["error"]
    assert ask(game, "/reset", {}).data == {"turn": first}
    seen = ask(game, "/tools/observe", {}, second).data
    assert (seen["turn"], seen["over"], seen["observation"]["action_mask"]) == (first, False, [0] * 9)
    assert f"it is {first}'s turn" in ask(game, "/tools/step", {"action": 0}, second).json["error"]
    assert "no member of" in ask(game, "/tools/step", {"action": 9}, first).json["error"]
    for agent, action in ((first, 0), (second, 3), (first, 1), (second, 4), (first, 2)):
        seen = ask(game, "/tools/step", {"action": action}, agent).data
    assert (seen["return"], seen["over"], seen["turn"]) == (1.0, True, None)
    assert ask(game, "/task/reward", {}, first).data == {"score": 1.0, "over": True}
    assert ask(game, "/task/reward", {}, second).data == {"score": -1.0, "over": True}
    assert "it is nobody's turn" in ask(game, "/tools/step", {"action": 5}, second).json["error"]
    assert "which agent?" in ask(game, "/task/reward", {}).json["error"]
    assert ask(game, "/reset", {"seed": 2}).data == {"turn": first}
    assert ask(game, "/task/reward", {}, first).data == {"score": 0.0, "over": False}
