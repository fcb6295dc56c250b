"""``Environment`` and the clients against a real platform: ``aenv serve`` in a process of its own."""

from __future__ import annotations

import asyncio
import json
import sys
import textwrap
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from aenv import Environment, NotFound, SandboxLost, StartFailed, Unauthorized, attach, control, http
from aenv.client import handle
from aenv.client import leases as leasing
from aenv.client import platform as remote
from aenv.client.api import ApiClient
from aenv.client.hub import HubClient
from aenv.client.lineage import GROUP, PARENT
from aenv.control import key_for
from aenv.errors import Conflict, Forbidden, Invalid
from aenv.models import EnvRef
from aenv.project import read
from aenv.project.archive import pack
from aenv.wire import EnvRequest, Exec, InstanceRequest, Status
from tests.platform.support import Platform, platform
from tests.support import until

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="sandboxes of the process engine are Linux processes")

MOODY = {
    "config.json": json.dumps(
        {"name": "moody", "version": "1.0.0", "tags": ["test"], "deployConfig": {"deterministic": True}}
    ),
    "README.md": "# Moody\n",
    "src/moody.py": textwrap.dedent(
        '''
        """An environment that starts as it is told to."""

        import asyncio
        import os
        import time

        from aenv import Context, register_reset, register_reward, register_setup, register_tool


        @register_setup
        def wake(ctx: Context) -> None:
            mood = os.environ.get("MOOD", "good")
            print(f"waking up in a {mood} mood", flush=True)
            if mood == "bad":
                raise RuntimeError("not today")
            if mood == "slow":
                time.sleep(600)


        @register_reset
        def again(seed: int | None = None) -> dict[str, int | None]:
            return {"seed": seed}


        @register_tool
        def add(a: int, b: int = 2) -> int:
            """Add two numbers."""
            return a + b


        @register_tool
        async def nap(seconds: float) -> str:
            """Sleep for a while."""
            print("napping", flush=True)
            await asyncio.sleep(seconds)
            return "awake"


        @register_tool
        def leave() -> None:
            """End the sandbox."""
            os._exit(7)


        @register_reward
        def score(answer: str) -> float:
            return float(answer == "42")
        '''
    ),
}


FORKING = {
    "config.json": json.dumps({"name": "forking", "version": "1.0.0", "deployConfig": {"forkable": True}}),
    "src/forking.py": textwrap.dedent(
        """
        from aenv import register_tool

        state = {"total": 0}


        @register_tool
        def add(a: int) -> int:
            state["total"] += a
            return state["total"]
        """
    ),
}

SAVING = {
    "config.json": json.dumps({"name": "saving", "version": "1.0.0"}),
    "src/saving.py": FORKING["src/forking.py"].replace(
        "import register_tool", "import register_load, register_save, register_tool"
    )
    + textwrap.dedent(
        """

        @register_save
        def save() -> bytes:
            return str(state["total"]).encode()


        @register_load
        def load(content: bytes) -> None:
            state["total"] = int(content)
        """
    ),
}


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Platform]:
    """A platform with these environments."""
    projects = {"moody": MOODY, "forking": FORKING, "saving": SAVING}
    folder = tmp_path_factory.mktemp("projects")
    for project, files in projects.items():
        for name, text in files.items():
            (folder / project / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / project / name).write_text(text)
    with platform() as found:

        async def push() -> None:
            hub = HubClient(found.control, found.token)
            for name in projects:
                await hub.create(EnvRequest(name=name, version="1.0.0", tags=["test"]))
                await hub.upload(name, "1.0.0", pack(read(folder / name)))
                await hub.release(name, "1.0.0")

        asyncio.run(push())
        yield found


