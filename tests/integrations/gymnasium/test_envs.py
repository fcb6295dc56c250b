"""Instances as Gymnasium's environments, beside Gymnasium's own, and what they do when the platform fails."""

from __future__ import annotations

import asyncio
import warnings
from contextlib import AbstractAsyncContextManager, closing
from typing import Any

import gymnasium
import numpy
import pytest
from gymnasium.utils.env_checker import check_env
from gymnasium.vector import AutoresetMode, SyncVectorEnv

from aenv.client.sync import wait
from aenv.errors import AEnvError, AuthorError, Invalid, SandboxLost, Unsupported
from aenv.integrations.gymnasium import AenvEnv, AenvVectorEnv, Tools, register
from aenv.models import Sandbox, SandboxSpec
from tests.integrations.gymnasium.walk import Walk
from tests.rl.bench import Bench

pytestmark = pytest.mark.xdist_group("gymnasium")


def same(one: Any, other: Any) -> bool:
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[name], other[name]) for name in one)
    if isinstance(one, tuple):
        return len(one) == len(other) and all(map(same, one, other))
    return bool(numpy.array_equal(one, other))


def lose(env: AenvEnv) -> None:
    """The same from inside."""
    with pytest.raises(AEnvError):
        wait(env.instance.exec("kill -9 $PPID"))


def test_it_is_what_gymnasium_checks(bench: Bench) -> None:
    env = AenvEnv(bench.env("walk"))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that there is no bound, and no way to draw it
        check_env(env)
    env.close()
    assert wait(bench.alive()) == []


def test_every_step_is_that_of_gymnasium(bench: Bench) -> None:
    ours, theirs = AenvEnv(bench.env("walk")), Walk()
    assert ours.observation_space == theirs.observation_space
    assert ours.action_space == theirs.action_space
    ours.action_space.seed(1)
    for seed in (5, None, None):
        (seen, info), (own, _) = ours.reset(seed=seed), theirs.reset(seed=seed)
        assert same(seen, own)
        assert info == {"drift": 0.5}
        for _ in range(40):
            action = ours.action_space.sample()
            found, expected = ours.step(action), theirs.step(action)
            if seed is not None:
                assert same(found[0], expected[0])
                assert found[1:] == expected[1:]
            if found[2] or found[3]:
                break
        with pytest.raises(Invalid, match="call reset"):
            ours.step(action)
    ours.close()


@pytest.mark.parametrize("mode", list(AutoresetMode))
def test_a_vector_is_that_of_gymnasium(bench: Bench, mode: AutoresetMode) -> None:
    ours = AenvVectorEnv(bench.env("short", arguments=["3"]), 4, autoreset_mode=mode)
    theirs = SyncVectorEnv([lambda: Walk(3)] * 4, autoreset_mode=mode)
    for name in ("observation_space", "action_space", "single_observation_space", "single_action_space", "num_envs"):
        assert getattr(ours, name) == getattr(theirs, name)
    assert ours.metadata["autoreset_mode"] == theirs.metadata["autoreset_mode"]
    seeds: Any = [3, 1, 4, 1]
    assert same(ours.reset(seed=seeds)[0], theirs.reset(seed=seeds)[0])
    ours.action_space.seed(2)
    for step in range(9):
        actions = ours.action_space.sample()
        found, expected = ours.step(actions), theirs.step(actions)
        if step < 3:
            assert same(found[0], expected[0]) or (mode == AutoresetMode.SAME_STEP and step == 2)
            assert same(found[1:4], expected[1:4])
        assert sorted(found[4]) == sorted(name for name in expected[4] if "nothing" not in name)
        assert same(tuple(found[2:4]), tuple(expected[2:4]))
        if mode == AutoresetMode.SAME_STEP and step == 2:
            assert same(tuple(found[4]["final_obs"]), tuple(expected[4]["final_obs"]))
        if mode == AutoresetMode.DISABLED and (over := found[2] | found[3]).any():
            with pytest.raises(Invalid, match="reset_mask"):
                ours.step(actions)
            options = {"reset_mask": over}
            found, expected = ours.reset(seed=7, options=options), theirs.reset(seed=7, options=options)
            assert same(found[0], expected[0])
    ours.close()
    assert wait(bench.alive()) == []


