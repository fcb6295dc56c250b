"""slime's functions, on its samples' fields and a server of SGLang's kind on a real socket; slime itself is on no
package index. What is trained on is what the model wrote, and nothing of an episode that failed."""

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
KEYPAD = ROOT / "examples" / "06-keypad"
SCRIPT = ROOT / "tests" / "peers" / "scripts" / "slime_samples.py"
PATIENCE = 300
FINE = ("calm", "lossy 2", "messages alone", "again", "retried")


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What the script tells, in a copy of the example."""
    if not venvs.is_made(requirements("verl"), with_package=True):
        pytest.skip("needs the virtual environment verl: run 'make components'")
    folder = tmp_path_factory.mktemp("slime")
    (folder / "model").mkdir()
    return asyncio.run(told(Path(shutil.copytree(KEYPAD, folder / "keypad")), folder))


async def told(keypad: Path, folder: Path) -> dict[str, Any]:
    process = await asyncio.create_subprocess_exec(
        # -P: the scripts' folder has modules that are called like packages
        *(str(venvs.python(requirements("verl"), with_package=True)), "-P", str(SCRIPT), str(folder / "model")),
        cwd=keypad,
        env={**os.environ, "AENV_HOME": str(folder / "home"), "PYTHONPATH": str(ROOT)},
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    printed, complained = await asyncio.wait_for(process.communicate(), PATIENCE)
    assert process.returncode == 0, complained.decode()
    answer: dict[str, Any] = json.loads(printed.splitlines()[-1])
    return answer


@pytest.mark.parametrize("name", FINE)
def test_what_is_trained_on_is_what_the_model_wrote(found: dict[str, Any], name: str) -> None:
    sample = found["samples"][name]
    assert (sample["status"], sample["reward"], sample["removed"]) == ("completed", 1.0, False)
    assert sample["is_whole"]
    assert sample["is_exact"]
    assert sample["weights"] == ["7", "7"]
    assert sample["failure"] == ""


def test_the_whole_conversation_is_in_the_response(found: dict[str, Any]) -> None:
    response = found["samples"]["calm"]["response"]
    assert response.startswith('<tool_call>\n{"name": "press"')
    assert "You pressed 3." in response
    assert response.endswith("Done.<|im_end|>")
    assert found["samples"]["calm"]["origin"] == "kept"


@pytest.mark.parametrize(
    ("name", "status", "failure"),
    [
        ("lossy 1", "failed", "sandbox_lost"),
        ("refused", "failed", "model_failed during model: the model's server answered with status 400"),
        ("aborted", "aborted", "model_failed during model: slime broke the request off"),
    ],
)
def test_nothing_of_a_failed_episode_is_trained_on(found: dict[str, Any], name: str, status: str, failure: str) -> None:
    sample = found["samples"][name]
    assert (sample["status"], sample["reward"], sample["removed"], sample["length"]) == (status, None, True, 0)
    assert sample["failure"].startswith(failure)


@pytest.mark.parametrize(("name", "reward"), [("cut", 0.0), ("no room", 1.0)])
def test_a_response_is_no_longer_than_it_may_be(found: dict[str, Any], name: str, reward: float) -> None:
    sample = found["samples"][name]
    assert (sample["status"], sample["reward"]) == ("truncated", reward)
    assert sample["is_exact"]
    assert not sample["is_whole"]


def test_a_prompt_alone_is_a_task(found: dict[str, Any]) -> None:
    assert found["samples"]["prompt alone"]["reward"] == 1.0


def test_rewards_of_one_and_of_many(found: dict[str, Any]) -> None:
    assert found["rewards"] == [1.0, [1.0, None]]
    assert found["kept"] == [True, False, False]
    assert found["evaluated"] == "nan"


def test_what_the_server_is_asked(found: dict[str, Any]) -> None:
    assert found["asked"] == [{"temperature": 1.0, "max_new_tokens": 256, "no_stop_trim": True}, True]
    assert found["keys"] == ["session-1"]


def test_what_is_wrong_with_every_episode_is_raised(found: dict[str, Any]) -> None:
    assert found["raised"] == "episode_failed"
