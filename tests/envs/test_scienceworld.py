"""ScienceWorld in real instances: its own paths solve all thirty tasks, in one Java process for each instance."""

from __future__ import annotations

import asyncio
import shutil
import uuid
from contextlib import suppress

import psutil
import pytest
import pytest_asyncio

from aenv import AuthorError, Invalid, SandboxLost
from aenv.rl import Task
from tests.envs.benchmarks import needs
from tests.envs.episodes import check_agent_is_kept_out, nop, oracle, rolled
from tests.support import until

pytestmark = [
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.xdist_group("scienceworld"),
    needs("scienceworld"),
    pytest.mark.skipif(shutil.which("java") is None, reason="ScienceWorld needs Java, and this machine has none"),
]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def pair(bench):
    async with bench.env("scienceworld") as one, bench.env("scienceworld") as other:
        yield one, other


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def env(pair):
    return pair[0]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def tasks(env):
    """The first variation of each task."""
    return (await env.call_function("tasks", timeout=300))["tasks"]


async def javas(env):
    """The Java processes in an instance."""
    found = await env.exec("cd /proc; for p in [0-9]*; do grep -qx java $p/comm 2>/dev/null && echo $p; done; true")
    return found.stdout.split()


async def test_the_tasks(env, tasks):
    assert [task["id"] for task in tasks][:4] == ["boil-0", "melt-0", "freeze-0", "change-the-state-of-matter-of-0"]
    assert len({task["id"] for task in tasks}) == 30
    assert "boil water" in Task.of(tasks[0]).instruction
    found = await env.call_function("tasks", {"domain": "boil", "split": "test"}, timeout=300)
    assert found["source"] == {"name": "scienceworld", "version": "1.2.3"}
    assert [task["id"] for task in found["tasks"]] == [f"boil-{number}" for number in range(21, 30)]
    dev = await env.call_function("tasks", {"domain": "boil", "split": "dev", "size": 2}, timeout=300)
    assert [task["id"] for task in dev["tasks"]] == ["boil-14", "boil-15"]
    for task in found["tasks"]:
        assert set(task) == {"id", "instruction", "system", "tools", "reset", "metadata"}


async def test_the_oracle_solves_all_and_nop_none(pair, tasks):
    async def half(env, part):
        found = {}
        for task in part:
            before = await nop(env, task)
            after = await oracle(env, task)
            if after["score"] != 1.0:  # the simulator draws without a seed, and its own path may end elsewhere
                after = await oracle(env, task)
            found[task["id"]] = (before["points"], after)
        return found

    halves = await asyncio.gather(half(pair[0], tasks[::2]), half(pair[1], tasks[1::2]))
    found = halves[0] | halves[1]
    assert {before for before, _ in found.values()} == {0}
    assert {name: after for name, (_, after) in found.items() if after["score"] != 1.0} == {}
    assert len(found) == 30
    assert all(after["completed"] and not after["failed"] for _, after in found.values())


async def test_an_episode(env):
    assert "This room is called" in await env.reset(1, {"task": "find-living-thing-0"})
    assert sorted(tool["name"] for tool in await env.list_tools()) == [
        *("scienceworld/act", "scienceworld/actions", "scienceworld/inventory", "scienceworld/look")
    ]
    assert "This room is called" in (await env.call_tool("look")).text
    assert "orange" in (await env.call_tool("inventory")).text
    offered = (await env.call_tool("actions")).structured
    assert "focus on OBJ" in offered["actions"]
    seen = (await env.call_tool("act", {"action": "dance"})).structured
    assert seen["done"] is False
    assert "No known action" in seen["observation"]