def test_names(bench: Bench) -> None:
    id = register("walk@1.0.0")
    assert id == "aenv/walk-1.0.0"
    assert register("walk@1.0.0") == id
    assert id in gymnasium.registry
    env = gymnasium.make("aenv.integrations.gymnasium:aenv/env", env=bench.env("walk"))
    assert same(env.reset(seed=1)[0], Walk().reset(seed=1)[0])
    env.close()
    vector = gymnasium.make_vec(
        "aenv/env", 2, vectorization_mode="vector_entry_point", env=bench.env("walk"), retries=1
    )
    assert isinstance(vector, AenvVectorEnv)
    vector.close()


# Tools


def test_calls_of_tools(bench: Bench) -> None:
    env = AenvEnv(bench.env("counter"), Tools("Count.", final="submit", max_steps=4))
    assert env.reset(seed=1)[0] == "Count.\n\nit is 0"
    call = {"name": "add", "arguments": {"number": 2}}
    assert env.step(call) == ("2", 0.0, False, False, {})
    said, reward, terminated, truncated, _ = env.step({"name": "add", "arguments": {"number": 200}})
    assert "too much" in said
    assert (reward, terminated, truncated) == (0.0, False, False)
    assert env.step({"name": "submit"}) == ("done", 2.0, True, False, {})
    assert env.reset(options={"by": 7})[0] == "Count.\n\nit is 7"
    for _ in range(3):
        assert env.step(call)[1:4] == (0.0, False, False)
    assert env.step(call)[1:4] == (15.0, False, True)
    env.close()


def test_text_as_a_model_writes_it(bench: Bench) -> None:
    face = Tools({"instruction": "Count.", "tools": ["add"], "reward": {"factor": 0.5}}, text=True, every_step=True)
    env = AenvEnv(bench.env("counter"), face)
    env.reset()
    assert env.step('{"name": "add", "arguments": {"number": 3}}') == ("3", 1.5, False, False, {})
    assert env.step('{"name": "add", "arguments": {"number": 1}}') == ("4", 0.5, False, False, {})
    for odd, words in (
        ("I would add", "a call is JSON"),
        ("[]", 'a call is {"name"'),
        ('{"name": "submit"}', "there is no tool 'submit'"),
        ('{"name": "add", "arguments": [1]}', 'a call is {"name"'),
    ):
        said, reward, *over, _ = env.step(odd)
        assert words in said
        assert (reward, over) == (0.0, [False, False])
    env.close()


def test_without_a_reset_each_episode_has_an_instance_of_its_own(bench: Bench) -> None:
    env = AenvEnv(bench.env("once"), Tools("Count.", final="submit"))
    used = []
    for _ in range(3):
        assert env.reset()[0] == "Count."
        used.append(env.instance.instance_id)
        assert env.step({"name": "add", "arguments": {"number": 1}})[0] == "1"
        assert env.step({"name": "submit"})[1:3] == (1.0, True)
    assert len(set(used)) == 3
    env.close()
    assert wait(bench.alive()) == []


def test_what_cannot_be_played(bench: Bench) -> None:
    with pytest.raises(Unsupported, match="none of Gymnasium's"):
        AenvEnv(bench.env("counter"))
    with pytest.raises(Invalid, match="no tool 'give_up'"):
        AenvEnv(bench.env("counter"), Tools("Count.", final="give_up"))
    with pytest.raises(Invalid, match="as many faces"):
        AenvVectorEnv(bench.env("counter"), 2, [Tools("Count.")])
    with pytest.raises(Invalid, match="each its own"):
        AenvVectorEnv(bench.env("counter"), 2, [Tools("Count.")] * 2)
    assert wait(bench.alive()) == []


