"""Who may save and load, when, and how much."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import msgspec
import pytest
import pytest_asyncio

from aenv import Environment, http, project
from aenv.client import mcp
from aenv.engines.base import new_id
from aenv.engines.specs import complete
from aenv.errors import Conflict, TooLarge, Unsupported
from aenv.models import EnvRef, Sandbox, SandboxSpec
from aenv.rl import Episode, Rules, Task, rollout
from aenv.runtime.tokens import agent_token, digest, new_owner_token
from tests.engines.process.lab import eventually
from tests.rl.bench import Bench
from tests.runtime.saving.support import PAIR, load, put, run, saved, saves, told, written

pytestmark = pytest.mark.asyncio(loop_scope="module")


async def test_an_agent_may_neither_save_nor_load(victim: tuple[Environment, bytes]) -> None:
    env, content = victim
    sandbox = await env._ready()
    assert sandbox.token is not None
    for token, status in ((agent_token(digest(sandbox.token)), 403), ("wrong", 401), ("", 401)):
        headers = f"Authorization: Bearer {token}\r\n".encode() if token else b""
        for method in ("GET", "PUT"):
            answer = await http.request(method, sandbox.url, "/state", headers=headers, body=content, retries=0)
            assert answer.status == status
            told(answer)
    assert await env.call_reward() == 4.0


@asynccontextmanager
async def waiting(env: Environment) -> AsyncIterator[None]:
    """A call is under way for the length of a block."""
    call = asyncio.create_task(env.call_tool("wait"))
    await eventually("the call", lambda: _is_there(env, "/tmp/waiting"))
    try:
        yield
    finally:
        call.cancel()
        await asyncio.wait((call,))


async def _is_there(env: Environment, path: str) -> bool:
    """Asked as a health check, which alone is no call."""
    return bool((await env.check_health({"path": path}))["there"])


async def test_nothing_is_saved_or_loaded_while_a_call_is_under_way(
    bench: Bench, victim: tuple[Environment, bytes]
) -> None:
    async with bench.env("box") as env:
        async with waiting(env):
            for answer in (await env._fetch("/state"), await put(env, victim[1])):
                error = told(answer)
                assert type(error) is Conflict
                assert error.message == "calls under way: 1"
        await eventually("the end of the call", lambda: saves(env))
        await load(env, victim[1])
        assert await env.call_reward() == 4.0


SLOW = """
@register_save
def save() -> dict:
    Path("/tmp/saving").touch()
    while not Path("/tmp/go").exists():
        time.sleep(0.005)
    return state


@register_load
def load(found: dict) -> None:
    state.update(found)
