"""What becomes of a fork, a checkpoint and a way back when the environment is released meanwhile: nothing that is
somewhere else, and no sandbox in what was released."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import msgspec
import pytest
import pytest_asyncio

from aenv import Environment
from aenv.errors import Conflict, StartFailed, Unsupported
from aenv.models import Sandbox, SandboxSpec
from tests.rl.bench import Bench, benches, write_env

COUNTER = """
from aenv import register_tool

state = {"total": 0}


@register_tool
def add(number: int) -> int:
    state["total"] += number
    return state["total"]
"""
SAVED = f"""{COUNTER.replace("import", "import register_load, register_save,")}

@register_save
def save() -> dict:
    return state


@register_load
def load(found: dict) -> None:
    state.update(found)
"""
pytestmark = pytest.mark.asyncio(loop_scope="module")
every = pytest.mark.parametrize("name", ["counter", "forkable", "saving", "both"])


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def bench() -> AsyncIterator[Bench]:
    async with benches() as found:
        says = {"counter": {"deterministic": True}, "forkable": {"forkable": True}, "saving": {}}
        for name, deploy in (says | {"both": says["counter"] | says["forkable"]}).items():
            write_env(found.home, name, SAVED if name == "saving" else COUNTER)
            config = found.home / "envs" / name / "1.0.0" / "config.json"
            config.write_text(json.dumps({**json.loads(config.read_text()), "deployConfig": deploy}))
        yield found


class Ending:
    """A provision whose next fork comes too late: what it is to be a fork of is released before it is there."""

    def __init__(self, bench: Bench) -> None:
        self.bench = bench
        self.released: Environment | None = None
        """What is released then."""

    @asynccontextmanager
    async def __call__(self, spec: SandboxSpec) -> AsyncIterator[Sandbox]:
        if spec.forked_from and self.released is not None:
            env, self.released = self.released, None
            await env.release()
            raise StartFailed("it did not start: it ended")
        async with self.bench(spec) as sandbox:
            yield sandbox

    def env(self, name: str) -> Environment:
        return Environment(name, provision=self, startup_timeout=60.0, seed=1)


@every
@pytest.mark.parametrize("what", ["fork", "checkpoint"])
@pytest.mark.parametrize("known", [True, False])
async def test_who_is_released_meanwhile_is_neither_forked_nor_kept_nor_started_anew(
    bench: Bench, name: str, what: str, known: bool
) -> None:
    for turns in range(1, 5):
        env = bench.env(name, seed=1)
        await env.call_tool("add", {"number": 41})
        if known:
            await env._says("forkable")  # so that this is not what it is released in
        asked = asyncio.create_task(env.fork(2) if what == "fork" else env.checkpoint())
        for _ in range(turns):
            await asyncio.sleep(0)
        done = asked.done()  # a place that is only written down, and of which all is known here
        await env.release()
        if not done:
            with pytest.raises(Conflict, match="released or replaced meanwhile"):
                await asked
        assert env.sandbox is None
        assert not env._checkpoints
        await bench.empty()


@pytest.mark.parametrize("name", ["forkable", "both"])
@pytest.mark.parametrize("what", ["fork", "checkpoint"])
async def test_a_fork_that_fails_by_that_is_not_made_by_other_means(bench: Bench, name: str, what: str) -> None:
    ending = Ending(bench)
    env = ending.released = ending.env(name)
    await env.call_tool("add", {"number": 41})
    with pytest.raises(Conflict, match="released or replaced meanwhile"):
        await (env.fork(1) if what == "fork" else env.checkpoint())
    assert env.sandbox is None
    await bench.empty()


async def test_who_is_released_while_a_fork_brings_it_back_has_no_sandbox(bench: Bench) -> None:
    ending = Ending(bench)
    env = ending.env("both")
    await env.call_tool("add", {"number": 41})
    place = await env.checkpoint()
    ending.released = env
    with pytest.raises(Conflict, match="released or replaced meanwhile"):
        await env.restore(place)
    assert env.sandbox is None
    await bench.empty()


async def test_a_checkpoint_that_was_given_back_is_nothing_at_its_beginning(bench: Bench) -> None:
    async with bench.env("forkable", seed=1) as env:
        await env.call_tool("add", {"number": 41})
        place = await env.checkpoint()
        fork = env._checkpoints[place].fork
        assert fork is not None
        await fork.release()
        with pytest.raises(Conflict, match="released"):
            await env.restore(place)
        assert (await env.call_tool("add", {"number": 0})).text == "41"
    await bench.empty()


async def test_what_has_no_name_is_not_forked_by_it(bench: Bench) -> None:
    class Nameless(Ending):
        @asynccontextmanager
        async def __call__(self, spec: SandboxSpec) -> AsyncIterator[Sandbox]:
            async with self.bench(spec) as sandbox:
                yield msgspec.structs.replace(sandbox, id="")

    async with Nameless(bench).env("forkable") as env:
        with pytest.raises(Unsupported, match="no name by which it could be forked"):
            await env.fork(1)
    await bench.empty()