# What the platform fails at


@pytest.mark.parametrize("when", [0, 1, 4])
def test_an_episode_that_loses_its_instance_goes_on_in_another(bench: Bench, when: int) -> None:
    ours, theirs = AenvEnv(bench.env("walk")), Walk()
    ours.reset(seed=9)
    theirs.reset(seed=9)
    ours.action_space.seed(1)
    before = ours.instance.instance_id
    for step in range(6):
        if step == when:
            lose(ours)
        action = ours.action_space.sample()
        found, expected = ours.step(action), theirs.step(action)
        assert same(found[0], expected[0])
        assert found[1:] == expected[1:]
    assert ours.instance.instance_id != before
    ours.close()
    assert wait(bench.alive()) == []


def test_a_reset_in_an_instance_that_is_gone_takes_another(bench: Bench) -> None:
    env = AenvEnv(bench.env("walk"))
    env.reset(seed=1)
    lose(env)
    assert same(env.reset(seed=2)[0], Walk().reset(seed=2)[0])
    env.close()


def test_one_of_a_vector_is_lost(bench: Bench) -> None:
    ours = AenvVectorEnv(bench.env("walk"), 3)
    theirs = SyncVectorEnv([Walk] * 3)
    ours.reset(seed=1)
    theirs.reset(seed=1)
    ours.action_space.seed(1)
    for step in range(4):
        if step == 2:
            with pytest.raises(AEnvError):
                wait(ours.instances[1].exec("kill -9 $PPID"))
        actions = ours.action_space.sample()
        found, expected = ours.step(actions), theirs.step(actions)
        assert same(found[0], expected[0])
        assert same(tuple(found[1:4]), tuple(expected[1:4]))
    ours.close()
    assert wait(bench.alive()) == []


def test_one_that_is_never_twice_the_same_raises(bench: Bench) -> None:
    """A reward that never was would be learned from."""
    env = AenvEnv(bench.env("moody"))
    env.reset(seed=1)
    action = {"way": 0, "push": numpy.zeros(2)}
    for _ in range(3):
        env.step(action)
    lose(env)
    with pytest.raises(AEnvError, match="went otherwise") as caught:
        env.step(action)
    assert "call reset" in (caught.value.hint or "")
    with pytest.raises(Invalid, match="call reset"):
        env.step(action)
    env.reset(seed=1)
    env.step(action)
    env.close()
    assert wait(bench.alive()) == []


def test_after_a_failure_there_is_no_episode(bench: Bench) -> None:
    """Another instance, in which it was played again in part, is not where it was."""
    env = AenvEnv(bench.env("walk"), retries=0)
    env.reset(seed=1)
    action = {"way": 0, "push": numpy.zeros(2)}
    env.step(action)
    with pytest.raises(Invalid, match="no member"):
        env.step({"way": 7, "push": numpy.zeros(2)})
    env.step(action)
    lose(env)
    with pytest.raises(SandboxLost):
        env.step(action)
    with pytest.raises(Invalid, match="call reset"):
        env.step(action)
    with pytest.raises(AEnvError):
        env.reset(seed=1)
    with pytest.raises(Invalid, match="call reset"):
        env.step(action)
    env.close()
    assert wait(bench.alive()) == []


def test_options_are_those_of_the_reset(bench: Bench) -> None:
    env, options = AenvEnv(bench.env("walk")), {"place": 2.0}
    first, _ = env.reset(seed=1, options=options)
    options["place"] = 0.0
    action = {"way": 0, "push": numpy.zeros(2)}
    env.step(action)
    action["push"] += 1
    lose(env)
    theirs = Walk()
    assert same(first, theirs.reset(seed=1, options={"place": 2.0})[0])
    theirs.step({"way": 0, "push": numpy.zeros(2)})
    assert same(env.step(action)[0], theirs.step(action)[0])
    env.close()


