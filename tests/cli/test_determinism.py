"""``aenv validate --determinism``: two episodes of one seed, in instances as users have them."""

import asyncio
import json

import msgspec
import pytest

from aenv.rl import Task, Writer, read, rollout
from aenv.rl.files import line_of

HEAD = """
import os, random, time
from typing import Literal
from aenv import register_reset, register_reward, register_tool
"""
TOOL = '''
@register_tool
def roll(sides: int, times: list[int], kind: Literal["fair", "loaded"] = "fair") -> dict:
    """Roll a die."""
    return {{"sum": {drawn}, "kind": kind, "size": len(times) + sides}}
'''
REWARD = "\n@register_reward\ndef score() -> float:\n    return {value}\n"
SEEDED = HEAD + TOOL.format(drawn="random.randint(1, 10**9)") + REWARD.format(value="random.random()")


@pytest.fixture
def check(aenv, here):
    """Write a project and return the exit code and its row of ``validate --determinism``."""

    def check(code, *options, row="determinism"):
        root = here / "demo"
        (root / "src").mkdir(parents=True, exist_ok=True)
        (root / "config.json").write_text(json.dumps({"name": "demo", "version": "1.0.0"}))
        (root / "src" / "custom_env.py").write_text(code)
        answer = aenv("validate", "-w", "demo", "--determinism", "-o", "json", *options)
        (found,) = [each for each in answer.data["checks"] if each["check"] == row]
        return answer.code, found["status"], found["detail"], found["fix"]

    return check


def test_what_the_seed_reaches_is_the_same(check):
    found = check(SEEDED)
    assert found == (0, "ok", "the same twice, 3 calls: tool roll, reward score", "")


@pytest.mark.parametrize(
    ("drawn", "path"),
    [
        ("time.time_ns()", "structured.sum"),
        ("random.SystemRandom().random()", "structured.sum"),
        ("list({'a', 'b', 'c', 'd', 'e', 'f', 'g', 'h', 'i', 'j'})", "structured.sum["),
        ("os.urandom(8).hex() if sides > 5 else 0", "structured.sum"),
    ],
    ids=["time", "entropy", "order of a set", "only for some arguments"],
)
def test_what_it_does_not_reach_is_found(check, drawn, path):
    code, status, detail, fix = check(HEAD + TOOL.format(drawn=drawn) + REWARD.format(value="1.0"))
    assert (code, status) == (1, "fail")
    assert "two episodes of one seed differ:\nstep " in detail
    assert f"observation roll at {path}" in detail
    assert "which the seed reaches" in fix


def test_a_reset_and_a_reward_are_compared_too(check):
    reset = "\n@register_reset\ndef begin() -> float:\n    return {value}\n"
    code, status, detail, _ = check(SEEDED + reset.format(value="time.time()"))
    assert (code, status, "observation reset" in detail) == (1, "fail", True)
    assert check(SEEDED + reset.format(value="random.random()"))[:2] == (0, "ok")
    code, status, detail, _ = check(HEAD + TOOL.format(drawn="1") + REWARD.format(value="time.time()"))
    assert (code, status, "reward score" in detail) == (1, "fail", True)


RESET = """
count = 0

@register_reset
def begin() -> None:
    global count
    count = {start}

@register_tool
def step() -> int:
    global count
    count += 1
    return count
"""


def test_a_reset_that_leaves_something_is_told(check):
    """Two instances of their own play the same, so only a second episode in one of them shows it."""
    assert check(HEAD + RESET.format(start=0), row="reuse")[:2] == (0, "ok")
    code, status, detail, fix = check(HEAD + RESET.format(start="count"), row="reuse")
    assert (code, status) == (0, "warn")
    assert "observation step" in detail
    assert "reuse=1" in fix


@pytest.mark.parametrize(
    "reward",
    ["", "\n@register_reward\ndef score(answer: str) -> float:\n    return 1.0\n", REWARD.format(value="1 / 0")],
    ids=["none", "with arguments", "that raises"],
)
def test_a_reward_that_cannot_be_taken_is_no_difference(check, reward):
    assert check(HEAD + TOOL.format(drawn="1") + reward)[:2] == (0, "ok")


def test_a_sandbox_that_does_not_last_is_told_and_is_no_success(check):
    code, status, detail, _ = check(HEAD + TOOL.format(drawn="os._exit(1)"))
    assert (code, status) == (1, "fail")
    assert detail.startswith("nothing could be compared: sandbox_lost")


def test_recorded_episodes_are_replayed_instead(check, here, aenv, monkeypatch):
    async def agent(env, task):
        for sides in (6, 20):
            await env.call_tool("roll", {"sides": sides, "times": []})

    check(SEEDED)
    monkeypatch.chdir(here / "demo")
    trajectory = asyncio.run(rollout("demo", agent, Task(id="dice"), 3))
    monkeypatch.chdir(here)
    with Writer(here / "out" / "trajectories.jsonl") as writer:
        writer.write(trajectory)
    assert check(SEEDED, "--episode", "out")[:3] == (0, "ok", "the same twice: 1 episodes, 2 calls")
    (trajectory,) = read(here / "out" / "trajectories.jsonl")
    (here / "wrong.jsonl").write_bytes(line_of(msgspec.structs.replace(trajectory, seed=4)))
    code, status, detail, _ = check(SEEDED, "--episode", "wrong.jsonl")
    assert (code, status) == (1, "fail")
    assert f"episode {trajectory.id} differs:\nstep 0, turn 0, observation roll at structured.sum" in detail
    answer = aenv("validate", "-w", "demo", "--episode", "out")
    assert (answer.code, "--determinism" in answer.err) == (2, True)
    answer = aenv("validate", "-w", "demo", "--determinism", "--episode", "nowhere.jsonl")
    assert (answer.code, "there is no file" in answer.err) == (1, True)
