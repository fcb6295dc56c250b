"""One episode: its limits, its rewards, what an agent may do and what becomes of it."""

from __future__ import annotations

import asyncio
import math
from typing import Any

import pytest

from aenv import Environment, attach
from aenv.errors import AEnvError, Invalid
from aenv.rl import Episode, Failed, Reward, Rules, Scored, Task, Trajectory, Turn, files, rollout, rollouts
from aenv.rl.playing import derived
from tests.rl.bench import TURNS, Bench, idle, worker, write_env
from tests.rl.proofs import has_no_number, is_scored
from tests.support import Sandbox

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.xdist_group("rl-playing")]


async def endless(env: Episode, task: Task) -> None:
    while True:
        await env.call_tool("work")


# Limits


async def test_turns_that_are_used_up_are_scored(plain_bench: Bench) -> None:
    trajectory = await rollout(plain_bench.env(), endless, rules=Rules(max_turns=2))
    is_scored(trajectory, 2.0)
    assert (trajectory.ended, len(trajectory.turns)) == ("max_turns", 2)


async def test_an_agent_that_catches_everything_ends_with_its_turns(plain_bench: Bench) -> None:
    async def agent(env: Episode, task: Task) -> None:
        while True:
            try:
                await env.call_tool("work")
            except Exception:
                await asyncio.sleep(0)

    trajectory = await rollout(plain_bench.env(), agent, rules=Rules(max_turns=2))
    is_scored(trajectory, 2.0)
    assert trajectory.ended == "max_turns"


@pytest.mark.parametrize("how", ["gather", "group"])
async def test_several_calls_at_a_time_are_one_turn(plain_bench: Bench, how: str) -> None:
    async def agent(env: Episode, task: Task) -> None:
        for _ in range(3):
            if how == "gather":
                await asyncio.gather(*(env.call_tool("work") for _ in range(5)))
                continue
            async with asyncio.TaskGroup() as group:
                for _ in range(5):
                    group.create_task(env.call_tool("work"))

    one = Reward(name="one", function=lambda turn: 1.0, every_turn=True)
    trajectory = await rollout(plain_bench.env(), agent, rules=Rules(max_turns=2, rewards=[one]))
    assert trajectory.ended == "max_turns"
    assert [len(turn.calls) for turn in trajectory.turns] == [5, 5]
    assert trajectory.reward == 2.0
    await plain_bench.empty()


async def test_turns_left_are_told(plain_bench: Bench) -> None:
    async def agent(env: Episode, task: Task) -> list[Any]:
        before = env.turns_left
        await env.say({"role": "assistant", "content": "first"})
        await env.call_tool("work")
        await env.call_tool("work")
        return [before, env.turns_left, len(env.turns)]

    trajectory = await rollout(plain_bench.env(), agent, rules=Rules(max_turns=3))
    assert trajectory.answer == [3, 2, 1]
    assert [len(turn.calls) for turn in trajectory.turns] == [2]
    without = await rollout(plain_bench.env(), agent)
    assert without.answer == [None, None, 1]


async def test_time_that_is_over_fails_or_is_scored_late(plain_bench: Bench) -> None:
    async def agent(env: Episode, task: Task) -> None:
        await env.call_tool("work")
        await asyncio.Event().wait()

    for rules, kind in (({"turn_timeout": 1.0}, "turn_timeout"), ({"episode_timeout": 1.0}, "episode_timeout")):
        failed = await rollout(plain_bench.env(), agent, rules=Rules(**rules))
        assert has_no_number(failed, {kind}, {"agent"}).turn == 0
        late = await rollout(plain_bench.env(), agent, rules=Rules(**rules, score_late=True))
        is_scored(late, 1.0)
        assert late.ended == "time"