@pytest.mark.parametrize("odd", ["inf", "-inf", "nan"])
def test_rewards_that_json_has_not(bench: Bench, odd: str) -> None:
    env = AenvEnv(bench.env("odd", arguments=[odd]))
    env.reset(seed=1)
    _, reward, *_ = env.step(0)
    assert str(reward) == odd
    env.close()


def test_an_action_is_made_what_the_space_has(bench: Bench) -> None:
    """As in Gymnasium, which looks neither at the type nor at the bounds."""
    env = AenvEnv(bench.env("walk"))
    env.reset(seed=1)
    env.step({"way": 0, "push": numpy.zeros(2, numpy.float32)})
    env.step({"way": 0, "push": [3.0, 0]})
    env.close()


def test_the_environments_own_failure_is_told_at_once(bench: Bench) -> None:
    env = AenvEnv(bench.env("odd", arguments=["raise"]))
    env.reset(seed=1)
    made = len(bench.made)
    with pytest.raises(AuthorError, match="it is broken"):
        env.step(0)
    assert len(bench.made) == made
    env.close()


@pytest.mark.parametrize(
    ("about", "words"),
    [("spaces", "does not tell"), ("reset", "does not tell"), ("step", "does not tell"), ("many", "does not answer")],
)
def test_what_an_environment_tells_may_be_anything(bench: Bench, about: str, words: str) -> None:
    def play() -> None:
        with closing(AenvEnv(bench.env("liar", arguments=[about]), retries=0)) as env:
            env.reset(seed=1)
            env.step(0)

    with pytest.raises(AuthorError, match=words):
        play()
    assert wait(bench.alive()) == []


# Several in one instance


@pytest.mark.parametrize("mode", list(AutoresetMode))
def test_environments_that_share_instances_play_as_those_that_do_not(bench: Bench, mode: AutoresetMode) -> None:
    runs = []
    for per_instance, instances in ((1, 5), (2, 3), (9, 1)):
        made = len(bench.made)
        envs = AenvVectorEnv(bench.env("short", arguments=["4"]), 5, autoreset_mode=mode, per_instance=per_instance)
        assert len(bench.made) - made == len(envs.instances) == instances
        found: list[Any] = [envs.reset(seed=5)[0]]
        envs.action_space.seed(5)
        for _ in range(9):
            found.append(envs.step(envs.action_space.sample())[:4])
            if mode == AutoresetMode.DISABLED and (over := found[-1][2] | found[-1][3]).any():
                found.append(envs.reset(seed=7, options={"reset_mask": over})[0])
        runs.append(found)
        envs.close()
    assert all(same(tuple(run), tuple(runs[0])) for run in runs)
    assert wait(bench.alive()) == []


@pytest.mark.parametrize("when", ["a step", "a reset of some"])
def test_those_that_share_an_instance_go_on_together(bench: Bench, when: str) -> None:
    """Also those that ask for nothing when it is lost."""
    ours = AenvVectorEnv(bench.env("walk"), 5, per_instance=3, autoreset_mode=AutoresetMode.DISABLED)
    theirs = SyncVectorEnv([Walk] * 5, autoreset_mode=AutoresetMode.DISABLED)
    ours.reset(seed=1)
    theirs.reset(seed=1)
    ours.action_space.seed(1)
    made = len(bench.made)
    for step in range(4):
        if step == 2:
            with pytest.raises(AEnvError):
                wait(ours.instances[0].exec("kill -9 $PPID"))
            if when == "a reset of some":
                options = {"reset_mask": numpy.array([False, True, False, False, True])}
                found, expected = ours.reset(seed=3, options=options), theirs.reset(seed=3, options=options)
                assert same(found[0], expected[0])
        actions = ours.action_space.sample()
        found, expected = ours.step(actions), theirs.step(actions)
        assert same(found[0], expected[0])
        assert same(tuple(found[1:4]), tuple(expected[1:4]))
    assert len(bench.made) - made == 1
    assert len(ours.instances) == 2
    ours.close()
    assert wait(bench.alive()) == []