"""


async def _as_an_agent(env: Environment, name: str, arguments: dict[str, Any]) -> None:
    """A call that the client of its own does not know of."""
    sandbox = await env._ready()
    assert sandbox.token is not None
    headers = mcp.headers("tools/call", name) + b"Authorization: Bearer %b\r\n" % (
        agent_token(digest(sandbox.token)).encode()
    )
    body = mcp.message("tools/call", name=name, arguments=arguments)
    answer = await http.request("POST", sandbox.url, "/mcp", headers=headers, body=body, retries=0)
    assert answer.status == 200, answer.body


@pytest.mark.parametrize("how", ["an upload", "a call that is cut", "an agent's call"])
@pytest.mark.parametrize("kept", ["100000000", "0"])
async def test_what_was_called_while_it_was_saved_is_not_saved(
    bench: Bench, how: str, kept: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AENV_JOURNAL", kept)
    name = written(bench, SLOW)
    go = "open('/tmp/go', 'w').close()"
    async with bench.env(name) as env:
        forking = asyncio.create_task(env.fork(2))
        await eventually("the save", lambda: _is_there(env, "/tmp/saving"))
        if how == "an upload":
            await env.upload("/tmp/go", b"")
        else:
            if how == "a call that is cut":
                async with waiting(env):
                    pass
            await _as_an_agent(env, "run", {"code": go})
        with pytest.raises(Conflict, match="it was called while it was saved"):
            await forking
        await eventually("quiet", lambda: saves(env))
        async with await env.fork(1) as (sibling,):
            assert sibling.forked is not None
            assert sibling.forked.how == "saved"
    await bench.empty()


LARGE = "import os; open('/project/large', 'wb').write(os.urandom(200_000)); state['score'] = 2"


@pytest.mark.parametrize("deterministic", [False, True])
async def test_what_is_too_large_to_be_saved_is_brought_by_its_journal_where_it_has_one(
    bench: Bench,
    deterministic: bool,
) -> None:
    name = written(bench, PAIR, deterministic=deterministic)
    async with bench.env(name, seed=1, environment_variables={"AENV_MAX_BODY": "100000"}) as env:
        content = await saved(env)
        await run(env, LARGE.replace("os.urandom(200_000)", "b'x' * 200_000"))
        error = told(await env._fetch("/state"))
        assert (type(error), error.hint) == (TooLarge, "AENV_MAX_BODY sets this limit")
        assert error.message == "its files are over 100000 bytes"
        assert type(told(await put(env, content + b"\0" * 100_000))) is TooLarge
        if not deterministic:
            for act in (env.fork(), env.checkpoint()):
                with pytest.raises(
                    Unsupported,
                    match="does not say that the same calls .*does not say that it is forkable; "
                    "and it cannot be saved: its files are over 100000 bytes",
                ):
                    await act
            return
        async with await env.fork(1) as (sibling,):
            assert sibling.forked is not None
            assert sibling.forked.how == "journal"
            assert await sibling.call_reward() == 2.0
        place = await env.checkpoint()
        await run(env, "state['score'] = 3")
        await env.restore(place)
        assert await env.call_reward() == 2.0
    await bench.empty()


async def test_secrets_are_in_what_is_saved_as_they_are_in_files_and_in_no_message(bench: Bench) -> None:
    name = written(
        bench,
        """
        @register_save
        def save() -> dict:
            if state.get("score") == 9:
                raise Unsupported("no: " + os.environ["KEY"])
            return state | {"said": os.environ["KEY"]}

        @register_load
        def load(found: dict) -> None:
            state.update(found)
        """,
    )
    key = "a-secret-of-some-length"

    def env() -> Environment:
        made = bench.env(name, environment_variables={"KEY": key})
        made.spec = msgspec.structs.replace(made.spec, secrets=["KEY"])
        return made

    async with env() as one, env() as other:
        await run(one, "import os; open('/project/key', 'w').write(os.environ['KEY'] + '!')")
        content = await saved(one)
        assert content.count(key.encode()) == 2
        await load(other, content)
        assert await other.download("key") == await one.download("key") == f"{key}!".encode()
        assert await run(other, f"out = state['said'] == {key[:8]!r} + {key[8:]!r}")
        await run(one, "state['score'] = 9")
        assert told(await one._fetch("/state")).message == "no: ***"


# Sandboxes in other conditions


@pytest_asyncio.fixture(loop_scope="module")
async def warm(bench: Bench) -> AsyncIterator[tuple[Sandbox, str]]:
    id, token = new_id("warm"), new_owner_token()
    spec = SandboxSpec(
        env=EnvRef("box", "1.0.0"), warm=True, owner_token_sha256=digest(token), startup_timeout=60.0, seed=None
    )
    try:
        await bench.engine.create(id, complete(spec, project.read(bench.home / "envs" / "box" / "1.0.0")))
        yield await bench.engine.wait(id, 60), token
    finally:
        await bench.engine.delete(id)


async def test_a_warm_one_is_loaded_once_it_is_an_instance(
    warm: tuple[Sandbox, str], victim: tuple[Environment, bytes]
) -> None:
    sandbox, token = warm

    async def ask(method: str, path: str, body: bytes = b"") -> http.Response:
        headers = f"Authorization: Bearer {token}\r\n".encode()
        return await http.request(method, sandbox.url, path, headers=headers, body=body, retries=0)

    for method in ("GET", "PUT"):
        assert type(told(await ask(method, "/state", victim[1]))) is Conflict
    assert (await ask("POST", "/specialise", b"{}")).status == 200
    assert (await ask("PUT", "/state", victim[1])).status == 200
    assert (await ask("GET", "/files?path=mine")).body == b"mine"
    assert json.loads((await ask("POST", "/task/reward")).body)["data"] == 4.0
    assert (await ask("GET", "/state")).status == 200


# Episodes


async def test_an_episode_that_others_could_reach_does_not_go_back_to_before_they_did(bench: Bench) -> None:
    async def agent(env: Episode, task: Task) -> None:
        await run(env, "state['score'] = 1")
        url = await env.agent_url()
        assert url
        (await bench.family.runtime(bench.engine, env.instance_id or "")).kill()

    found = await rollout(bench.env("box"), agent, rules=Rules(fast_forward=True, retries=0))
    assert found.failure is not None
    assert found.failure.kind == "sandbox_lost"
    assert "an agent was given a way to the tools" in found.failure.reason
