"""The built-in miniwob on real instances, with a real browser: its scores, its pictures, and what is left of it."""

from __future__ import annotations

import base64
import struct
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from aenv import Environment, Invalid, SandboxLost
from aenv.rl import Episode, Task, rollouts
from tests.envs.benchmarks import needs
from tests.envs.browsers import needs_browser
from tests.rl.bench import Bench
from tests.support import eventually

pytestmark = [
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.xdist_group("miniwob"),
    needs("miniwob"),
    needs_browser(),
]

SEED = 7
PNG = b"\x89PNG\r\n\x1a\n"


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def env(bench: Bench) -> AsyncIterator[Environment]:
    """One instance for the module, which plays one episode after the other in one browser."""
    async with bench.env("miniwob") as found:
        yield found


async def names(env: Environment) -> list[str]:
    return [task["id"] for task in (await env.call_function("tasks"))["tasks"]]


async def scores(env: Environment, *, gold: bool) -> dict[str, dict[str, Any]]:
    """What every task is scored, by its name."""
    found = {}
    for task in await names(env):
        await env.reset(SEED, {"task": task})
        if gold:
            await solve(env, task)
        found[task] = await env.call_reward()
    return found


async def solve(env: Environment | Episode, task: str, steps: list[dict[str, Any]] | None = None) -> None:
    if steps is None:
        assert isinstance(env, Environment)
        steps = await env.call_function("solution", {"task": task})
    for step in steps:
        result = await env.call_tool(step["name"], step["arguments"])
        assert not result.is_error, (task, step, result.text)


async def picture(env: Environment) -> bytes:
    (block,) = (await env.call_tool("screenshot", {})).content
    assert (block["type"], block["mimeType"]) == ("image", "image/png")
    return base64.b64decode(block["data"])


async def text(env: Environment) -> str:
    return (await env.call_tool("look", {})).text


def browsers() -> set[tuple[int, str]]:
    """The processes of all browsers of this environment on this machine: their ids, and when they were started."""
    found = set()
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if b"/miniwob-" in (process / "cmdline").read_bytes():
                found.add((int(process.name), (process / "stat").read_text().rpartition(")")[2].split()[19]))
        except OSError:
            continue  # it has ended
    return found


# Scores


async def test_scripts_solve_all_and_doing_nothing_solves_none(env: Environment) -> None:
    gold, idle = await scores(env, gold=True), await scores(env, gold=False)
    assert len(gold) == len(idle) == 25
    assert {task: score["score"] for task, score in gold.items() if score["score"] != 1.0} == {}
    assert {task: score["score"] for task, score in idle.items() if score["score"] != 0.0} == {}
    assert not any(score["done"] for score in idle.values())


async def test_a_wrong_answer_ends_the_task_and_there_is_no_second_try(env: Environment) -> None:
    await env.reset(SEED, {"task": "click-test-2"})
    right = await env.call_function("solution")
    elements = (await text(env)).splitlines()
    (wrong,) = [line for line in elements if '"TWO"' in line]
    ref = int(wrong.partition("[")[2].partition("]")[0])
    assert (await env.call_tool("click_element", {"ref": ref})).structured == {"done": True}
    assert await env.call_reward() == {"score": 0.0, "done": True, "raw_reward": -1, "reason": ""}
    for step in ({"name": "click", "arguments": {"x": 80, "y": 105}}, *right):  # START is there, in the middle
        refused = await env.call_tool(step["name"], step["arguments"])
        assert (refused.is_error, refused.text) == (True, "the task is over")
    assert (await env.call_reward())["score"] == 0.0


async def test_a_part_of_the_answer_does_not_pass(env: Environment) -> None:
    await env.reset(SEED, {"task": "click-checkboxes-large"})
    steps = await env.call_function("solution")
    await solve(env, "click-checkboxes-large", steps[1:])  # all boxes but one
    score = await env.call_reward()
    assert 0.0 < score["raw_reward"] < 1.0
    assert score["score"] == 0.0


async def test_rollouts_are_the_same_on_instances_that_play_several_tasks(bench: Bench, env: Environment) -> None:
    async def play(episode: Episode, task: Task) -> str:
        return (await episode.call_tool("look", {})).text

    async def run(reuse: int) -> tuple[dict[str, Any], int]:
        async with rollouts(bench.env("miniwob"), play, listed, seed=SEED, concurrency=2, reuse=reuse) as found:
            played = [one async for one in found]
        assert {one.reward for one in played} == {0.0}
        return {one.task.id: one.answer for one in played}, len({one.provenance.instance for one in played})

    listed = (await env.call_function("tasks"))["tasks"][:4]
    (alone, many), (reused, few) = await run(1), await run(4)
    assert alone == reused
    assert len(set(alone.values())) == many == 4
    assert few < 4


# What is seen


async def test_screenshots_are_pictures_of_the_page(env: Environment) -> None:
    seen = {}
    for task in await names(env):
        await env.reset(SEED, {"task": task})
        seen[task] = await picture(env)
    assert all(shot.startswith(PNG) for shot in seen.values())
    assert {struct.unpack(">II", shot[16:24]) for shot in seen.values()} == {(160, 210)}
    assert len(set(seen.values())) == 25


async def test_the_same_seed_is_the_same_page(env: Environment) -> None:
    async def page(seed: int) -> tuple[Any, str, bytes]:
        observed = await env.reset(seed, {"task": "click-checkboxes"})
        return observed, await text(env), await picture(env)

    first = await page(3)
    await solve(env, "click-checkboxes")
    other = await page(4)
    assert await page(3) == first
    assert all(one != two for one, two in zip(first, other, strict=True))
    assert first[0] == {"goal": first[1].splitlines()[0], "page": first[1]}


