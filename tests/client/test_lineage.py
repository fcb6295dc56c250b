"""Siblings, checkpoints and what is done again, on real sandboxes: the same place, or the first difference in words."""

from __future__ import annotations

import asyncio
import json
import shutil
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from aenv import Environment
from aenv.client.lineage import GROUP, PARENT, Siblings
from aenv.errors import Conflict, Diverged, Invalid, NotFound, SandboxLost, Unsupported
from aenv.http import Response
from aenv.journal import OVERHEAD, Entry, Journal
from tests.engines.process.lab import eventually
from tests.rl.bench import Bench, benches, write_env

COUNTER = """
import asyncio
import random
import threading
import time
from pathlib import Path

from aenv import Context, register_function, register_reset, register_reward, register_tool

state = {"total": 0}


@register_reset
def begin(seed: int | None = None) -> int:
    state["total"] = 0
    return seed or 0


@register_tool
def add(number: int) -> int:
    state["total"] += number
    with open("log.txt", "a") as log:
        log.write(f"{number}\\n")
    return state["total"]


@register_tool
def fail() -> int:
    state["total"] += 100
    raise ValueError("it counts all the same")


@register_tool
def draw() -> float:
    return random.random()


@register_tool(name="look.up/total")
def look() -> int:
    return state["total"]


@register_tool
def who(context: Context) -> str:
    return context.instance_id


@register_tool
async def wait() -> str:
    Path("waiting").touch()
    await asyncio.Event().wait()
    return ""


@register_tool
def hold() -> str:
    threading.Thread(target=time.sleep, args=(1000,), daemon=True, name="clock").start()
    return ""


@register_function
def double() -> dict:
    state["total"] *= 2
    return dict(state)


@register_reward
def total() -> float:
    return float(state["total"])
"""
SAVED = (
    COUNTER.replace("from aenv import", "from aenv import Unsupported, register_load, register_save,")
    + """

@register_save
def save() -> dict:
    if threading.active_count() > 50:
        raise Unsupported("it is crowded")
    return state


@register_load
def load(found: dict) -> None:
    state.update(found)
"""
)
pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def bench() -> AsyncIterator[Bench]:
    async with benches() as found:
        said = {"counter": {"deterministic": True}, "forkable": {"forkable": True}, "careless": {}}
        said["both"] = said["counter"] | said["forkable"]
        said["saving"] = {}
        for name, deploy in said.items():
            write_env(found.home, name, SAVED if name == "saving" else COUNTER)
            config = found.home / "envs" / name / "1.0.0" / "config.json"
            config.write_text(json.dumps({**json.loads(config.read_text()), "deployConfig": deploy}))
        yield found


async def _are(bench: Bench, count: int) -> bool:
    return len(await bench.alive()) == count


async def _played(env: Environment) -> None:
    await env.reset(seed=3)
    await env.call_tool("add", {"number": 2})
    await env.call_tool("fail")
    await env.call_function("double")
    await env.upload("given.txt", "from outside")
    await env.exec("echo more >> log.txt")


either = pytest.mark.parametrize(("name", "how"), [("counter", "journal"), ("forkable", "live"), ("saving", "saved")])


@either
async def test_siblings_have_the_files_and_the_state_of_the_moment_and_go_ways_of_their_own(
    bench: Bench, name: str, how: str
) -> None:
    async with bench.env(name, seed=1, labels={"run": "7"}) as env:
        await _played(env)
        async with await env.fork(3) as siblings:
            assert len({env.instance_id, *(found.instance_id for found in siblings)}) == 4
            for place, sibling in enumerate(siblings):
                assert await sibling.call_reward() == 204.0
                assert await sibling.download("log.txt") == b"2\nmore\n"
                assert await sibling.download("given.txt") == b"from outside"
                assert (await sibling.call_tool("add", {"number": place})).text == str(204 + place)
                assert sibling.forked is not None
                assert (sibling.forked.parent, sibling.forked.place) == (env.instance_id, place)
                assert (sibling.forked.calls, sibling.forked.how) == (6, how)
            assert len({found.forked.group for found in siblings if found.forked}) == 1
            labels = {"run": "7", PARENT: env.instance_id or "", GROUP: siblings[0].forked.group}
            assert {found.id for found in await bench.engine.find(labels)} == {found.instance_id for found in siblings}
            assert await env.call_reward() == 204.0
        assert await bench.alive() == [env.instance_id]
    await bench.empty()