async def test_what_failed_before_its_time_was_over_is_not_scored_late(plain_bench: Bench) -> None:
    async def agent(env: Episode, task: Task) -> None:
        try:
            await env.call_tool("work", {"what": "kill"})
        except AEnvError:
            await asyncio.Event().wait()

    rules = Rules(turn_timeout=2.0, score_late=True, retries=0)
    has_no_number(await rollout(plain_bench.env(), agent, rules=rules), {"sandbox_lost", "network"}, {"tool"})


async def test_the_time_of_a_turn_begins_anew_with_each(plain_bench: Bench) -> None:
    """Each takes less than the limit, and all of them together more."""

    async def agent(env: Episode, task: Task) -> float:
        loop = asyncio.get_running_loop()
        begun = loop.time()
        while loop.time() - begun < 4.5:
            await env.call_tool("pause", {"seconds": 0.3})
        return loop.time() - begun

    trajectory = await rollout(plain_bench.env(), agent, rules=Rules(turn_timeout=4.0))
    assert trajectory.ok, trajectory.outcome


async def test_a_time_out_of_the_agents_own_is_its_own(plain_bench: Bench) -> None:
    async def catches(env: Episode, task: Task) -> None:
        try:
            async with asyncio.timeout(0.2):
                await env.call_tool("pause", {"seconds": 30})
        except TimeoutError:
            await env.call_tool("work")

    async def fails(env: Episode, task: Task) -> None:
        async with asyncio.timeout(0.01):
            await asyncio.Event().wait()

    rules = Rules(turn_timeout=60.0, episode_timeout=60.0)
    is_scored(await rollout(plain_bench.env(), catches, rules=rules), 1.0)
    has_no_number(await rollout(plain_bench.env(), fails, rules=rules), {"agent_failed"}, {"agent"})


@pytest.mark.parametrize(
    "wrong", [{"max_turns": 0}, {"turn_timeout": 0}, {"episode_timeout": -1.0}, {"turn_timeout": math.nan}]
)
async def test_limits_that_make_no_sense(wrong: dict[str, Any]) -> None:
    with pytest.raises(Invalid, match=next(iter(wrong))):
        Rules(**wrong)


# Agents


async def test_what_an_agent_raises_is_told_with_its_place(plain_bench: Bench) -> None:
    async def agent(env: Episode, task: Task) -> None:
        await env.call_tool("work")
        raise LookupError("where is it?")

    failed = has_no_number(await rollout(plain_bench.env(), agent), {"agent_failed"}, {"agent"})
    assert "LookupError: where is it?" in failed.reason
    assert "test_playing.py:" in failed.reason


async def test_what_it_did_before_is_not_what_it_failed_in(plain_bench: Bench) -> None:
    async def agent(env: Episode, task: Task) -> None:
        with pytest.raises(Invalid):
            await env.call_tool("other-env/work")
        raise ValueError("of its own")

    has_no_number(await rollout(plain_bench.env(), agent), {"agent_failed"}, {"agent"})


async def test_a_tool_error_that_it_asked_for_is_its_own_failure(plain_bench: Bench) -> None:
    async def agent(env: Episode, task: Task) -> None:
        (await env.call_tool("work", {"what": "raise"})).raise_for_error()

    failed = has_no_number(await rollout(plain_bench.env(), agent), {"agent_failed"}, {"agent"})
    assert "broken on purpose" in failed.reason


async def test_an_agent_is_callable_and_async(plain_bench: Bench) -> None:
    failed = has_no_number(
        await rollout(plain_bench.env(), lambda env, task: "no"),  # type: ignore[arg-type, return-value]
        {"agent_failed"},
        {"agent"},
    )
    assert "is not async" in failed.reason
    with pytest.raises(Invalid, match="cannot be called"):
        await rollout(plain_bench.env(), "agent")  # type: ignore[arg-type]


async def test_an_environment_that_runs_is_refused(plain_bench: Bench) -> None:
    async with plain_bench.env() as env:
        with pytest.raises(Invalid, match="runs already"):
            await rollout(env, idle)
    with pytest.raises(Invalid, match="no environment"):
        await rollout(7, idle)  # type: ignore[arg-type]