async def test_another_instance_shows_the_same_page(bench: Bench, env: Environment) -> None:
    await env.reset(SEED, {"task": "login-user"})
    async with bench.env("miniwob") as other:
        assert await other.reset(SEED, {"task": "login-user"}) == await env.reset(SEED, {"task": "login-user"})
        assert await picture(other) == await picture(env)


# What is done


async def test_a_mouse_and_a_keyboard(env: Environment) -> None:
    await env.reset(SEED, {"task": "enter-text"})
    steps = await env.call_function("solution")
    wanted = steps[1]["arguments"]["text"]
    field = next(line for line in (await text(env)).splitlines() if "input_text" in line)
    x, y = (int(number) for number in field.rpartition(" at ")[2].split(","))
    for name, arguments in (
        ("click", {"x": x, "y": y}),
        ("type_text", {"text": "something else"}),
        ("press_key", {"key": "Control+A"}),
        ("type_text", {"text": wanted + "é!"}),
        ("press_key", {"key": "Backspace"}),
        ("press_key", {"key": "ArrowLeft"}),
        ("press_key", {"key": "Delete"}),
    ):
        result = await env.call_tool(name, arguments)
        assert result.structured == {"done": False}, (name, result.text)
    assert f"value='{wanted}'" in await text(env)
    await solve(env, "enter-text", [{"name": "press_key", "arguments": {"key": key}} for key in ("Tab", "Enter")])
    assert (await env.call_reward())["score"] == 1.0


@pytest.mark.parametrize(
    ("tool", "arguments", "message"),
    [
        ("click", {"x": 240, "y": 20}, "is not on the page"),
        ("drag", {"x": 5, "y": 5, "to_x": 5, "to_y": 210}, "is not on the page"),
        ("click_element", {"ref": 999}, "the element 999 is not on the page"),
        ("select_option", {"ref": 1, "option": "x"}, "is no list to choose from"),
        ("press_key", {"key": "F12"}, "there is no key 'F12'"),
        ("type_text", {"text": "x" * 1001}, "at most 1000"),
    ],
)
async def test_what_cannot_be_done(env: Environment, tool: str, arguments: dict[str, Any], message: str) -> None:
    await env.reset(SEED, {"task": "click-test"})
    result = await env.call_tool(tool, arguments)
    assert result.is_error
    assert message in result.text
    assert (await env.call_reward())["done"] is False


async def test_tools_are_a_mouse_a_keyboard_and_eyes(env: Environment) -> None:
    """Nothing runs a script, and nothing of the owner's is among them."""
    offered = {tool["name"].rpartition("/")[2] for tool in await env.list_tools()}
    hands = {"click", "click_element", "select_option", "drag", "scroll", "type_text", "press_key"}
    assert offered == {"screenshot", "look"} | hands
    await env.reset(SEED, {"task": "enter-text"})
    await solve(env, "enter-text", (await env.call_function("solution"))[:1])
    await env.call_tool("type_text", {"text": "<img src=x onerror='core.endEpisode(1)'>"})
    assert (await env.call_reward())["done"] is False


# Episodes


async def test_nothing_is_left_of_an_episode(env: Environment) -> None:
    await env.reset(SEED, {"task": "click-tab"})
    before = await picture(env), await text(env)
    await solve(env, "click-tab")
    assert (await env.call_reward())["score"] == 1.0
    await env.reset(SEED, {"task": "click-tab"})
    assert (await picture(env), await text(env)) == before
    assert await env.call_reward() == {"score": 0.0, "done": False, "raw_reward": 0, "reason": ""}


async def test_selection_and_what_is_not_there(env: Environment) -> None:
    found = await env.call_function("tasks", {"domain": "drag-box"})
    assert [task["reset"] for task in found["tasks"]] == [{"task": "drag-box"}]
    assert found["source"] == {"name": "miniwob", "version": "1.1.0"}
    with pytest.raises(Invalid, match="there is no task 'drag-bix'"):
        await env.call_function("tasks", {"domain": "drag-bix"})
    with pytest.raises(Invalid, match="there is no task 'click-buton'") as caught:
        await env.reset(SEED, {"task": "click-buton"})
    assert caught.value.hint == "did you mean 'click-button'?"
    with pytest.raises(Invalid, match="no task has begun"):  # and nothing of the last one goes on
        await env.call_reward()
    await env.reset(SEED, {"task": "click-test"})
    with pytest.raises(Invalid, match="'drag-box' is not the task that has begun"):
        await env.call_function("solution", {"task": "drag-box"})


async def test_the_browser_begins_with_the_first_reset_and_ends_with_the_instance(bench: Bench) -> None:
    before = browsers()
    async with bench.env("miniwob") as env:
        await names(env)
        assert not browsers() - before  # neither the instance nor what it was forked from has one
        await env.reset(SEED, {"task": "click-test"})
        first = browsers() - before
        await env.reset(SEED, {"task": "click-link"})
        assert first
        assert min(first) in browsers()  # it is kept
        await env.exec("kill -9 $(pgrep -o -f 'user-data-dir=.*miniwob-')")
        with pytest.raises(SandboxLost, match="the browser ended"):  # no answer that an agent reads
            await env.call_tool("look", {})
        await env.reset(SEED, {"task": "click-test"})
        await solve(env, "click-test")
        assert (await env.call_reward())["score"] == 1.0
        during = browsers() - before
    await eventually("the end of all browsers", lambda: not browsers() & (first | during))