@either
async def test_a_sibling_can_be_forked_again(bench: Bench, name: str, how: str) -> None:
    async with bench.env(name, seed=1) as env:
        await env.call_tool("add", {"number": 1})
        async with await env.fork(1) as (child,):
            await child.call_tool("add", {"number": 10})
            async with await child.fork(2, same_random=True) as grandchildren:
                assert [await found.call_reward() for found in grandchildren] == [11.0, 11.0]
                assert [found.forked.how for found in grandchildren if found.forked] == [how, how]
                drawn = [(await found.call_tool("draw")).text for found in (child, *grandchildren)]
                assert len(set(drawn)) == 1


@either
async def test_siblings_draw_other_numbers_unless_told_not_to_and_the_same_ones_in_another_run(
    bench: Bench, name: str, how: str
) -> None:
    async def drawn(*, same: bool) -> list[str]:
        async with bench.env(name, seed=5) as env:
            await env.call_tool("draw")
            async with await env.fork(2, same_random=same) as siblings:
                return [(await found.call_tool("draw")).text for found in (env, *siblings)]

    assert len(set(await drawn(same=True))) == 1
    others = await drawn(same=False)
    assert len(set(others)) == 3
    assert others == await drawn(same=False)


@either
async def test_forks_one_after_the_other_draw_other_numbers_and_the_same_ones_in_another_run(
    bench: Bench, name: str, how: str
) -> None:
    async def drawn() -> list[str]:
        async with bench.env(name, seed=5) as env:
            found = [env, *(await env.fork(1)), *(await env.fork(1))]
            found += await found[1].fork(1)
            async with Siblings(found[1:]):
                return [(await one.call_tool("draw")).text for one in found]

    first = await drawn()
    assert len(set(first)) == 4
    assert first == await drawn()


@either
async def test_a_checkpoint_is_gone_back_to_as_often_as_one_likes(bench: Bench, name: str, how: str) -> None:
    async with bench.env(name, seed=1) as env:
        await _played(env)
        first = env.instance_id
        place = await env.checkpoint()
        for number in (5, 6):
            assert (await env.call_tool("add", {"number": number})).text == str(204 + number)
            await env.restore(place)
            assert await env.call_reward() == 204.0
            assert await env.download("log.txt") == b"2\nmore\n"
            await env.restore(place)  # what was asked since is forgotten
        assert env.instance_id != first
        wanted = 1 if how == "journal" else 2
        await eventually("those that were replaced to end", lambda: _are(bench, wanted))
        assert env.instance_id in await bench.alive()
        with pytest.raises(NotFound, match="no checkpoint 'other'"):
            await env.restore("other")
    await bench.empty()


async def test_what_cannot_be_forked_as_it_is_is_brought_there_by_its_journal(bench: Bench) -> None:
    async with bench.env("both", seed=1) as env:
        await _played(env)
        await env.call_tool("hold")
        async with await env.fork(2) as siblings:
            assert [await found.call_reward() for found in siblings] == [204.0, 204.0]
            found = siblings[0].forked
            assert found is not None
            assert found.how == "journal"
            assert "a thread runs: clock" in found.why
    async with bench.env("forkable", seed=1) as env:
        await env.call_tool("hold")
        for act in (env.fork(), env.checkpoint()):
            with pytest.raises(Unsupported, match="always come to the same; and its process .* a thread runs: clock"):
                await act
    await bench.empty()


async def test_a_checkpoint_is_gone_back_to_by_its_journal_when_it_cannot_be_forked_any_more(bench: Bench) -> None:
    async with bench.env("both", seed=1) as env:
        await env.call_tool("add", {"number": 1})
        for number in range(14):  # two generations each
            place = await env.checkpoint()
            await env.call_tool("add", {"number": 100})
            await env.restore(place)
            assert await env.call_reward() == 1.0, number
    await bench.empty()


async def test_a_checkpoint_does_not_end_for_want_of_calls(bench: Bench) -> None:
    config = bench.home / "envs" / "forkable" / "1.0.0" / "config.json"
    before = config.read_text()
    told = json.loads(before)
    told["deployConfig"]["timeouts"] = {"idle": "1s"}
    config.write_text(json.dumps(told))
    try:
        async with bench.env("forkable", seed=1) as env:
            await env.call_tool("add", {"number": 1})
            place = await env.checkpoint()
            other = await env.checkpoint()
            async with await env.fork(1) as siblings:
                idle = siblings[0].instance_id
                await eventually("the end of one that nobody calls", lambda: _ended(bench, env, idle or ""))
            await env.restore(place)
            await env.restore(other)
            assert await env.call_reward() == 1.0
    finally:
        config.write_text(before)
    await bench.empty()


