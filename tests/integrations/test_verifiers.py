"""verifiers itself, in a virtual environment of its own: our tasks are a taskset of its, its taskset for OpenEnv plays
in an instance of ours, and environments of its are published as ours."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.integrations.peers import Peer
from tests.rl.standin import calling, model, saying
from tests.runtime.wire import send
from tests.support import ROOT, Sandbox, sandbox

pytestmark = [pytest.mark.peer, pytest.mark.xdist_group("verifiers")]
KEYPAD = ROOT / "examples" / "06-keypad"
SCRIPTS = ROOT / "tests" / "peers" / "scripts"
SUMS = ROOT / "tests" / "peers" / "projects" / "sums"
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


@pytest.fixture(scope="module")
def played(peer: Peer) -> dict[str, Any]:
    """A taskset of its as an environment of ours, beside what verifiers itself makes of the same."""
    folder = Path(shutil.copytree(SUMS, peer.folder / "sums"))

    async def ask() -> Any:
        async with model(calling("calculator_add", '{"left": 2, "right": 3}'), saying("It is 5.")) as server:
            return await peer.told(folder, SCRIPTS / "verifiers_published.py", server.url)

    got: dict[str, Any] = asyncio.run(ask())
    return got


def test_a_taskset_of_its_is_an_environment(played: dict[str, Any]) -> None:
    assert [(task["id"], task["instruction"]) for task in played["tasks"]] == [
        ("2+3", "What is 2 + 3?"),
        ("40+2", "What is 40 + 2?"),
    ]
    assert played["tasks"][0]["system"].startswith("Use the calculator.")
    assert played["tools"] == ["sums/send_message", "sums/calculator_add", "sums/bash"]
    assert (played["added"], played["wrong"]) == (["5", False], True)
    assert played["written"] == "42\n\nexit code 3"
    assert played["said"] == {"done": True}
    assert played["late"] == ["the episode is over: agent_completed", True]


def test_it_is_scored_as_verifiers_scores_it(played: dict[str, Any]) -> None:
    """The same moves, and two more in which nothing was done: the third turn is the call that failed."""
    assert played["done"]["score"] == 1.0
    assert played["done"] == played["theirs"] | {"metrics": {"turns": 3.0}}
    assert played["theirs"]["metrics"] == {"turns": 2.0}


def test_who_does_nothing_there_has_nothing(played: dict[str, Any]) -> None:
    assert played["nothing"]["score"] == 0.0
    assert [reward["score"] for reward in played["nothing"]["rewards"].values()] == [0.0, 0.0]


def test_what_cannot_be_an_environment_is_refused(played: dict[str, Any]) -> None:
    wanted = [
        "need a container each",
        "the agent user has no model of its own",
        "rewrites what its agent is told",
        "wants the image drawn:1",
        "plays the agent more than once in an episode",
    ]
    assert len(played["refused"]) == len(wanted)
    for reason, part in zip(played["refused"], wanted, strict=True):
        assert part in reason


@pytest.fixture(scope="module")
def sums(peer: Peer) -> Iterator[Sandbox]:
    with sandbox(SUMS, python=str(peer.scripts / "python")) as running:
        yield running


def begin(running: Sandbox, task: str) -> Any:
    return send(running.port, "POST", "/reset", {"arguments": {"task": task}}, timeout=120)


def test_verifiers_own_stop_ends_an_episode(sums: Sandbox) -> None:
    begin(sums, "2+3")
    add = {"left": 1, "right": 1}
    answers = [send(sums.port, "POST", "/tools/calculator_add", add) for _ in range(4)]
    assert [answer.status for answer in answers] == [200, 200, 200, 500]
    assert "the episode is over: is_enough" in answers[3].json["error"]
    assert send(sums.port, "POST", "/task/reward", {"answer": "5"}).data["score"] == 0.25


def test_a_rubric_that_fails_is_no_reward(sums: Sandbox) -> None:
    begin(sums, "2+3")
    failed = send(sums.port, "POST", "/task/reward", {"answer": "divide by zero"})
    assert (failed.status, failed.json["code"]) == (500, "author_failed")
    assert "ZeroDivisionError: as was said" in failed.json["error"]


def test_there_is_no_task_of_another_name(sums: Sandbox) -> None:
    assert "there is no task '1+1'" in begin(sums, "1+1").json["error"]
    assert send(sums.port, "POST", "/task/reward", {}).json["code"] == "invalid"


def test_a_tool_server_that_died_loses_the_episode(sums: Sandbox) -> None:
    begin(sums, "2+3")
    (server,) = [one for one in psutil.Process(sums.process.pid).children() if "sums" in one.cmdline()]
    server.kill()
    server.wait(10)
    for path, body in (("/tools/calculator_add", {"left": 2, "right": 3}), ("/task/reward", {"answer": "5"})):
        assert send(sums.port, "POST", path, body, timeout=120).json["code"] == "sandbox_lost"


async def test_a_simulated_user_is_talked_to(peer: Peer) -> None:
    """Of two agents, one is played here; its tool server is started for each episode, and nothing of it is left."""
    path = f"{peer.scripts}{os.pathsep}{os.environ['PATH']}"
    async with model(saying("Which colour has the sky?"), saying("Sure?"), saying("###DONE###")) as user:
        variables = {"PATH": path, "USER_URL": user.url}

        def play() -> list[Any]:
            with sandbox(SUMS, python=str(peer.scripts / "python"), variables=variables) as running:
                told = [
                    begin(running, "blue").data,
                    send(running.port, "POST", "/tools/dictionary_look_up", {}).data,
                    send(running.port, "POST", "/tools/send_message", {"message": "Red."}, timeout=60).data,
                    send(running.port, "POST", "/tools/send_message", {"message": "blue."}, timeout=60).data,
                    send(running.port, "POST", "/task/reward", {}).data,
                ]
                left = psutil.Process(running.process.pid).children(recursive=True)
                return [*told, left]

        opened, looked, asked, ended, reward, left = await asyncio.to_thread(play)
    assert opened["messages"] == [{"role": "user", "content": "Which colour has the sky?"}]
    assert looked["content"] == [{"type": "text", "text": "blue"}]
    assert (asked, ended) == ({"done": False, "message": "Sure?"}, {"done": True})
    assert (reward["score"], reward["metrics"]) == (1.0, {"user_turns": 3.0})
    assert left == []