@pytest.fixture(autouse=True)
def user(site: Platform, monkeypatch: pytest.MonkeyPatch) -> None:
    """This process is one of the platform's user."""
    for name in ("AENV_HUB_URL", "AENV_API_KEY", "DUMMY_INSTANCE_IP"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AENV_HOME", str(site.home))
    monkeypatch.setenv("AENV_SYSTEM_URL", site.control)


@pytest.fixture(params=["straight", "gateway"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """How calls reach a sandbox."""
    if request.param == "gateway":

        async def never(instance: object) -> bool:
            return False

        monkeypatch.setattr(remote, "_is_here", never)
    return str(request.param)


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A client for a machine that is too busy for its usual patience."""
    monkeypatch.setattr(handle, "RESTART", 90.0)
    monkeypatch.setattr(control, "RESTART", 90.0)
    monkeypatch.setattr(handle, "NEWS", 30.0)
    monkeypatch.setattr(handle, "ASKING", 40.0)


def client(site: Platform) -> ApiClient:
    return ApiClient(site.control, key_for(site.control))


async def alive(site: Platform, **labels: str) -> list[str]:
    found, _ = await client(site).list(labels=labels)
    return [instance.id for instance in found if instance.status not in ("Failed", "Terminated")]


async def test_an_episode(site: Platform, way: str) -> None:
    labels = {"test": f"episode-{way}"}
    async with Environment("moody@^1.0", ttl="10m", labels=labels, environment_variables={"COLOUR": "red"}) as env:
        assert env.instance_id is not None
        assert await alive(site, **labels) == [env.instance_id]
        sandbox = env._sandbox
        assert sandbox is not None
        assert sandbox.url.startswith("unix:") is (way == "straight")
        assert {tool["name"] for tool in await env.list_tools()} == {f"moody@^1.0/{n}" for n in ("add", "nap", "leave")}
        assert (await env.call_tool("moody/add", {"a": 1})).text == "3"
        assert (await env.call_tool("add", {"a": "x"})).is_error
        assert await env.call_reward({"answer": "42"}) == 1.0
        assert (await env.exec("echo $COLOUR")).stdout == "red\n"
        await env.upload("notes.txt", b"\0" * 300_000)
        assert await env.download("notes.txt") == b"\0" * 300_000
        assert [call["name"] for call in await env.history(last=1)] == ["/bin/sh"]
        before = (await client(site).get(env.instance_id)).expires_at
        await env.extend("5h")
        assert (await client(site).get(env.instance_id)).expires_at > before
        assert "waking up in a good mood" in [line async for line in env.logs()]
        url = await env.expose(9999)
        assert url.startswith("http://9999-")
        assert await env.wait_for_ready(30)
    assert await alive(site, **labels) == []


async def test_the_agents_url_opens_the_tools_and_nothing_else(site: Platform) -> None:
    async with Environment("moody") as env:
        url = await env.agent_url()
        assert url.startswith(f"{site.data}/env-instance/{env.instance_id}/mcp?token=")
        token = url.partition("?token=")[2]
        base = url.partition("/mcp?")[0]
        agent = Environment("moody", provision=attach(base, token), skip_for_healthy=True)
        assert (await agent.call_tool("add", {"a": 40})).text == "42"
        with pytest.raises(Forbidden):
            await agent.call_reward({"answer": "42"})
        assert (await http.request("POST", base, f"/mcp?token={token}", body=b"{}")).status != 401
        assert (await http.request("POST", base, "/mcp", body=b"{}")).status == 401


def test_the_blocking_face(site: Platform) -> None:
    with Environment.sync("moody") as env:
        assert env.call_tool("add", {"a": 1}).text == "3"
        assert env.expose(80).startswith("http://80-")


@pytest.mark.usefixtures("patient")
async def test_a_sandbox_that_ends_says_why(site: Platform, way: str) -> None:
    async with Environment("moody") as env:
        with pytest.raises(SandboxLost, match="gone.*7"):
            await env.call_tool("leave")
        with pytest.raises(SandboxLost, match="gone"):
            await env.call_tool("add", {"a": 1})


async def test_a_deleted_instance_is_lost(site: Platform, way: str) -> None:
    async with Environment("moody") as env:
        assert env.instance_id is not None
        await client(site).delete(env.instance_id)
        with pytest.raises(SandboxLost, match="deleted"):
            await env.call_tool("add", {"a": 1})


async def test_starts_that_fail_leave_nothing(site: Platform) -> None:
    bad = {"test": "bad"}
    with pytest.raises(StartFailed, match="not today"):
        async with Environment("moody", labels=bad, environment_variables={"MOOD": "bad"}):
            pass
    slow = {"test": "slow"}
    with pytest.raises(StartFailed, match=r"(?s)moody@1.0.0 \(moody-.* the time went to: .* s engine"):
        await Environment(
            "moody", labels=slow, environment_variables={"MOOD": "slow"}, startup_timeout=0.5
        ).initialize()
    cancelled = {"test": "cancelled"}
    opening = asyncio.create_task(
        Environment("moody", labels=cancelled, environment_variables={"MOOD": "slow"}).initialize()
    )
    async with asyncio.timeout(60):
        while not await alive(site, **cancelled):
            await asyncio.sleep(0.05)
    opening.cancel()
    with pytest.raises(asyncio.CancelledError):
        await opening
    for labels in (bad, slow, cancelled):
        assert await alive(site, **labels) == []
    with pytest.raises(NotFound, match="mody") as caught:
        await Environment("mody").initialize()
    assert "moody" in (caught.value.hint or "")


async def test_attaching_to_an_instance(site: Platform) -> None:
    api = client(site)
    made = await api.create(InstanceRequest(env_name="moody"), wait=60)
    async with Environment(instance_id=made.id) as env:
        assert (await env.list_tools())[0]["name"].startswith("moody@1.0.0/")
        assert (await env.call_tool("add", {"a": 1})).text == "3"
    assert (await api.get(made.id)).status == "Running"
    await api.delete(made.id)
    with pytest.raises(SandboxLost, match="Terminated"):
        await Environment(instance_id=made.id).initialize()


async def test_whoever_has_no_token_is_refused(site: Platform, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AENV_HOME", str(tmp_path))
    for key in (None, "not-a-token"):
        with pytest.raises(Unauthorized) as caught:
            await Environment("moody", api_key=key).initialize()
        assert caught.value.hint
    async with Environment("moody", api_key=site.token) as env:
        assert (await env.call_tool("add", {"a": 1})).text == "3"


# Leases


async def test_a_lease_holds_as_long_as_its_client_lives(site: Platform, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote, "LEASE", 6.0)
    monkeypatch.setattr(leasing, "RENEWAL", 0.3)
    monkeypatch.setattr(leasing, "AGAIN", 0.3)
    script = textwrap.dedent(
        """
        import asyncio, os
        from aenv import Environment
        from aenv.client import platform

        platform.LEASE = 6.0

        async def main():
            env = Environment("moody")
            await env.initialize()
            print(env.instance_id, flush=True)
            os._exit(0)

        asyncio.run(main())
        """
    )
    async with Environment("moody") as env:
        assert env.instance_id is not None
        orphan = (await asyncio.to_thread(site.run, script)).strip()
        async with asyncio.timeout(60):
            while (found := await client(site).get(orphan)).status == "Running":
                await asyncio.sleep(0.1)
        assert "client" in found.reason
        assert (await client(site).get(env.instance_id)).status == "Running"
        assert (await env.call_tool("add", {"a": 1})).text == "3"


# The clients themselves


async def test_the_hubs_client(site: Platform, tmp_path: Path) -> None:
    hub = HubClient(site.control, key_for(site.control))
    env = await hub.get(EnvRef("moody", "^1.0"))
    assert (env.id, env.status, [tool.name for tool in env.tools]) == (
        "moody@1.0.0",
        Status.RELEASED,
        ["add", "nap", "leave"],
    )
    package = await hub.download(env)
    assert len(package) == env.size
    found, total = await hub.list(tags=["test"], limit=1)
    assert (found[0].name, total) == ("moody", 1)
    assert [version.version for version in await hub.versions("moody")] == ["1.0.0"]
    assert await hub.exists("moody", "1.0.0")
    assert not await hub.exists("moody", "9.9.9")
    assert (await hub.status("moody", "1.0.0")).title == "Released"
    with pytest.raises(Conflict):
        await hub.create(EnvRequest(name="moody", version="1.0.0"))
    with pytest.raises((Forbidden, Conflict)):
        await hub.upload("moody", "1.0.0", package)
    with pytest.raises(Invalid):
        await hub.create(EnvRequest(name="a/b", version="one"))


async def test_the_apis_client(site: Platform) -> None:
    api = client(site)
    made = await api.create_many(InstanceRequest(env_name="moody", count=2, labels={"test": "many"}), wait=60)
    assert [instance.status for instance in made] == ["Running", "Running"]
    listed, total = await api.list("moody@1.0.0", labels={"test": "many"}, limit=1)
    assert (len(listed), total) == (1, 2)
    id = made[0].id
    assert (await api.exec(id, Exec(command="echo hi"))).stdout == "hi\n"
    await api.upload(id, "a file", b"content")
    assert await api.download(id, "a file") == b"content"
    with pytest.raises(Conflict, match="directory"):
        await api.download(id, ".")
    with pytest.raises(NotFound):
        await api.download(id, "none")
    assert (await api.history(id, 1))[0]["kind"] == "exec"
    assert await api.reset(id, 3) == {"seed": 3}
    assert [line async for line in api.logs(id, tail=1)] == ["waking up in a good mood"]
    following = api.logs(id, follow=True)
    assert await anext(following) == "waking up in a good mood"
    await following.aclose()
    key = "the-same-key"
    first = await api.create(InstanceRequest(env_name="moody"), wait=60, key=key)
    assert (await api.create(InstanceRequest(env_name="moody"), key=key)).id == first.id
    with pytest.raises(Invalid, match="Idempotency-Key"):
        await api.create(InstanceRequest(env_name="moody", seed=1), key=key)
    for instance in (*made, first):
        await api.delete(instance.id)


# A platform that restarts: last, since it ends what others hold open


@asynccontextmanager
async def restarted(site: Platform) -> AsyncIterator[None]:
    """The platform is killed, and started again at the end of the block."""
    await asyncio.to_thread(site.kill)
    try:
        yield
    finally:
        await asyncio.to_thread(site.start)


@pytest.mark.usefixtures("patient")
async def test_a_platform_that_is_killed_and_comes_back_is_not_noticed(site: Platform, way: str) -> None:
    async with Environment("moody", timeout=120, max_retries=100) as env:
        napping = asyncio.create_task(env.call_tool("nap", {"seconds": 1}))
        async with asyncio.timeout(60):
            while "napping" not in [line async for line in env.logs()]:
                await asyncio.sleep(0.02)
        async with restarted(site):
            adding = asyncio.create_task(env.call_tool("add", {"a": 1}))
            await until(lambda: way == "gateway" or adding.done(), "the answer of the sandbox itself")
        assert (await adding).text == "3"
        assert (await napping).text == "awake"
        assert env.instance_id in await alive(site)
    assert env.instance_id not in await alive(site)


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize(("name", "how"), [("forking", "live"), ("saving", "saved")])
async def test_siblings_that_are_forks_of_a_live_instance_or_of_what_it_says(
    site: Platform, name: str, how: str
) -> None:
    async with Environment(name, seed=1) as env:
        await env.call_tool("add", {"a": 1})
        async with await env.fork(2) as siblings:
            assert [found.forked.how for found in siblings if found.forked] == [how, how], siblings[0].forked
            assert [(await one.call_tool("add", {"a": 2})).text for one in siblings] == ["3", "3"]
            listed, _ = await client(site).list(labels={PARENT: env.instance_id or ""})
            assert {one.id for one in listed} == {one.instance_id for one in siblings}
        place = await env.checkpoint()
        await env.call_tool("add", {"a": 100})
        await env.restore(place)
        assert (await env.call_tool("add", {"a": 3})).text == "4"


async def test_forks_are_to_be_had_over_http(site: Platform) -> None:
    async with Environment("forking") as env:
        await env.call_tool("add", {"a": 4})
        headers = (
            f"Authorization: Bearer {site.token}\r\nContent-Type: application/json\r\nPrefer: wait=30\r\n".encode()
        )
        path = f"/env-instance/{env.instance_id}/fork"
        answer = await http.request("POST", site.control, path, headers=headers, body=b'{"count": 2, "ttl": "5m"}')
        made = json.loads(answer.body)["data"]
        assert [one["status"] for one in made] == ["Running", "Running"]
        for one in made:
            async with Environment(instance_id=one["id"]) as fork:
                assert (await fork.call_tool("add", {"a": 1})).text == "5"
            await client(site).delete(one["id"])
    async with Environment("moody") as env:
        refused = await http.request("POST", site.control, f"/env-instance/{env.instance_id}/fork", headers=headers)
        assert refused.status == 501
        assert b"forkable" in refused.body


@pytest.mark.usefixtures("way")
async def test_siblings_are_instances_of_their_owner_and_tell_where_they_come_from(site: Platform) -> None:
    async with Environment("moody", seed=1) as env:
        await env.call_tool("add", {"a": 1})
        async with await env.fork(2) as siblings:
            assert siblings[0].forked is not None
            labels = {PARENT: env.instance_id or "", GROUP: siblings[0].forked.group}
            listed, _ = await client(site).list(labels=labels)
            assert {one.id for one in listed} == {one.instance_id for one in siblings}
            assert [(await one.call_tool("add", {"a": 2})).text for one in siblings] == ["4", "4"]
        place = await env.checkpoint()
        await env.restore(place)
        assert (await env.call_tool("add", {"a": 3})).text == "5"
