"""Recorded episodes, run again: the same, different at exactly one place, or without a verdict."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import msgspec
import pytest

from aenv import Environment
from aenv.comparing import ABSENT, shown, unlike, unlike_results
from aenv.errors import EpisodeError, Invalid, NotFound
from aenv.models import ToolResult
from aenv.rl import Episode, Reward, Rules, Task, Trajectory, Turn, rollout
from aenv.rl.files import line_of, parse
from aenv.rl.replaying import Replayed, replay
from aenv.rl.trajectory import Call, Component, Failed, Scored

PROJECT = '''
import asyncio
import os
import random
import signal

from aenv import Context, register_reset, register_reward, register_tool

state = {"total": 0, "taken": 0}


@register_reset
def begin(seed: int | None = None) -> dict[str, object]:
    state.update(total=0, taken=0)
    return {"first": random.random(), "mode": os.environ.get("MODE", "")}


@register_tool
def add(number: int) -> dict[str, object]:
    """Add to the total."""
    if os.environ.get("DIES") == str(number):
        os.kill(os.getpid(), signal.SIGKILL)
    state["total"] += number
    return {"total": state["total"], "drawn": random.random()}


@register_tool
def clock(ctx: Context) -> str:
    """Who it is, which is never the same."""
    return ctx.instance_id


@register_tool
def read(path: str) -> str:
    """A file of the task."""
    return open(path).read()


@register_tool
async def wait() -> str:
    """Nobody has this much time."""
    state["total"] += 100
    await asyncio.sleep(600)
    return "done"


@register_reward
def total(bonus: int = 0) -> dict[str, object]:
    state["taken"] += 1
    return {"score": state["total"] + bonus, "drawn": random.random()}


@register_reward
def taken(bonus: int = 0) -> float:
    return float(state["taken"])


@register_reward
def plain(bonus: int = 0) -> int:
    return state["total"] + bonus
'''


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A project, and the user is in it."""
    (tmp_path / "src").mkdir()
    (tmp_path / "src" / "custom_env.py").write_text(PROJECT)
    (tmp_path / "config.json").write_text(json.dumps({"name": "sums", "version": "1.0.0"}))
    tmp_path.chmod(0o755)
    monkeypatch.chdir(tmp_path)
    for name in ("AENV_SYSTEM_URL", "DUMMY_INSTANCE_IP"):
        monkeypatch.delenv(name, raising=False)
    return tmp_path


async def sums(env: Episode, task: Task) -> str:
    for number in (1, 2, 3):
        await env.call_tool("sums/add", {"number": number})
    await env.call_tool("add", {"number": "many"})  # refused, which is a result, too
    return "six"


async def recorded(agent: Any = sums, task: Any = None, **rules: Any) -> Trajectory:
    rules.setdefault("rewards", "total")
    found = await rollout("sums", agent, task, 7, rules=Rules(**rules))
    assert found.ok, found.outcome
    return parse(line_of(found))  # as a file has it


def changed(trajectory: Trajectory, step: int, **fields: Any) -> Trajectory:
    """With another result of that call."""
    turns = msgspec.convert(msgspec.to_builtins(trajectory.turns), list[Turn])
    place = [(turn, at) for turn in turns for at in range(len(turn.calls))][step]
    call = place[0].calls[place[1]]
    assert call.result is not None
    place[0].calls[place[1]] = msgspec.structs.replace(call, result=msgspec.structs.replace(call.result, **fields))
    return msgspec.structs.replace(trajectory, turns=turns)


# The same


async def test_an_episode_is_reproduced() -> None:
    trajectory = await recorded(task=Task(reward={"bonus": 2}))
    assert trajectory.reward == 8
    found = await replay(trajectory)
    assert (found.verdict, found.same, found.steps, found.difference) == ("same", True, 4, None)
    assert found.notes == []
    assert found.id == trajectory.id


async def test_the_task_reaches_the_replay() -> None:
    async def reads(env: Episode, task: Task) -> None:
        await env.call_tool("read", {"path": "given.txt"})

    trajectory = await recorded(reads, Task(files={"given.txt": "for you"}))
    assert trajectory.calls[0].result is not None
    assert trajectory.calls[0].result.text == "for you"
    assert (await replay(trajectory)).same


async def test_rewards_of_every_turn_are_taken_where_they_were() -> None:
    """Each draws, so that one more or less would be seen in what comes after it."""
    trajectory = await recorded(rewards=[Reward(name="total", every_turn=True), Reward(name="taken")])
    assert trajectory.components == {"total": 1 + 3 + 6 + 6, "taken": 4}
    assert (await replay(trajectory)).same
    without = await replay(trajectory, rewards=False)
    assert without.difference is not None
    assert (without.difference.what, without.difference.path) == ("observation", "structured.drawn")