async def test_a_task_that_is_failed_scores_nothing_and_is_over(env):
    await env.reset(1, {"task": "find-living-thing-0"})
    for action in ("look around", "focus on picture", "focus on air", "focus on agent"):
        seen = (await env.call_tool("act", {"action": action})).structured
        if seen["done"]:
            break
    assert seen["done"] is True
    found = await env.call_reward()
    assert (found["score"], found["points"], found["failed"]) == (0.0, -100, True)
    again = (await env.call_tool("act", {"action": "look around"})).structured
    assert again == {"observation": "The task is over, and nothing more can be done in it.", "done": True}
    await env.reset(1, {"task": "find-living-thing-0"})
    assert (await env.call_reward())["points"] == 0


async def test_nothing_is_left_of_an_earlier_episode(env):
    first = await env.reset(1, {"task": "boil-0"})
    for action in ("open door to kitchen", "go to kitchen"):
        await env.call_tool("act", {"action": action})
    assert (await env.call_tool("look")).text != first
    assert await env.reset(1, {"task": "boil-0"}) == first
    assert (await env.call_reward())["moves"] == 0
    assert "door to the kitchen (that is closed)" in (await env.call_tool("look")).text


async def test_the_way_to_solve_it_is_told_only_before_the_first_action(env):
    first = await env.reset(1, {"task": "boil-0"})
    gold = await env.call_function("solution", {"task": "boil-0"}, timeout=300)
    assert gold
    await env.call_function("tasks", {"domain": "melt", "size": 1})
    assert (await env.call_tool("look")).text.split() == first.split()
    await env.call_tool("act", gold[0]["arguments"])
    for call in (
        env.call_function("solution", {"task": "boil-0"}),
        env.call_function("tasks", {"domain": "melt", "size": 1}),
    ):
        with pytest.raises(Invalid, match="is being played"):
            await call
    assert (await env.call_reward())["moves"] == 1


async def test_what_is_unknown_is_said(env):
    for call in (
        env.reset(1, {"task": "boyl-0"}),
        env.call_function("tasks", {"domain": "boyl"}),
        env.call_function("solution", {"task": "boyl-0"}),
    ):
        with pytest.raises(Invalid) as caught:
            await call
        assert "'boil'" in caught.value.hint
    for task in ("boil", "boil-x", "boil-99999", "boil--1", ""):
        with pytest.raises(Invalid):
            await env.reset(1, {"task": task})


async def test_java_starts_with_the_first_task_stays_and_ends_with_the_instance(bench):
    mark = uuid.uuid4().hex

    def on_this_machine():
        found = []
        for process in psutil.process_iter():
            with suppress(psutil.Error):
                if process.name() == "java" and process.environ().get("MARK") == mark:
                    found.append(process)
        return found

    async with bench.env("scienceworld", environment_variables={"MARK": mark}) as env:
        assert await javas(env) == []
        assert (await env.call_tool("look")).is_error
        await env.reset(1, {"task": "boil-0"})
        (first,) = await javas(env)
        await env.reset(1, {"task": "melt-0"})
        assert await javas(env) == [first]
        assert len(on_this_machine()) == 1

        await env.exec(f"kill -9 {first}")
        for call in (env.call_tool("look"), env.call_reward()):
            with pytest.raises(SandboxLost, match="the simulator ended"):
                await call
        assert "This room is called" in await env.reset(1, {"task": "boil-0"})
        assert len(on_this_machine()) == 1
    await until(lambda: not on_this_machine(), "the end of Java")


async def test_where_there_is_no_java_it_is_said(bench):
    async with bench.env("scienceworld", environment_variables={"PATH": "/nowhere"}) as env:
        with pytest.raises(AuthorError, match="runs on Java, and there is none here: install"):
            await env.reset(1, {"task": "boil-0"})


async def test_rollouts_play_them_and_their_agents_are_kept_out(bench, env):
    listed = (await env.call_function("tasks", {"domain": "find-animal", "size": 4}, timeout=300))["tasks"]
    assert sorted(await rolled(bench, "scienceworld", listed)) == [task["id"] for task in listed]
    await check_agent_is_kept_out(env, listed[0])
