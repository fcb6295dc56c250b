"""The tools of an instance as adapters of frameworks have them: what a model does wrong, and what becomes of it."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Iterator
from concurrent import futures
from pathlib import Path
from typing import Any

import pytest

from aenv import CallTimeout, Conflict, Environment, NetworkError, SandboxLost, attach
from aenv.integrations.listening import Listening
from aenv.integrations.toolbox import Toolbox
from aenv.rl import Episode, Rules, Task
from aenv.rl.recording import Over
from tests.support import Sandbox, sandbox, until

CODE = """
import asyncio
from pathlib import Path

from aenv import register_tool


@register_tool(name="count/up")
def count(by: int = 1) -> str:
    return f"up by {by}"


@register_tool
async def wait(file: str) -> str:
    Path(file).touch()
    await asyncio.sleep(600)
    return "late"


@register_tool
def fail() -> str:
    raise ValueError("it cannot be done")
"""


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("project")
    (folder / "tools.py").write_text(CODE)
    return folder


@pytest.fixture(scope="module")
def running(project: Path) -> Iterator[Sandbox]:
    with sandbox(project) as one:
        yield one


@pytest.fixture
def env(running: Sandbox) -> Environment:
    return Environment("any", provision=attach(running.url))


@pytest.fixture
async def tools(env: Environment) -> AsyncIterator[Toolbox]:
    async with env, Toolbox(env) as tools:
        yield tools


async def test_it_offers_what_apis_of_models_allow(tools: Toolbox) -> None:
    assert [offered.name for offered in tools.offered] == ["count_up", "wait", "fail"]
    assert tools.offered[0].parameters["properties"]["by"]["type"] == "integer"
    assert (await tools.call("count_up", {"by": 2})).text == "up by 2"


@pytest.mark.parametrize("given", ["", "  ", "{}", None, {}])
async def test_no_arguments(tools: Toolbox, given: Any) -> None:
    assert (await tools.call("count_up", given)).text == "up by 1"


@pytest.mark.parametrize(
    ("name", "given", "said"),
    [
        ("count_up", '{"by": ', "the arguments of count_up are no JSON object"),
        ("count_up", "[1]", "the arguments of count_up are no JSON object"),
        ("count_up", "null", "the arguments of count_up are no JSON object"),
        ("count_up", "[" * 100_000, "the arguments of count_up are no JSON object"),
        ("count_up", '{"by": "\ud800"}', "the arguments of count_up are no JSON object"),
        ("count_up", {"by": "\ud800"}, "the arguments of count_up cannot be sent"),
        ("count_up", {"by": object()}, "the arguments of count_up cannot be sent"),
        ("count_up", '{"by": "two"}', "argument 'by'"),
        ("count_up", '{"of": 2}', "'of'"),
        ("count up", "{}", "there is no tool 'count up'; did you mean"),
        ("other/count_up", "{}", "there is no tool 'other/count_up'"),
        ("x" * 10_000, "{}", "there is no tool"),
        ("fail", "{}", "it cannot be done"),
    ],
)
async def test_what_a_model_does_wrong_it_is_told(tools: Toolbox, name: str, given: Any, said: str) -> None:
    result = await tools.call(name, given)
    assert result.is_error
    assert said in result.text
    assert len(result.text) < 500
    assert tools.failure is None
    assert (await tools.call("count_up")).text == "up by 1"


async def test_a_lost_instance_ends_the_run_whatever_is_caught(project: Path) -> None:
    with sandbox(project) as lost:
        env = Environment("any", provision=attach(lost.url), max_retries=0)
        tools = Toolbox(env)

        async def run() -> None:
            async with env, tools:
                lost.process.kill()
                lost.process.wait()
                for _ in range(2):
                    with pytest.raises((SandboxLost, NetworkError)):
                        await tools.call("count_up")
                raise RuntimeError("a framework's own words for it")

        with pytest.raises((SandboxLost, NetworkError)) as raised:
            await run()
    assert raised.value is tools.failure
    assert raised.value.__suppress_context__


@pytest.mark.parametrize("error", [asyncio.CancelledError, KeyboardInterrupt])
async def test_what_interrupts_a_run_is_raised_as_it_is(env: Environment, error: type[BaseException]) -> None:
    async def run() -> None:
        async with env, Toolbox(env) as tools:
            tools.failure = SandboxLost("gone")
            raise error

    with pytest.raises(error):
        await run()


async def test_a_call_without_an_answer_is_no_words_for_a_model(env: Environment, tmp_path: Path) -> None:
    env.timeout = 0.2

    async def run() -> None:
        async with env, Toolbox(env) as tools:
            await tools.call("wait", {"file": str(tmp_path / "there")})

    with pytest.raises(CallTimeout):
        await run()


async def test_a_cancelled_run_leaves_nothing_under_way(env: Environment, tmp_path: Path) -> None:
    file = tmp_path / "there"

    async def run() -> None:
        async with Toolbox(env) as tools, asyncio.TaskGroup() as group:
            group.create_task(tools.call("wait", {"file": str(file)}))

    async with env:
        before = asyncio.all_tasks()
        running = asyncio.create_task(run())
        await until(file.exists, "the tool runs")
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
        await until(lambda: asyncio.all_tasks() <= before, "nothing is under way")
        async with Toolbox(env) as tools:
            assert (await tools.call("count_up")).text == "up by 1"


async def test_the_end_of_the_block_cancels_what_a_framework_left(env: Environment, tmp_path: Path) -> None:
    file = tmp_path / "there"
    async with env:
        async with Toolbox(env) as tools:
            left = asyncio.create_task(tools.call("wait", {"file": str(file)}))
            await until(file.exists, "the tool runs")
        assert left.cancelled()
        with pytest.raises(Conflict, match="after the block"):
            await tools.call("count_up")
        with pytest.raises(Conflict, match="after the block"):
            tools.call_blocking("count_up")


async def test_blocking_calls_of_threads(tools: Toolbox) -> None:
    called = [asyncio.to_thread(tools.call_blocking, "count_up", {"by": by}) for by in range(3)]
    assert [result.text for result in await asyncio.gather(*called)] == ["up by 0", "up by 1", "up by 2"]


async def test_the_end_of_the_block_cuts_a_thread_short(env: Environment, tmp_path: Path) -> None:
    file = tmp_path / "there"
    found: list[Any] = []

    def agent(tools: Toolbox) -> None:
        for call in ("wait", "count_up"):
            try:
                found.append(tools.call_blocking(call, {"file": str(file)} if call == "wait" else {}))
            except Exception as exc:  # as frameworks do
                found.append(type(exc))

    async with env:
        async with Toolbox(env) as tools:
            thread = threading.Thread(target=agent, args=(tools,))
            thread.start()
            await until(file.exists, "the tool runs")
        await asyncio.to_thread(thread.join)
    assert found == [futures.CancelledError, Conflict]


class Seen(Episode):
    """An episode that somebody else began."""

    @classmethod
    def of(cls, running: Sandbox, rules: Rules | None = None) -> Seen:
        made = cls("any", provision=attach(running.url))
        made.begin(Task(), rules or Rules(), None)
        return made


def said(text: str, **more: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": text, **more}


async def test_an_episode_keeps_what_is_new_of_what_a_model_hears(running: Sandbox) -> None:
    system, user = {"role": "system", "content": "Be."}, {"role": "user", "content": "Count."}
    heard = {"role": "tool", "tool_call_id": "a", "content": "up by 1"}
    async with Seen.of(running) as episode, Listening(episode) as tools:
        tools.hear([system, user])
        await tools.say(said("One.", more=1), finish_reason="tool_calls")
        assert (await tools.use("count_up", "{}", id="a")).text == "up by 1"
        tools.hear([system, user, said("one, in the framework's words"), heard])
        await tools.say(said("Done."), finish_reason="stop")
        assert episode.messages == [system, user, said("One.", more=1), heard, said("Done.")]
        tools.hear([system, {"role": "user", "content": "What came before, in short."}])
        assert episode.messages[5:] == [system, {"role": "user", "content": "What came before, in short."}]
    assert [(len(turn.calls), turn.generation and turn.generation.finish_reason) for turn in episode.turns] == [
        (1, "tool_calls"),
        (0, "stop"),
    ]
    assert episode.turns[0].calls[0].id == "a"
    assert [tool["function"]["name"] for tool in episode.tools] == ["count_up", "wait", "fail"]


async def test_no_model_is_asked_after_the_last_turn(running: Sandbox) -> None:
    episode = Seen.of(running, Rules(max_turns=1))
    user = {"role": "user", "content": "Count."}

    async def run() -> None:
        async with episode, Listening(episode) as tools:
            tools.hear([user])
            await tools.say(said("One."))
            tools.hear([user, said("One."), user])

    with pytest.raises(Over):
        await run()
    assert episode.messages == [user, said("One.")]


async def test_no_model_hears_of_what_the_platform_failed_at(env: Environment) -> None:
    failure = SandboxLost("gone")

    async def run() -> None:
        async with env, Listening(env) as tools:
            tools.failure = failure
            tools.hear([])

    with pytest.raises(SandboxLost) as raised:
        await run()
    assert raised.value is failure