async def test_rewards_that_were_worked_out_elsewhere_are_not_taken() -> None:
    def total(_: Trajectory) -> float:
        return 0.25

    trajectory = await recorded(rewards=[total, Reward(name="taken", arguments={})])
    found = await replay(trajectory)
    assert found.same
    assert found.notes == ["reward total was worked out by the program that ran it, and was not compared"]


async def test_names_as_a_model_has_them() -> None:
    async def asks(env: Episode, task: Task) -> None:
        (tool, *_) = await env.list_openai_tools()
        await env.call_tool(tool["function"]["name"], {"number": 1}, id="call_1")

    trajectory = await recorded(asks)
    assert trajectory.tools
    assert (await replay(trajectory)).same


# Different


@pytest.mark.parametrize("step", range(3))
async def test_a_changed_result_is_found_at_its_step(step: int) -> None:
    trajectory = await recorded()
    result = trajectory.calls[step].result
    assert result is not None
    found = await replay(changed(trajectory, step, structured={**result.structured, "total": -1}))
    assert (found.verdict, found.same, found.steps) == ("differs", False, step + 1)
    assert found.difference is not None
    expected = {"what": "observation", "name": "sums/add", "path": "structured.total", "expected": -1}
    expected |= {"found": (1, 3, 6)[step], "step": step, "turn": step}
    assert msgspec.structs.asdict(found.difference) == expected


async def test_a_changed_failure_is_found() -> None:
    trajectory = await recorded()
    found = await replay(changed(trajectory, 3, is_error=False, content=[]))
    assert found.difference is not None
    assert (found.difference.step, found.difference.path) == (3, "content[0]")
    assert found.difference.expected == ABSENT


async def test_a_changed_reward_is_found() -> None:
    trajectory = await recorded()
    outcome = Scored(score=9.0, components={"total": Component(score=9.0, details={"score": 9.0})})
    wrong = msgspec.structs.replace(trajectory, outcome=outcome)
    found = await replay(wrong)
    assert found.difference is not None
    assert (found.difference.what, found.difference.name, found.difference.path) == ("reward", "total", "score")
    assert (found.difference.expected, found.difference.found, found.difference.step) == (9.0, 6, None)
    assert (await replay(wrong, rewards=False)).same


async def test_another_seed_or_another_setting_differs_at_the_reset() -> None:
    trajectory = await recorded()
    found = await replay(msgspec.structs.replace(trajectory, seed=8))
    assert found.difference is not None
    assert (found.difference.what, found.difference.name, found.difference.path) == ("observation", "reset", "first")
    found = await replay(trajectory, Environment("sums", environment_variables={"MODE": "hard"}))
    assert found.difference is not None
    assert (found.difference.path, found.difference.found, found.steps) == ("mode", "hard", 0)


async def test_what_is_no_more_is_a_difference_and_the_package_is_told(here: Path) -> None:
    trajectory = await recorded()
    (here / "src" / "custom_env.py").write_text(PROJECT.replace("def add(", "def plus("))
    found = await replay(trajectory)
    assert found.difference is not None
    assert (found.difference.name, found.difference.step, found.difference.path) == ("sums/add", 0, "content[0].text")
    assert "add" in found.difference.found
    assert [note.split(":")[0] for note in found.notes] == [
        "the package has another digest",
        "the tools have another digest",
    ]
    (here / "src" / "custom_env.py").write_text(PROJECT.replace("@register_reset", ""))
    found = await replay(trajectory)
    assert found.difference is not None
    assert (found.difference.what, found.difference.name) == ("call", "reset")
    (here / "src" / "custom_env.py").write_text(PROJECT.replace("state.update(total=0, taken=0)", "1 / 0"))
    found = await replay(trajectory)
    assert found.difference is not None
    assert (found.verdict, found.difference.what, found.difference.name) == ("differs", "call", "reset")
    assert "ZeroDivisionError" in found.difference.found


async def test_an_environment_that_shows_who_it_is_differs() -> None:
    async def asks(env: Episode, task: Task) -> None:
        await env.call_tool("add", {"number": 1})
        await env.call_tool("clock")

    found = await replay(await recorded(asks))
    assert found.difference is not None
    assert (found.difference.step, found.difference.name) == (1, "clock")


# Neither


async def test_a_sandbox_that_is_killed_gives_no_verdict() -> None:
    trajectory = await recorded()
    found = await replay(trajectory, Environment("sums", environment_variables={"DIES": "2", "MODE": ""}))
    assert (found.verdict, found.difference) == ("failed", None)
    assert found.failure is not None
    assert (found.failure.kind, found.failure.phase, found.failure.turn) == ("sandbox_lost", "tool", 1)
    with pytest.raises(EpisodeError, match="is not known: sandbox_lost"):
        _ = found.same


