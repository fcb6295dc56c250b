"""AReaL itself, in a virtual environment of its own: what it trains on is what its model wrote, and no failure."""

from __future__ import annotations

import asyncio
import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.envs.benchmarks import needs
from tests.integrations.peers import Peer
from tests.rl.standin import Model, calling, model, saying
from tests.support import ROOT

pytestmark = [pytest.mark.peer, pytest.mark.xdist_group("areal")]
KEYPAD, TAU2 = ROOT / "examples" / "06-keypad", ROOT / "examples" / "07-tau2-areal"
SCRIPT = ROOT / "tests" / "peers" / "scripts" / "areal_rollouts.py"
LOSSY = ROOT / "tests" / "peers" / "scripts" / "areal_tau2.py"
EXAMPLE = ("agent.py", "airline", "19")
CANCEL = calling("cancel_reservation", '{"reservation_id": "Z7GOZK"}')


@pytest.fixture(scope="module")
def peer(tmp_path_factory: pytest.TempPathFactory) -> Peer:
    return Peer("areal", tmp_path_factory.mktemp("areal"))


@pytest.fixture(scope="module")
def found(peer: Peer) -> dict[str, Any]:
    """What a trainer gets."""
    folder = Path(shutil.copytree(KEYPAD, peer.folder / "keypad"))

    async def ask() -> tuple[str, Model]:
        async with model(calling("press", '{"key": 0}'), saying("Done.")) as server:
            return await peer.ran(folder, SCRIPT, server.url), server

    printed, server = asyncio.run(ask())
    got: dict[str, Any] = json.loads(printed.splitlines()[-1])
    got["asked"] = server.asked
    return got


def test_the_rows_are_what_the_model_wrote(found: dict[str, Any]) -> None:
    assert found["whole"] == {"rows": 40, "rewards": [1.0], "wrong": 0, "lost": 0}


def test_a_lost_instance_changes_no_row(found: dict[str, Any]) -> None:
    assert found["lossy"].pop("lost") > 3
    assert found["lossy"] == {"rows": 40, "rewards": [1.0], "wrong": 0}


def test_a_failure_is_rejected(found: dict[str, Any]) -> None:
    lost = found["rejecting"].pop("lost")
    assert lost > 3
    assert found["rejecting"] == {"rows": 40 - lost, "rewards": [1.0], "wrong": 0}


def test_a_group_begins_alike_and_may_have_several_versions(found: dict[str, Any]) -> None:
    assert found["group"] == {"rewards": [1.0] * 4, "digits": 1, "mixed": True, "wrong": 0}


def test_the_agent_class_behind_the_proxy(found: dict[str, Any]) -> None:
    lost = found["agent"].pop("lost")
    assert lost >= 1
    assert found["agent"] == {"rewards": [1.0, 0.0], "wrong": 0, "rejected": True}


def test_the_agent_class_calls_tools(found: dict[str, Any]) -> None:
    assert found["calls"] == [1.0, 0.0]
    assert found["asked"][0]["temperature"] == 0.5
    assert found["asked"][0]["messages"][0]["content"] == "Be brief."
    assert len({asked["seed"] for asked in found["asked"]}) == len(found["asked"])


def test_the_check_of_its_installation(peer: Peer) -> None:
    peer.is_checked()


async def played(peer: Peer, *answers: Any, line: tuple[str | Path, ...] = EXAMPLE) -> tuple[int | None, str, Model]:
    async with model(*answers) as server:
        variables = {"OPENAI_BASE_URL": server.url, "OPENAI_API_KEY": "sk-one", "PYTHONPATH": str(TAU2)}
        code, printed, complained = await peer.run(TAU2, *line, home=None, **variables)
        return code, printed if code == 0 else complained, server


@needs("tau2")
@pytest.mark.xdist_group("tau2")
async def test_the_example_plays_tau2(peer: Peer) -> None:
    code, printed, server = await played(peer, CANCEL, saying("It is cancelled."))
    assert (code, printed.strip()) == (0, "1.0")
    assert "<policy>" in server.asked[0]["messages"][0]["content"]
    offered = {tool["function"]["name"] for tool in server.asked[0]["tools"]}
    assert "cancel_reservation" in offered
    assert not {"send_message", "get_order_details"} & offered


@needs("tau2")
@pytest.mark.xdist_group("tau2")
async def test_who_does_nothing_is_scored_and_a_model_that_fails_is_not(peer: Peer) -> None:
    code, printed, _ = await played(peer, saying("That cannot be cancelled."))
    assert (code, printed.strip()) == (0, "0.0")
    code, printed, _ = await played(peer, CANCEL, (500, {"error": "overloaded"}))
    assert code == 1
    assert "has no reward: model_failed" in printed


@needs("tau2")
@pytest.mark.xdist_group("tau2")
async def test_the_example_goes_on_when_its_instance_is_lost(peer: Peer) -> None:
    code, printed, server = await played(peer, CANCEL, saying("It is cancelled."), line=(LOSSY,))
    assert (code, printed.strip()) == (0, "1.0 1")
    assert sum(message["role"] == "tool" for message in server.asked[-1]["messages"]) == 1