async def test_answers_are_kept_as_json_or_as_words(plain_bench: Bench) -> None:
    for answer, kept in (({"a": (1, 2)}, {"a": [1, 2]}), (None, None), ("\ud800", "'\\ud800'")):

        async def agent(env: Episode, task: Task, answer: Any = answer) -> Any:
            return answer

        trajectory = await rollout(plain_bench.env(), agent)
        assert trajectory.answer == kept
        assert files.parse(files.line_of(trajectory)) == trajectory


@pytest.mark.parametrize("content", [object(), "\ud800"])
async def test_a_message_that_cannot_be_kept_is_refused_and_not_written_later(
    plain_bench: Bench, content: object
) -> None:
    async def hears(env: Episode, task: Task) -> None:
        env.hear({"role": "user", "content": content})

    async def says(env: Episode, task: Task) -> None:
        await env.say({"role": "assistant", "content": content})

    for agent in (hears, says):
        has_no_number(await rollout(plain_bench.env(), agent), {"invalid"}, {"agent"})


async def test_what_is_heard_is_kept_as_it_was(plain_bench: Bench) -> None:
    async def agent(env: Episode, task: Task) -> None:
        message = {"role": "user", "content": [{"type": "text", "text": "before"}]}
        env.hear(message)
        message["content"][0]["text"] = "after"  # type: ignore[index]

    trajectory = await rollout(plain_bench.env(), agent)
    assert trajectory.messages == [{"role": "user", "content": [{"type": "text", "text": "before"}]}]


# Before it begins


async def test_files_and_the_observation_are_there(plain_bench: Bench) -> None:
    async def agent(env: Episode, task: Task) -> list[Any]:
        found = await env.download("notes/one.txt")
        return [found.decode(), env.observation, env.task.id, env.sample_seed]

    task = {"id": "t", "files": {"notes/one.txt": "wörter"}}
    trajectory = await rollout(plain_bench.env(), agent, task, seed=11)
    assert trajectory.answer == ["wörter", {"seed": 11}, "t", derived(11, 0)]
    assert trajectory.provenance.reset
    assert (trajectory.seed, trajectory.provenance.instance in plain_bench.made) == (11, True)
    seeded = await rollout(plain_bench.env(), agent, {**task, "seed": 5}, seed=11)
    assert (seeded.seed, seeded.observation) == (5, {"seed": 5})


async def test_without_a_reset_none_is_called(plain_bench: Bench) -> None:
    trajectory = await rollout(plain_bench.env("words"), idle, rules=Rules(rewards="first"))
    is_scored(trajectory, 1.0)
    assert (trajectory.observation, trajectory.provenance.reset) == (None, False)
    unasked = await rollout(plain_bench.env(), worker, {"arguments": ["reset=raise"]}, rules=Rules(reset=False))
    is_scored(unasked, TURNS)


LEVELS = """
from aenv import register_reset, register_reward, register_tool

level = 0

@register_reset
def begin(wanted: int, seed: int | None = None) -> str:
    global level
    level = wanted
    return f"level {wanted}, seed {seed}"

@register_tool
def climb() -> int:
    global level
    level += 1
    return level

@register_reward
def height() -> float:
    return float(level)
"""


async def test_a_task_is_begun_by_a_reset_with_its_arguments(plain_bench: Bench) -> None:
    write_env(plain_bench.home, "levels", LEVELS)
    env = plain_bench.env("levels")
    trajectory = await rollout(env, idle, {"reset": {"wanted": 3}}, seed=5)
    is_scored(trajectory, 3.0)
    assert trajectory.observation == "level 3, seed 5"
    wrong = await rollout(env, idle, {"reset": {"wanted": "high"}}, seed=5)
    assert wrong.failure is not None
    assert (wrong.failure.kind, wrong.failure.phase) == ("invalid", "reset")
    assert "wanted" in wrong.failure.reason