async def test_a_version_that_is_not_here_gives_no_verdict(here: Path) -> None:
    trajectory = await recorded()
    assert trajectory.provenance.env == "sums@1.0.0"
    (here / "config.json").write_text(json.dumps({"name": "sums", "version": "2.0.0"}))
    found = await replay(trajectory)
    assert found.failure is not None
    assert (found.verdict, found.failure.kind, found.failure.phase) == ("failed", NotFound.code, "create")
    assert (await replay(trajectory, "sums")).same


def test_a_verdict_survives_json() -> None:
    failed = Replayed(id="a", verdict="failed", failure=Failed(kind="network", phase="tool", reason="gone"))
    assert msgspec.json.decode(msgspec.json.encode(failed), type=Replayed) == failed


async def test_an_episode_that_never_began_cannot_be_replayed() -> None:
    trajectory = await recorded()
    failed = Failed(kind="start_failed", phase="create", reason="no")
    with pytest.raises(Invalid, match="nothing to replay"):
        await replay(msgspec.structs.replace(trajectory, outcome=failed, turns=[]))


# What cannot be compared


async def test_a_call_that_was_given_up_is_made_and_not_compared() -> None:
    """What follows it depends on it."""

    async def gives_up(env: Episode, task: Task) -> None:
        try:
            async with asyncio.timeout(1):
                await env.call_tool("wait")
        except TimeoutError:
            await env.call_tool("add", {"number": 1})

    trajectory = await recorded(gives_up)
    assert [call.result is None for call in trajectory.calls] == [True, False]
    assert trajectory.reward == 101
    found = await replay(trajectory)
    assert (found.verdict, found.steps) == ("same", 2)
    assert found.notes == ["step 0, wait: it had no result, and was not compared"]


async def test_an_episode_that_failed_is_replayed_up_to_its_failure() -> None:
    failed = Failed(kind="sandbox_lost", phase="tool", reason="killed", turn=3)
    trajectory = await recorded()
    turns = [*trajectory.turns[:3], Turn(calls=[Call(name="wait", arguments={})])]
    found = await replay(msgspec.structs.replace(trajectory, outcome=failed, turns=turns))
    assert (found.verdict, found.steps) == ("same", 4)
    assert found.notes == [
        "the episode itself has no score: sandbox_lost during tool: killed",
        "step 3, wait: it had no result, and was not compared",
    ]


async def test_calls_at_the_same_time_are_told() -> None:
    trajectory = await recorded()
    turns = msgspec.convert(msgspec.to_builtins(trajectory.turns), list[Turn])
    turns[1].calls[0] = msgspec.structs.replace(turns[1].calls[0], at=turns[0].calls[0].at)
    found = await replay(msgspec.structs.replace(trajectory, turns=turns))
    assert found.notes == ["calls were made at the same time, and are made one after the other here"]


# Comparing


@pytest.mark.parametrize(
    ("expected", "found", "where"),
    [
        ({"a": 1}, {"a": 1.0}, None),
        ({"a": [1, {"b": None}]}, {"a": [1, {"b": None}]}, None),
        ({"a": True}, {"a": 1}, ("a", True, 1)),
        ({"a": None}, {}, ("a", None, ABSENT)),
        ({}, {"a": None}, ("a", ABSENT, None)),
        ({"a": {"b c": [1, 2]}}, {"a": {"b c": [1, 3]}}, ('a."b c"[1]', 2, 3)),
        ([1], [1, 2], ("[1]", ABSENT, 2)),
        ("x", ["x"], ("", "x", ["x"])),
        ((1, 2), [1, 2], None),
    ],
)
def test_the_first_place_where_values_differ(expected: Any, found: Any, where: Any) -> None:
    assert unlike(expected, found) == where


def test_data_come_before_the_text_that_repeats_them() -> None:
    one = ToolResult(content=[{"type": "text", "text": '{"a":1}'}], structured={"a": 1})
    other = ToolResult(content=[{"type": "text", "text": '{"a":2}'}], structured={"a": 2})
    failed = ToolResult(content=[{"type": "text", "text": "it broke"}], is_error=True)
    assert unlike_results(one, one) is None
    assert unlike_results(one, other) == ("structured.a", 1, 2)
    assert unlike_results(one, failed) == ("content[0].text", '{"a":1}', "it broke")


def test_long_texts_are_shown_where_they_part() -> None:
    one, other = shown("a" * 500 + "left" + "b" * 500, "a" * 500 + "right")
    assert "left" in one
    assert "right" in other
    assert max(len(one), len(other)) < 80
    assert shown(ABSENT, {"a": 1}) == ("nothing", '{"a": 1}')
