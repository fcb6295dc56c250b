"""agent-lightning itself, in a virtual environment of its own: its rollouts have our rewards, and failures no rows."""

from __future__ import annotations

import asyncio
import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.integrations.peers import Peer
from tests.rl.standin import Model, calling, model, saying
from tests.support import ROOT

pytestmark = [pytest.mark.peer, pytest.mark.xdist_group("agentlightning")]
KEYPAD = ROOT / "examples" / "06-keypad"
SCRIPT = ROOT / "tests" / "peers" / "scripts" / "agentlightning_rollouts.py"
ROWS = [[[1, 2], [3, 4], [-0.5, -1.0]], [[1, 2, 3, 4, 5], [6], [-0.5]]]
"""What was read and written, and how likely it was."""


def with_tokens(answer: dict[str, Any], row: list[list[Any]]) -> dict[str, Any]:
    """As vLLM answers."""
    read, written, logprobs = row
    answer["prompt_token_ids"] = read
    answer["choices"][0] |= {"token_ids": written, "logprobs": {"content": [{"logprob": one} for one in logprobs]}}
    answer["usage"] = {"prompt_tokens": len(read), "completion_tokens": len(written)}
    return answer


@pytest.fixture(scope="module")
def peer(tmp_path_factory: pytest.TempPathFactory) -> Peer:
    return Peer("agentlightning", tmp_path_factory.mktemp("agentlightning"), "3.12")


@pytest.fixture(scope="module")
def found(peer: Peer) -> dict[str, Any]:
    """What a trainer gets."""
    folder = Path(shutil.copytree(KEYPAD, peer.folder / "keypad"))
    press, done = with_tokens(calling("press", '{"key": 3}'), ROWS[0]), with_tokens(saying("Done."), ROWS[1])

    async def ask() -> tuple[str, Model]:
        async with model(press, done) as server:
            return await peer.ran(folder, SCRIPT, server.url, PYTHONPATH=str(folder)), server

    printed, server = asyncio.run(ask())
    got: dict[str, Any] = json.loads(printed.splitlines()[-1])
    got["seeds"] = [asked["seed"] for asked in server.asked]
    return got


SCORED = {"state": "succeeded", "reward": 1.0, "rows": ROWS}
FAILED = {"state": "failed", "reward": None, "rows": []}


def test_a_rollout_has_its_reward_and_its_tokens(found: dict[str, Any]) -> None:
    assert found["whole"] == [SCORED, SCORED]


def test_what_was_lost_and_begun_again_has_nothing_of_the_first_attempt(found: dict[str, Any]) -> None:
    assert found["anew"] == [SCORED, SCORED]


def test_what_failed_has_no_rows_though_its_model_had_spoken(found: dict[str, Any]) -> None:
    assert found["failing"] == [FAILED, SCORED, FAILED]


def test_no_sample_is_like_another(found: dict[str, Any]) -> None:
    again = 1  # an episode that is begun again asks its first question once more
    assert len(set(found["seeds"])) == len(found["seeds"]) - again


def test_the_check_of_its_installation(peer: Peer) -> None:
    peer.is_checked()