async def test_an_agent_is_offered_the_tools_of_its_task(plain_bench: Bench) -> None:
    async def agent(env: Episode, task: Task) -> list[str]:
        offered = [tool["name"] for tool in await env.list_tools()]
        offered += [tool["function"]["name"] for tool in await env.list_openai_tools()]
        await env.call_tool("saboteur/work")
        await env.call_tool("pause", {"seconds": 0.0})
        return offered

    trajectory = await rollout(plain_bench.env(), agent, {"tools": ["work"]})
    is_scored(trajectory, 1.0)
    assert trajectory.answer == ["saboteur/work", "work"]
    done, refused = (call.result for call in trajectory.calls)
    assert done is not None
    assert refused is not None
    assert (done.is_error, refused.is_error) == (False, True)
    assert refused.text == "there is no tool 'pause'; available: work"


async def test_a_task_cannot_offer_what_is_not_there(plain_bench: Bench) -> None:
    trajectory = await rollout(plain_bench.env(), worker, {"id": "t", "tools": ["work", "wrok"]})
    assert trajectory.failure is not None
    assert trajectory.failure.kind == "invalid"
    assert trajectory.failure.reason == "task t offers 'wrok', which saboteur does not have"


async def test_an_episode_about_another_task_is_not_played(plain_bench: Bench) -> None:
    """The environment has no reset, or none is to be called: then it would not be the task that was asked for."""
    for name, rules in (("words", Rules(rewards="first")), ("saboteur", Rules(reset=False))):
        trajectory = await rollout(plain_bench.env(name), idle, {"reset": {"wanted": 3}}, rules=rules)
        assert trajectory.failure is not None
        assert trajectory.failure.phase == "reset"


async def test_a_file_that_cannot_be_written_fails_before_the_agent(plain_bench: Bench) -> None:
    trajectory = await rollout(plain_bench.env(), worker, {"files": {"/proc/none/such": "x"}})
    assert trajectory.failure is not None
    assert trajectory.failure.phase == "reset"
    assert trajectory.turns == []


# Rewards


async def test_rewards_with_weights(plain_bench: Bench) -> None:
    rules = Rules(rewards={"first": 0.5, "second": 2.0})
    trajectory = await rollout(plain_bench.env("words"), idle, {"reward": {}}, rules=rules)
    is_scored(trajectory, 4.5)
    assert trajectory.components == {"first": 1.0, "second": 2.0}
    assert isinstance(trajectory.outcome, Scored)
    assert trajectory.outcome.components["second"].details == {"score": 2.0, "why": "because"}
    assert trajectory.outcome.components["second"].weight == 2.0


async def test_one_of_several_rewards_that_fails_leaves_none(plain_bench: Bench) -> None:
    def broken(trajectory: Trajectory) -> float:
        raise KeyError("no")

    rules = Rules(rewards=["first", broken])
    failed = has_no_number(await rollout(plain_bench.env("words"), idle, rules=rules), {"author_failed"}, {"reward"})
    assert "broken() raised KeyError" in failed.reason


async def test_several_rewards_and_none_is_named(plain_bench: Bench) -> None:
    has_no_number(await rollout(plain_bench.env("words"), idle), {"invalid"}, {"reward"})


async def test_arguments_of_the_task_and_of_the_reward(plain_bench: Bench) -> None:
    rules = Rules(rewards=Reward(name="second", arguments={"value": 7.0}))
    trajectory = await rollout(plain_bench.env("words"), idle, {"reward": {"value": 3.0}}, rules=rules)
    is_scored(trajectory, 7.0)
    assert trajectory.provenance.local_rewards == ["second"]


async def test_functions_as_rewards(plain_bench: Bench) -> None:
    def calls(trajectory: Trajectory) -> int:
        with pytest.raises(AEnvError):  # it has no score yet, and none may be read
            _ = trajectory.reward
        return len(trajectory.calls)

    async def later(trajectory: Trajectory) -> dict[str, Any]:
        await asyncio.sleep(0)
        return {"score": 10, "answer": trajectory.answer}

    trajectory = await rollout(plain_bench.env(), worker, rules=Rules(rewards=[calls, later]))
    is_scored(trajectory, TURNS + 10)
    assert trajectory.provenance.local_rewards == ["calls", "later"]


