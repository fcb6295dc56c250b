"""Episodes that a test drives from outside, as a trainer does: begun, played and ended, or failed, never between."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio

from aenv import Environment, attach
from aenv.errors import Abandoned, AEnvError, Conflict, EpisodeError, EpisodeTimeout, SandboxLost, StartFailed
from aenv.models import Sandbox
from aenv.rl import Driven, Reward, Rules, Trajectory
from tests.rl.bench import Bench, benches
from tests.rl.proofs import has_no_number, is_scored
from tests.rl.proxies import STALL, Trigger
from tests.support import ROOT
from tests.support import Sandbox as Lab

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.xdist_group("rl-driven")]
KEYPAD: dict[str, Any] = {"instruction": "Press the key that is shown.", "reset": {"digit": 3}}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def bench() -> AsyncIterator[Bench]:
    """With the keypad, which is deterministic: an episode of it goes on when its instance is lost."""
    async with benches() as found:
        shutil.copytree(ROOT / "examples" / "06-keypad", found.home / "envs" / "keypad" / "1.0.0")
        yield found


async def lose(bench: Bench, driven: Driven) -> None:
    """End its instance, from outside."""
    (await bench.family.runtime(bench.engine, driven.episode.instance_id)).kill()  # type: ignore[arg-type]


async def raised_by(driven: Driven) -> AEnvError:
    """What a call raises."""
    with pytest.raises(AEnvError) as raised:
        await driven.call_tool("work")
    return raised.value


# From its beginning to its end


async def test_an_episode(bench: Bench) -> None:
    driven = Driven(bench.env("keypad"), KEYPAD, 7, group="g", sample=2)
    assert await driven.begin() == "The display shows 3."
    assert [tool["function"]["name"] for tool in await driven.list_openai_tools()] == ["press"]
    assert (await driven.call_tool("press", {"key": 3}, id="c1")).text == "You pressed 3."
    assert driven.trajectory is None
    trajectory = await driven.end("pressed")
    is_scored(trajectory, 1.0)
    assert driven.trajectory is trajectory
    assert (trajectory.seed, trajectory.group, trajectory.sample) == (7, "g", 2)
    assert (trajectory.answer, trajectory.ended, trajectory.observation) == ("pressed", "done", "The display shows 3.")
    assert [(call.name, call.arguments, call.id) for call in trajectory.calls] == [("press", {"key": 3}, "c1")]
    assert trajectory.tools
    assert await driven.end("again") is trajectory
    await bench.empty()


async def test_what_comes_out_of_turn_is_refused(bench: Bench) -> None:
    driven = Driven(bench.env())
    for early in (driven.end, driven.list_openai_tools, lambda: driven.call_tool("work")):
        with pytest.raises(Conflict, match=r"has not begun|no episode is under way"):
            await early()
    await driven.abandon()
    await driven.begin()
    with pytest.raises(Conflict, match="has begun"):
        await driven.begin()
    is_scored(await driven.end(), 0.0)
    assert (await raised_by(driven)).message == "the episode is over"
    with pytest.raises(EpisodeError, match="is over"):
        await driven.list_openai_tools()
    await driven.abandon()
    assert (await driven.end()).ok
    await bench.empty()


async def test_a_tool_that_fails_is_a_result(bench: Bench) -> None:
    driven = Driven(bench.env())
    await driven.begin()
    assert (await driven.call_tool("work", {"what": "raise"})).is_error
    assert (await driven.call_tool("work")).structured == {"result": 1}
    is_scored(await driven.end(), 1.0)


async def test_two_at_a_time_are_apart(bench: Bench) -> None:
    async def play(digit: int) -> Trajectory:
        driven = Driven(bench.env("keypad"), {"reset": {"digit": digit}})
        await driven.begin()
        both.release()
        await both_begun.wait()
        await driven.call_tool("press", {"key": 1})
        return await driven.end()

    both, both_begun = asyncio.Semaphore(0), asyncio.Event()
    playing = asyncio.gather(play(0), play(1))
    await both.acquire()
    await both.acquire()
    both_begun.set()
    other, same = await playing
    is_scored(other, 0.0)
    is_scored(same, 1.0)
    assert other.provenance.instance != same.provenance.instance
    await bench.empty()


async def test_one_sandbox_for_all_is_refused(lab: Lab) -> None:
    driven = Driven(Environment("lab@1.2.3", provision=attach(lab.url)))
    with pytest.raises(AEnvError, match="an instance of its own"):
        await driven.begin()


# Limits


async def test_turns_that_are_used_up_are_told_and_scored(bench: Bench) -> None:
    driven = Driven(bench.env(), rules=Rules(max_turns=2))
    await driven.begin()
    for _ in range(2):
        await driven.call_tool("work")
    for _ in range(2):
        assert (await raised_by(driven)).message == "the turns of the episode are used up"
    trajectory = await driven.end("not of its own will")
    is_scored(trajectory, 2.0)
    assert (trajectory.ended, len(trajectory.turns)) == ("max_turns", 2)
    await bench.empty()


@pytest.mark.parametrize("late", [False, True])
async def test_a_call_that_is_under_way_when_the_time_is_over(bench: Bench, late: bool) -> None:
    driven = Driven(bench.env(), rules=Rules(episode_timeout=0.5, score_late=late, fast_forward=True))
    await driven.begin()
    await driven.call_tool("work")
    made = len(bench.made)
    with pytest.raises(EpisodeError if late else EpisodeTimeout):
        await driven.call_tool("pause", {"seconds": 60})
    trajectory = await driven.end()
    if late:
        is_scored(trajectory, 1.0)
        assert trajectory.ended == "time"
    else:
        has_no_number(trajectory, {"episode_timeout"}, {"tool"})
    await bench.empty()
    assert len(bench.made) == made, "nobody went on with it"


async def test_no_call_comes_between_the_end_and_the_score(bench: Bench) -> None:
    rewarding, go_on = asyncio.Event(), asyncio.Event()

    async def halt(sandbox: Sandbox) -> None:
        rewarding.set()
        await go_on.wait()

    bench.between = Trigger("reward", halt).between
    try:
        driven = Driven(bench.env())
        await driven.begin()
        await driven.call_tool("work")
        ending = asyncio.create_task(driven.end())
        await rewarding.wait()
        calling = asyncio.create_task(driven.call_tool("work"))
        await asyncio.sleep(0)
        go_on.set()
        trajectory = await ending
        with pytest.raises(EpisodeError, match="is over"):
            await calling
    finally:
        bench.between = None
    is_scored(trajectory, 1.0)
    assert len(trajectory.calls) == 1
    await bench.empty()


# Failures


@pytest.mark.parametrize("when", ["before", "between", "after"])
async def test_an_instance_that_is_lost_is_replaced_where_that_can_be(bench: Bench, when: str) -> None:
    driven = Driven(bench.env("keypad"), KEYPAD)
    await driven.begin()
    first = driven.episode.instance_id
    for place in ("before", "between"):
        if when == place:
            await lose(bench, driven)
        await driven.call_tool("press", {"key": 3})
    if when == "after":
        await lose(bench, driven)
    trajectory = await driven.end()
    is_scored(trajectory, 1.0)
    assert trajectory.provenance.forwarded == 1
    assert trajectory.provenance.instance != first
    assert len(trajectory.calls) == 2
    await bench.empty()


@pytest.mark.parametrize("rules", [None, Rules()], ids=["usual", "plain"])
@pytest.mark.parametrize("when", ["in", "before", "after"])
async def test_elsewhere_the_episode_has_failed_and_is_not_begun_again(
    bench: Bench, when: str, rules: Rules | None
) -> None:
    driven = Driven(bench.env(), rules=rules)
    await driven.begin()
    await driven.call_tool("work")
    made = len(bench.made)
    if when != "in":
        await lose(bench, driven)
    if when != "after":
        for _ in range(2):
            assert isinstance(await raised_by(driven) if when == "before" else await killed(driven), SandboxLost)
    trajectory = await driven.end("all is well")
    has_no_number(trajectory, {"sandbox_lost"}, {"reward" if when == "after" else "tool"})
    assert trajectory.retried == []
    assert rules is None or len(bench.made) == made
    assert isinstance(await raised_by(driven), SandboxLost)
    await bench.empty()


async def killed(driven: Driven) -> AEnvError:
    with pytest.raises(AEnvError) as raised:
        await driven.call_tool("work", {"what": "kill"})
    return raised.value


async def test_a_begin_that_fails_is_tried_again(bench: Bench) -> None:
    async def kill(sandbox: Sandbox) -> None:
        (await bench.family.runtime(bench.engine, sandbox.id)).kill()

    bench.between = Trigger("reset", kill, times=1).between
    try:
        driven = Driven(bench.env(), rules=Rules())
        assert await driven.begin() == {"seed": None}
    finally:
        bench.between = None
    await driven.call_tool("work")
    trajectory = await driven.end()
    is_scored(trajectory, 1.0)
    assert [(failed.kind, failed.phase) for failed in trajectory.retried] == [("sandbox_lost", "reset")]
    await bench.empty()


async def test_a_begin_that_fails_again_and_again_is_raised(bench: Bench) -> None:
    made = len(bench.made)
    driven = Driven(bench.env("unimportable"))
    with pytest.raises(StartFailed, match="broken on purpose"):
        await driven.begin()
    assert isinstance(await raised_by(driven), StartFailed)
    trajectory = await driven.end()
    has_no_number(trajectory, {"start_failed"}, {"create"})
    assert len(trajectory.retried) == 2
    assert len(bench.made) == made
    await bench.empty()


async def test_a_score_that_cannot_be_had_is_a_failure(bench: Bench) -> None:
    driven = Driven(bench.env(), {"reward": {"what": "raise"}})
    await driven.begin()
    await driven.call_tool("work")
    has_no_number(await driven.end(), {"author_failed"}, {"reward"})
    await bench.empty()


async def test_a_reward_of_the_trainers_own(bench: Bench) -> None:
    count = Reward(name="count", function=lambda trajectory: len(trajectory.calls) / 4)
    driven = Driven(bench.env(), rules=Rules(rewards=[count]))
    await driven.begin()
    await driven.call_tool("work")
    is_scored(await driven.end(), 0.25)


# Given up


@pytest.mark.parametrize("when", ["begin", "idle", "call", "end"])
@pytest.mark.parametrize("how", ["abandon", "cancel"])
async def test_what_is_given_up_leaves_nothing(bench: Bench, when: str, how: str) -> None:
    reached = asyncio.Event()

    async def stall(sandbox: Sandbox) -> str:
        reached.set()
        return STALL

    bench.between = Trigger({"begin": "reset", "call": "tool", "end": "reward"}.get(when, "never"), stall).between
    driven = Driven(bench.env())
    try:
        going: asyncio.Task[Any] = asyncio.create_task(driven.begin())
        if when != "begin":
            await going
            if when == "idle":
                going = asyncio.create_task(asyncio.Event().wait())
                reached.set()
            else:
                going = asyncio.create_task(driven.end() if when == "end" else driven.call_tool("work"))
        await reached.wait()
        if how == "abandon" or when == "idle":
            await driven.abandon()
        else:
            going.cancel()
        if how == "cancel" or when == "idle":
            going.cancel()
            with pytest.raises(asyncio.CancelledError):
                await going
        else:
            with pytest.raises(Abandoned):
                await going
        if how == "cancel" and when == "call":  # who breaks off a call may still go on
            assert await bench.alive()
            await driven.abandon()
    finally:
        bench.between = None
    for ask in (driven.end, driven.list_openai_tools, lambda: driven.call_tool("work")):
        with pytest.raises(Abandoned):
            await ask()
    assert driven.trajectory is None
    assert await bench.alive() == []
    await bench.empty()


async def test_a_program_that_is_cancelled_while_its_episode_waits(bench: Bench) -> None:
    begun = asyncio.Event()

    async def trainer() -> None:
        driven = Driven(bench.env())
        try:
            await driven.begin()
            begun.set()
            await asyncio.Event().wait()
        finally:
            await driven.abandon()

    training = asyncio.create_task(trainer())
    await begun.wait()
    training.cancel()
    with pytest.raises(asyncio.CancelledError):
        await training
    assert await bench.alive() == []
    await bench.empty()