async def _ended(bench: Bench, env: Environment, id: str) -> bool:
    await env.call_reward()
    return id not in await bench.alive()


async def test_a_checkpoint_that_has_ended_says_so(bench: Bench) -> None:
    async with bench.env("forkable", seed=1) as env:
        await env.call_tool("add", {"number": 1})
        place = await env.checkpoint()
        (kept,) = set(await bench.alive()) - {env.instance_id}
        await bench.engine.delete(kept)
        with pytest.raises((NotFound, SandboxLost)):
            await env.restore(place)
        assert await env.call_reward() == 1.0
    await bench.empty()


async def test_what_is_forked_while_it_lives_can_be_brought_elsewhere_by_its_journal(bench: Bench) -> None:
    async with bench.env("both", seed=1) as env:
        await env.call_tool("add", {"number": 1})
        async with await env.fork(1, same_random=True) as (child,):
            await child.call_tool("add", {"number": 10})
            await child.call_tool("hold")
            async with await child.fork(1, same_random=True) as (grandchild,):
                assert grandchild.forked is not None
                assert (grandchild.forked.how, await grandchild.call_reward()) == ("journal", 11.0)


async def test_the_first_answer_that_is_not_the_same_is_told_and_nothing_is_left(bench: Bench) -> None:
    async with bench.env("counter", seed=1) as env:
        await env.call_tool("add", {"number": 1})
        await env.call_tool("who")
        place = await env.checkpoint()
        with pytest.raises(Diverged, match="call 2 of 2, tool who, came to something else than before"):
            await env.fork(2)
        with pytest.raises(Diverged, match="tool who"):
            await env.restore(place)
        assert await env.call_reward() == 1.0, "it is where it was"
        assert await bench.alive() == [env.instance_id]
    async with bench.env("counter") as env:
        await env.call_tool("draw")
        with pytest.raises(Diverged, match="tool draw") as told:
            await env.fork()
        assert "needs a seed" in (told.value.hint or "")


async def test_what_cannot_be_repeated_says_why(bench: Bench) -> None:
    async with bench.env("careless") as env:
        with pytest.raises(Unsupported, match="does not say that the same calls always come to the same"):
            await env.fork()
    async with bench.env("counter", seed=1) as env:
        with pytest.raises(Invalid, match="0 siblings"):
            await env.fork(0)
        waiting = asyncio.create_task(env.call_tool("wait"))
        while "waiting" not in (await env.exec("ls")).stdout:
            pass
        for refused in (env.fork(), env.checkpoint(), env.restore("any")):
            with pytest.raises(Conflict, match="calls under way: 1"):
                await refused
        waiting.cancel()
        await asyncio.wait((waiting,))
        with pytest.raises(Unsupported, match="tool wait was cut short, and nobody knows what it did"):
            await env.checkpoint()
    async with bench.env("counter", seed=1) as env:
        await env.agent_url()
        with pytest.raises(Unsupported, match="an agent was given a way to the tools"):
            await env.fork()


async def test_siblings_of_the_blocking_face(bench: Bench) -> None:
    def play() -> list[float]:
        with Environment.sync("counter", seed=1) as env:
            env.call_tool("add", {"number": 4})
            place = env.checkpoint()
            siblings = env.fork(2)
            try:
                found = [sibling.call_reward() for sibling in siblings]
                assert siblings[0].forked is not None
                assert siblings[0].forked.parent == env.instance_id
            finally:
                for sibling in siblings:
                    sibling.release()
            env.call_tool("add", {"number": 4})
            env.restore(place)
            return [*found, env.call_reward()]

    assert await asyncio.to_thread(play) == [4.0, 4.0, 4.0]