class Number:
    """A tensor's ways: its size is a method, and one of more numbers is none."""

    def __init__(self, *values: Any) -> None:
        self.values = values

    def size(self) -> list[int]:
        return [len(self.values)]

    def item(self) -> Any:
        if len(self.values) != 1:
            raise RuntimeError("a Tensor with several elements cannot be converted to Scalar")
        return self.values[0]


@pytest.mark.parametrize(
    "value",
    [math.nan, math.inf, True, "1.0", None, [1.0], {}, {"score": None}, 10**400, Number(1.0, 2.0), Number(True)],
)
async def test_a_function_that_gives_no_number(plain_bench: Bench, value: Any) -> None:
    trajectory = await rollout(plain_bench.env(), idle, rules=Rules(rewards=lambda trajectory: value))
    has_no_number(trajectory, {"author_failed"}, {"reward"})


async def test_a_number_of_a_tensor(plain_bench: Bench) -> None:
    is_scored(await rollout(plain_bench.env(), idle, rules=Rules(rewards=lambda trajectory: Number(0.25))), 0.25)


async def test_numbers_that_add_up_to_none(plain_bench: Bench) -> None:
    rules = Rules(rewards=Reward(name="big", weight=1e200, function=lambda trajectory: 1e200))
    has_no_number(await rollout(plain_bench.env(), idle, rules=rules), {"author_failed"}, {"reward"})


async def test_a_function_that_waits_for_what_was_cancelled(plain_bench: Bench) -> None:
    async def reward(trajectory: Trajectory) -> float:
        waiting = asyncio.ensure_future(asyncio.Event().wait())
        waiting.cancel()
        await waiting
        return 1.0

    trajectory = await rollout(plain_bench.env(), idle, rules=Rules(rewards=reward))
    assert has_no_number(trajectory, {"agent_failed", "author_failed"}, {"reward"})


# Rewards of every turn


async def test_rewards_of_turns_are_summed(plain_bench: Bench) -> None:
    def lengths(turn: Turn) -> float:
        return float(len(turn.calls))

    rules = Rules(
        rewards=[Reward(function=lengths, every_turn=True, weight=2.0), Reward(name="score", every_turn=True)]
    )
    trajectory = await rollout(plain_bench.env(), worker, rules=rules)
    assert [{key: found.score for key, found in turn.rewards.items()} for turn in trajectory.turns] == [
        {"lengths": 1.0, "score": float(place)} for place in (1, 2, 3)
    ]
    assert trajectory.components == {"lengths": 3.0, "score": 6.0}
    is_scored(trajectory, 12.0)
    nobody = await rollout(plain_bench.env(), idle, rules=rules)
    is_scored(nobody, 0.0)


@pytest.mark.parametrize("failing", range(TURNS))
@pytest.mark.parametrize("catching", [False, True])
async def test_a_reward_of_a_turn_that_fails_once_leaves_no_sum(
    plain_bench: Bench, failing: int, catching: bool
) -> None:
    """Of two, so that the other's number is there already; and an agent may catch whatever its call raises."""
    taken = 0

    def steady(turn: Turn) -> float:
        return 1.0

    def shaky(turn: Turn) -> float:
        nonlocal taken
        taken += 1
        if taken == failing + 1:
            raise RuntimeError("broken on purpose")
        return 1.0

    async def agent(env: Episode, task: Task) -> None:
        for _ in range(TURNS):
            try:
                await env.call_tool("work")
            except Exception:
                if not catching:
                    raise

    rules = Rules(rewards=[Reward(function=steady, every_turn=True), Reward(function=shaky, every_turn=True)])
    trajectory = await rollout(plain_bench.env(), agent, rules=rules)
    has_no_number(trajectory, {"author_failed"}, {"reward"})


