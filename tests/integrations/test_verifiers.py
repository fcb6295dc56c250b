"""verifiers itself, in a virtual environment of its own: our tasks are a taskset of its, and its taskset for OpenEnv
plays in an instance of ours."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.integrations.peers import Peer
from tests.rl.standin import calling, model, saying
from tests.support import ROOT, sandbox

pytestmark = [pytest.mark.peer, pytest.mark.xdist_group("verifiers")]
KEYPAD = ROOT / "examples" / "06-keypad"
SCRIPTS = ROOT / "tests" / "peers" / "scripts"
SCORED = [True, {"reward": 1.0}]
FAILED = [False, {}]


@pytest.fixture(scope="module")
def peer(tmp_path_factory: pytest.TempPathFactory) -> Peer:
    return Peer("verifiers", tmp_path_factory.mktemp("verifiers"))


@pytest.fixture(scope="module")
def folder(peer: Peer) -> Path:
    return Path(shutil.copytree(KEYPAD, peer.folder / "keypad"))


@pytest.fixture(scope="module")
def found(peer: Peer, folder: Path) -> dict[str, Any]:
    """What a trainer gets."""

    async def ask() -> Any:
        async with model(calling("press", '{"key": 3}'), saying("Done.")) as server:
            return await peer.told(folder, SCRIPTS / "verifiers_rollouts.py", server.url, PYTHONPATH=str(folder))

    got: dict[str, Any] = asyncio.run(ask())
    return got


async def test_the_example_in_its_evaluation(peer: Peer, folder: Path) -> None:
    """Two rollouts of each of two tasks, side by side, of a model that presses 3 whatever is shown."""
    path = f"{peer.scripts}{os.pathsep}{os.environ['PATH']}"  # verifiers needs uv
    line = ["keypad_verifiers", "--model", "reader", "--num-rollouts", "2", "--max-concurrent", "4", "--no-push"]
    line += ["--select.skip", "2", "--select.limit", "2"]
    async with model(calling("press", '{"key": 3}'), saying("Done.")) as server:
        line += ["--client.base-url", server.url, "--client.api-key-var", "NO_KEY", "--output-dir", "out"]
        await peer.ran(folder, peer.scripts / "vf-eval", *line, PATH=path, PYTHONPATH=str(folder))
    (file,) = folder.glob("out/*/traces.jsonl")
    episodes = [json.loads(one) for one in file.read_text().splitlines()]
    assert all(episode["ok"] for episode in episodes)
    rewards = [
        (episode["task"]["data"]["task"]["reset"]["digit"], trace["rewards"]["reward"]["score"])
        for episode in episodes
        for trace in episode["traces"]
    ]
    assert sorted(rewards) == sorted((digit, float(digit == 3)) for digit in (2, 3) for _ in range(2))


def test_an_episode_goes_on_in_another_instance(found: dict[str, Any]) -> None:
    assert found["going on"] == {"ok": True, "errors": [], "traces": [SCORED]}


@pytest.mark.parametrize("when", ["lost at a call", "lost at the end"])
def test_an_instance_that_is_lost_for_good_is_an_error_and_no_reward(found: dict[str, Any], when: str) -> None:
    assert found[when] == {"ok": False, "errors": ["EnvError"], "traces": [FAILED]}


def test_verifiers_retries_an_episode_in_an_instance_of_its_own(found: dict[str, Any]) -> None:
    assert found["again"]["ok"]
    assert found["again"]["traces"] == [SCORED]
    assert set(found["again"]["errors"]) == {"EnvError"}


def test_an_agent_out_of_time_has_what_it_has_earned(found: dict[str, Any]) -> None:
    assert found["out of time"] == {"ok": True, "errors": [], "traces": [[True, {"reward": 0.0}]]}


def test_no_instance_is_an_error_and_no_trace(found: dict[str, Any]) -> None:
    assert found["nowhere"] == {"ok": False, "errors": ["EnvError"], "traces": []}


def test_the_check_of_its_installation(peer: Peer) -> None:
    peer.is_checked()


def through_openenv(peer: Peer, *arguments: str) -> dict[str, Any]:
    """What its own taskset tells of an episode."""
    told: dict[str, Any] = asyncio.run(peer.told(peer.folder, SCRIPTS / "verifiers_script.py", *arguments))
    return told


def test_its_taskset_for_openenv_plays_an_episode(peer: Peer) -> None:
    with sandbox(KEYPAD) as running:
        got = through_openenv(peer, f"{running.url}/openenv")
    assert (got["ok"], got["errors"]) == (True, [])
    (trace,) = got["traces"]
    assert (trace["ok"], trace["rewards"]) == (True, {"openenv_reward": 1.0})


def test_there_a_lost_instance_is_its_error_and_no_reward(peer: Peer) -> None:
    with sandbox(KEYPAD) as running:
        got = through_openenv(peer, f"{running.url}/openenv", str(running.process.pid))
    assert (got["ok"], got["errors"]) == (False, ["EnvError"])
    assert not any(trace["rewards"] for trace in got["traces"])
