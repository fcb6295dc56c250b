"""What is lost on a platform, and what only says so: a checkpoint whose fork has ended, a sandbox that lives."""

from __future__ import annotations

import asyncio
import json
import sys
import textwrap
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager

import pytest

from aenv import Environment, SandboxLost
from aenv.client import handle
from aenv.client import platform as remote
from aenv.client.api import ApiClient
from aenv.client.hub import HubClient
from aenv.control import key_for
from aenv.errors import Conflict, Unsupported
from aenv.models import EnvRef, Sandbox, SandboxSpec
from aenv.project import read
from aenv.project.archive import pack
from aenv.rl import Episode, Rules, Scored, Task, rollout
from aenv.wire import EnvRequest
from tests.client.planes import Asked, failed, ok, plane
from tests.platform.support import Platform, platform

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="sandboxes of the process engine are Linux processes")
COUNTER = {
    "config.json": json.dumps(
        {"name": "counter", "version": "1.0.0", "deployConfig": {"forkable": True, "deterministic": True}}
    ),
    "src/counter.py": textwrap.dedent(
        """
        import os

        from aenv import SandboxLost, register_function, register_reward, register_tool

        state = {"total": 0}


        @register_tool
        def add(number: int) -> int:
            state["total"] += number
            return state["total"]


        @register_function
        def lose(number: int) -> int:
            state["total"] += number
            raise SandboxLost("the inner one is gone")


        @register_function
        def leave() -> None:
            os._exit(7)


        @register_reward
        def total() -> float:
            return float(state["total"])
        """
    ),
}


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Platform]:
    folder = tmp_path_factory.mktemp("projects") / "counter"
    for name, text in COUNTER.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    with platform() as found:

        async def push() -> None:
            hub = HubClient(found.control, found.token)
            await hub.create(EnvRequest(name="counter", version="1.0.0"))
            await hub.upload("counter", "1.0.0", pack(read(folder)))
            await hub.release("counter", "1.0.0")

        asyncio.run(push())
        yield found


@pytest.fixture(autouse=True)
def user(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """This process is one of the platform's user, on a machine that is too busy for the usual patience."""
    monkeypatch.setattr(handle, "NEWS", 30.0)
    monkeypatch.setattr(handle, "ASKING", 40.0)
    if "site" in request.fixturenames:
        site: Platform = request.getfixturevalue("site")
        for name in ("AENV_HUB_URL", "AENV_API_KEY", "DUMMY_INSTANCE_IP"):
            monkeypatch.delenv(name, raising=False)
        monkeypatch.setenv("AENV_HOME", str(site.home))
        monkeypatch.setenv("AENV_SYSTEM_URL", site.control)


@pytest.fixture
def relayed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Calls pass through the gateway."""

    async def never(instance: object) -> bool:
        return False

    monkeypatch.setattr(remote, "_is_here", never)


async def test_a_checkpoint_whose_fork_has_ended_is_gone_back_to_by_its_journal(site: Platform) -> None:
    async with Environment("counter", seed=1) as env:
        await env.call_tool("add", {"number": 1})
        place = await env.checkpoint()
        fork = env._checkpoints[place].fork
        assert fork is not None
        await ApiClient(site.control, key_for(site.control)).delete(fork.instance_id or "")
        await env.call_tool("add", {"number": 100})
        await env.restore(place)
        assert await env.call_reward() == 1.0


async def test_what_is_to_be_a_fork_of_what_has_ended_is_lost_with_that(site: Platform) -> None:
    async with Environment("counter", seed=1) as env:
        assert env.instance_id is not None
        provision = remote.Platform(site.control)
        spec = SandboxSpec(env=EnvRef("counter"), forked_from=env.instance_id, startup_timeout=60.0)
        await ApiClient(site.control, key_for(site.control)).delete(env.instance_id)
        with pytest.raises(SandboxLost, match="is gone"):
            async with provision(spec):
                pass


async def test_a_refusal_of_a_fork_of_what_lives_stays_one() -> None:
    async def answer(asked: Asked) -> tuple[int, object]:
        if asked.method == "POST":
            return failed(409, "conflict", "it was called while it was forked")
        return ok({"id": "one", "env": {"id": "counter@1.0.0"}, "status": "Running"})

    async with plane(answer) as found:
        spec = SandboxSpec(env=EnvRef("counter"), forked_from="one", startup_timeout=60.0)
        with pytest.raises(Conflict, match="called while it was forked"):
            async with remote.Platform(found.url)(spec):
                pass
        assert found.count("GET /env-instance/one") == 1


@pytest.mark.usefixtures("relayed")
async def test_what_says_that_something_is_lost_and_lives_is_a_gap(
    site: Platform, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(handle, "NEWS", 0.0)  # there are none
    async with Environment("counter", seed=1) as env:
        assert env.sandbox is not None
        assert env.sandbox.relayed
        await env.call_tool("add", {"number": 1})
        with pytest.raises(SandboxLost, match="the inner one is gone"):
            await env.call_function("lose", {"number": 5})
        assert await env.call_reward() == 6.0, "it lives"
        with pytest.raises(Unsupported, match="function lose was cut short"):
            env.journal.answers()


@pytest.mark.usefixtures("relayed")
async def test_what_is_lost_is_forgotten_with_all_that_was_done(site: Platform) -> None:
    async with Environment("counter", seed=1) as env:
        await env.call_tool("add", {"number": 1})
        with pytest.raises(SandboxLost, match=r"gone.*7"):
            await env.call_function("leave")
        assert [entry.what for entry in env.journal.answers()] == ["tool add"]


@pytest.mark.usefixtures("relayed")
async def test_no_other_sandbox_takes_the_place_of_one_that_lives(
    site: Platform, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(handle, "NEWS", 0.0)

    async def agent(env: Episode, task: Task) -> str | None:
        await env.call_tool("add", {"number": 1})
        before = env.instance_id
        with pytest.raises(SandboxLost, match=r"the inner one is gone$"):
            await env.call_function("lose", {"number": 5})
        assert env.instance_id == before
        return before

    found = await rollout(Environment("counter"), agent, seed=1, rules=Rules(fast_forward=True, retries=0))
    assert found.provenance.forwarded == 0
    assert not isinstance(found.outcome, Scored), "what an agent catches is told all the same"


@pytest.mark.parametrize("lives", [True, False])
async def test_a_gateway_that_says_so_is_believed_where_the_sandbox_does_not_answer(lives: bool) -> None:
    async def answer(asked: Asked) -> tuple[int, object]:
        if asked.path == "/health" and (lives or not found.count("POST /functions/any")):
            return ok({"status": "healthy"})
        return 502, {"success": False, "error": "instance one is gone: nobody is there", "code": "sandbox_lost"}

    @asynccontextmanager
    async def provision(spec: SandboxSpec) -> AsyncIterator[Sandbox]:
        yield Sandbox(id="one", url=found.url, public_url=found.url, env="lab")

    async with plane(answer) as found, Environment("lab", provision=provision, max_retries=0) as env:
        with pytest.raises(SandboxLost, match="nobody is there"):
            await env.call_function("any")
        assert bool(env.journal.gap) is lives
        assert env.journal.entries == []