async def test_a_journal_is_bounded_and_says_when_it_does_not_tell_all(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AENV_JOURNAL", "4000")
    async with bench.env("counter", seed=1) as env:
        for number in range(20):
            await env.call_tool("add", {"number": number})
        assert env.journal.entries == [], "what does not tell all is of no use"
        with pytest.raises(Unsupported, match="AENV_JOURNAL is 4000 bytes"):
            await env.fork()
    monkeypatch.setenv("AENV_JOURNAL", "0")
    async with bench.env("counter", seed=1) as env:
        await env.call_tool("add", {"number": 1})
        assert not env.journal.entries
        with pytest.raises(Unsupported, match="no journal is kept"):
            await env.fork()


async def test_no_token_is_written_down(bench: Bench) -> None:
    async with bench.env("counter", seed=1) as env:
        await env.call_tool("add", {"number": 1})
        assert env.sandbox is not None
        assert env.sandbox.token is not None
        (entry,) = env.journal.entries
        assert env.sandbox.token.encode() not in entry.headers + entry.body


async def test_siblings_know_the_names_that_a_model_was_told(bench: Bench) -> None:
    async with bench.env("counter", seed=1) as env:
        names = {tool["function"]["name"] for tool in await env.list_openai_tools()}
        assert "look_up_total" in names
        async with await env.fork(1) as (sibling,):
            assert not (await sibling.call_tool("look_up_total")).is_error


async def test_a_sibling_of_another_version_is_none(bench: Bench) -> None:
    write_env(bench.home, "moving", COUNTER)
    config = bench.home / "envs" / "moving" / "1.0.0" / "config.json"
    about = {**json.loads(config.read_text()), "deployConfig": {"deterministic": True}}
    config.write_text(json.dumps(about))
    async with bench.env("moving", seed=1) as env:
        await env.call_tool("add", {"number": 1})
        place = await env.checkpoint()
        newer = bench.home / "envs" / "moving" / "2.0.0"
        shutil.copytree(config.parent, newer)
        (newer / "config.json").write_text(json.dumps({**about, "version": "2.0.0"}))
        with pytest.raises(Diverged, match=r"it was moving@1\.0\.0.*, and now it is moving@2\.0\.0"):
            await env.fork(2)
        with pytest.raises(Diverged, match=r"moving@2\.0\.0"):
            await env.restore(place)
        assert await bench.alive() == [env.instance_id]


async def test_who_is_released_while_it_is_restored_has_no_sandbox(bench: Bench) -> None:
    env = bench.env("counter", seed=1)
    await env.call_tool("add", {"number": 1})
    place = await env.checkpoint()
    restoring = asyncio.create_task(env.restore(place))
    while len(await bench.alive()) < 2:
        await asyncio.sleep(0)
    await env.release()
    with pytest.raises(Conflict, match="released or replaced meanwhile"):
        await restoring
    assert env.instance_id is None
    await bench.empty()


async def test_siblings_are_given_back_also_when_that_is_cancelled(bench: Bench) -> None:
    async with bench.env("counter", seed=1) as env:
        siblings = await env.fork(3)
        releasing = asyncio.create_task(siblings.release())
        await asyncio.sleep(0)
        releasing.cancel()
        with pytest.raises(asyncio.CancelledError):
            await releasing
        assert await bench.alive() == [env.instance_id]


async def test_what_is_lost_with_the_instance_is_forgotten_and_what_is_unknown_is_a_gap() -> None:
    journal = Journal(10 * OVERHEAD)
    lost, cut = (Entry(f"tool {name}", "POST", "/mcp", b"", b"{}", None) for name in ("lost", "cut"))
    journal.begin(lost)
    journal.begin(cut)
    waiting = asyncio.create_task(journal.quiet())
    journal.unanswered(lost, harmless=True)
    assert not waiting.done()
    assert journal.answers() == ()
    journal.unanswered(cut, harmless=False)
    await waiting
    with pytest.raises(Unsupported, match="tool cut was cut short"):
        journal.answers()


async def test_what_came_after_a_mark_is_told_where_all_of_it_is_known() -> None:
    journal = Journal(4 * OVERHEAD)
    answer = Response(200, {}, b"{}")

    def asked(name: str) -> Entry:
        entry = Entry(f"tool {name}", "POST", "/mcp", b"", b"{}", None)
        journal.begin(entry)
        return entry

    journal.answered(asked("first"), answer)
    mark = journal.mark
    assert journal.since(mark) == ()
    journal.answered(second := asked("second"), answer)
    assert journal.since(mark) == (second,)
    journal.unanswered(asked("lost"), harmless=True)
    assert journal.since(mark) == (second,)
    journal.unanswered(asked("cut"), harmless=False)
    with pytest.raises(Unsupported, match="cut short"):
        journal.since(mark)
    after = journal.mark
    assert journal.since(after) == ()
    journal.answered(asked("more"), answer)
    with pytest.raises(Unsupported, match="does not tell all"):
        journal.since(after)
    journal.miss("an agent has a way of its own", unseen=True)
    with pytest.raises(Unsupported, match="a way of its own"):
        journal.since(journal.mark)