def test_what_one_fails_at_is_no_failure_of_the_others(bench: Bench) -> None:
    envs = AenvVectorEnv(bench.env("deaf"), 3, per_instance=3, autoreset_mode=AutoresetMode.DISABLED)
    envs.reset(seed=1)
    made = len(bench.made)
    with pytest.raises(AuthorError, match="it takes no twos"):
        envs.step(numpy.array([1, 2, 0]))
    mask = numpy.array([False, True, False])
    with pytest.raises(AuthorError, match="it takes no options"):
        envs.reset(options={"reset_mask": mask, "some": 1})
    envs.reset(options={"reset_mask": mask})
    assert envs.step(numpy.array([1, 1, 0]))[0].tolist() == [1, 1, 0]
    assert len(bench.made) == made
    envs.close()
    assert wait(bench.alive()) == []


def test_one_that_cannot_start_is_tried_once_for_all_who_share_it(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    tried: list[SandboxSpec] = []
    provided = bench._provided

    def counted(spec: SandboxSpec) -> AbstractAsyncContextManager[Sandbox]:
        tried.append(spec)
        return provided(spec)

    monkeypatch.setattr(bench, "_provided", counted)
    with pytest.raises(AEnvError, match="division by zero"):
        AenvVectorEnv(bench.env("broken"), 8, per_instance=8, retries=1)
    assert len(tried) == 2
    with pytest.raises(Invalid, match="only one where faces are given"):
        AenvVectorEnv(bench.env("counter"), 2, [Tools("Count."), Tools("Count.")], per_instance=2)
    with pytest.raises(Invalid, match="one environment or more"):
        AenvVectorEnv(bench.env("walk"), 2, per_instance=0)
    assert wait(bench.alive()) == []


def test_a_step_that_is_broken_off_ends_the_episodes_and_no_more(bench: Bench) -> None:
    envs = AenvVectorEnv(bench.env("walk"), 4, per_instance=4)
    envs.reset(seed=1)
    players = envs._players

    async def broken_off() -> None:
        steps = [asyncio.create_task(player.step({"way": 0, "push": numpy.zeros(2)})) for player in players]
        await asyncio.sleep(0)
        for step in steps:
            step.cancel()
        assert all(step.cancelled() for step in (await asyncio.wait(steps))[0])

    wait(broken_off())
    with pytest.raises(Invalid, match="call reset"):
        envs.step(envs.action_space.sample())
    assert same(envs.reset(seed=2)[0]["place"], SyncVectorEnv([Walk] * 4).reset(seed=2)[0]["place"])
    envs.close()
    assert wait(bench.alive()) == []


def test_one_seed_is_one_run(bench: Bench) -> None:
    """Whichever instance is ready first."""
    runs = []
    for _ in range(2):
        envs = AenvVectorEnv(bench.env("short", arguments=["2"]), 4, autoreset_mode=AutoresetMode.SAME_STEP)
        envs.reset(seed=5)
        envs.action_space.seed(5)
        runs.append([envs.step(envs.action_space.sample())[0]["place"] for _ in range(6)])
        envs.close()
    assert same(tuple(runs[0]), tuple(runs[1]))


def test_what_blocks_is_not_called_where_it_waits(bench: Bench) -> None:
    async def wrong() -> None:
        wait(asyncio.sleep(0))

    with pytest.raises(RuntimeError, match="use Environment there"):
        wait(wrong())


def test_what_fails_again_and_again_is_raised(bench: Bench) -> None:
    made = len(bench.made)
    with pytest.raises(AEnvError, match="division by zero"):
        AenvEnv(bench.env("broken"), retries=2)
    assert len(bench.made) == made
    with pytest.raises(AEnvError, match="division by zero"):
        AenvVectorEnv(bench.env("broken"), 2, retries=0)
    assert wait(bench.alive()) == []