# What is kept


async def test_calls_are_kept_with_what_came_of_them(plain_bench: Bench) -> None:
    async def agent(env: Episode, task: Task) -> None:
        given = {"what": ""}
        await env.call_tool("saboteur/work", given, id="c7")
        given["what"] = "raise"
        await env.call_tool("work", {"what": "kill"})

    trajectory = await rollout(plain_bench.env(), agent, rules=Rules(retries=0))
    first, second = trajectory.calls
    assert (first.name, first.arguments, first.id) == ("saboteur/work", {"what": ""}, "c7")
    assert first.result is not None
    assert first.result.text == "1"
    assert second.result is None
    assert isinstance(trajectory.outcome, Failed)
    assert trajectory.outcome.turn == 1
    assert {"create", "reset", "agent", "release", "tool", "model", "total"} <= trajectory.seconds.keys()


async def test_two_at_a_time_of_one_template(plain_bench: Bench) -> None:
    env = plain_bench.env()
    found = await asyncio.gather(*(rollout(env, worker, {"id": f"t{place}"}) for place in range(3)))
    assert [trajectory.reward for trajectory in found] == [TURNS] * 3
    assert len({trajectory.provenance.instance for trajectory in found}) == 3
    assert env.instance_id is None
    assert isinstance(env, Environment)


# Agents that catch everything


async def test_an_agent_that_catches_its_cancellation_is_not_scored(plain_bench: Bench) -> None:
    begun = asyncio.Event()

    async def agent(env: Episode, task: Task) -> str:
        try:
            begun.set()
            await asyncio.Event().wait()
        except BaseException:
            return "went on"
        return "done"

    playing = asyncio.create_task(rollout(plain_bench.env(), agent))
    await begun.wait()
    playing.cancel()
    with pytest.raises(asyncio.CancelledError):
        await playing
    await plain_bench.empty()


async def test_an_agent_that_tries_again_for_ever_lets_others_live(plain_bench: Bench) -> None:
    stop = asyncio.Event()

    async def agent(env: Episode, task: Task) -> None:
        while not stop.is_set():
            try:
                await env.call_tool("work")
            except BaseException:
                continue

    playing = asyncio.create_task(rollout(plain_bench.env(), agent, rules=Rules(max_turns=1)))
    other = await rollout(plain_bench.env(), idle)
    stop.set()
    assert other.ok
    assert (await playing).ended in ("done", "max_turns")


async def test_an_agent_that_ends_the_program_ends_its_episode(plain_bench: Bench) -> None:
    async def agent(env: Episode, task: Task) -> None:
        raise SystemExit(3)

    found = await rollout(plain_bench.env(), agent)
    assert found.failure is not None
    assert (found.failure.kind, found.failure.phase) == ("agent_failed", "agent")
    assert "SystemExit" in found.failure.reason


async def test_rewards_of_functions_do_not_hide_that_the_sandbox_is_gone(plain_bench: Bench) -> None:
    async def agent(env: Episode, task: Task) -> None:
        await env.agent_url()  # whoever has it calls what nobody here sees
        await plain_bench.engine.delete(env.instance_id or "")

    found = await rollout(plain_bench.env(), agent, rules=Rules(rewards=lambda trajectory: 1.0, retries=0))
    assert found.failure is not None, found.outcome
    assert found.failure.phase == "reward"


async def test_one_sandbox_is_not_for_several_at_a_time(lab: Sandbox) -> None:
    async def agent(env: Episode, task: Task) -> None:
        await env.call_tool("add", {"a": 1, "b": 2})

    env = Environment("lab@1.2.3", provision=attach(lab.url))
    one = Rules(rewards=lambda trajectory: 1.0)
    async with rollouts(env, agent, ["x", "y"], rules=one) as run:
        found = [trajectory async for trajectory in run]
    assert [one.failure and one.failure.kind for one in found] == ["invalid", "invalid"]
    assert (await rollout(env, agent, rules=one)).reward == 1.0
