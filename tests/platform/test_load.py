"""Services under 200 calls a second, of every kind: whatever is done to a service, to its replicas and to the servers,
what may be asked again succeeds, nothing runs twice, and what was answered ran."""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from aenv import Environment, http
from aenv.engines.process import powers
from aenv.errors import NotFound, SandboxLost
from tests.platform.balancer import Replicas, replicas
from tests.platform.load import Counted, Traffic, counted, push
from tests.platform.support import PATIENCE, Platform, ask, eventually, platform
from tests.store.servers import redis_server

pytestmark = [
    pytest.mark.xdist_group("platform-load"),
    pytest.mark.skipif(sys.platform != "linux", reason="sandboxes of the process engine are Linux processes"),
]

FIRST, NEXT, BAD = "1.0.0", "1.1.0", "9.0.0"
Service = dict[str, Any]


@pytest.fixture(scope="module")
def counter() -> Iterator[Counted]:
    with counted() as found:
        yield found


@pytest.fixture(scope="module")
def ground(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Platform]:
    """A platform with what the tests serve. They leave each other's services alone."""
    with platform() as found:
        push(found, tmp_path_factory.mktemp("projects"), FIRST, NEXT, **{BAD: "bad"})
        yield found


@pytest.fixture
def served(ground: Platform) -> Platform:
    """The platform, which runs whatever an earlier test did to it."""
    if not ground.alive:
        ground.start()
    return ground


def make(served: Platform, counter: Counted, **fields: Any) -> Service:
    """A service that runs."""
    wanted = {"envName": f"counted@{FIRST}", "environment_variables": {"COUNTER": str(counter.port)}, **fields}
    found: Service = served.ask("POST", "/env-service", wanted, headers={"Prefer": f"wait={PATIENCE:g}"}).data
    assert found["status"] == "Running", found
    return found


async def change(served: Platform, id: str, **fields: Any) -> None:
    """Have a service otherwise; it is so later."""
    (await asyncio.to_thread(served.ask, "PUT", f"/env-service/{id}", fields)).data  # noqa: B018


async def once(served: Platform, id: str, what: str, holds: Callable[[Service], bool]) -> Service:
    def look() -> Service | None:
        found: Service = served.ask("GET", f"/env-service/{id}").data
        return found if holds(found) else None

    found: Service = await asyncio.to_thread(eventually, what, look, 3 * PATIENCE)
    return found


async def settled(served: Platform, id: str, replicas: int) -> Service:
    """A service of which so many replicas are left, and nothing is under way."""

    def holds(found: Service) -> bool:
        return found["status"] == "Running" and len(ready(found)) == len(found["members"]) == replicas

    return await once(served, id, f"{replicas} replicas", holds)


def ready(found: Service) -> set[str]:
    return {member["id"] for member in found["members"] if member["ready"]}


async def kill_one(served: Platform, id: str, counter: Counted) -> str:
    """Have a replica killed; which it was."""
    before = len(counter.killed)
    reply = await asyncio.to_thread(
        ask, f"{served.data}/env-service/{id}", "POST", "/tools/die", {}, token=served.token
    )
    assert (reply.status, reply.json["code"]) == (502, "network"), reply
    await asyncio.to_thread(eventually, "the end of a replica", lambda: len(counter.killed) > before)
    return counter.killed[-1]


async def delete(served: Platform, id: str) -> None:
    (await asyncio.to_thread(served.ask, "DELETE", f"/env-service/{id}")).data  # noqa: B018


# No call fails


async def test_updates_and_scaling(served: Platform, counter: Counted) -> None:
    service = make(served, counter, replicas=3)
    id = service["id"]
    async with Traffic(served, id, counter) as traffic:
        await change(served, id, version=NEXT)
        updated = await settled(served, id, 3)
        assert not ready(updated) & ready(service)
        now = time.monotonic()
        await traffic.more()
        after = [call for call in traffic.calls.values() if call.began > now]
        assert {call.answer["edition"] for call in after} == {NEXT}
        await change(served, id, environment_variables={"COUNTER": str(counter.port), "SIGN": "new"})
        changed = await settled(served, id, 3)
        now = time.monotonic()
        await change(served, id, replicas=5)
        more = await settled(served, id, 5)
        assert ready(changed) < ready(more)
        await traffic.more()
        await change(served, id, replicas=2)
        fewer = await settled(served, id, 2)
        assert ready(fewer) < ready(more)
        await traffic.more()
    traffic.all_well()
    after = [call for call in traffic.calls.values() if call.began > now]
    assert {call.answer["sign"] for call in after} == {"new"}
    assert {call.answer["replica"] for call in traffic.calls.values()} >= ready(service) | ready(updated) | ready(more)
    await delete(served, id)


async def test_an_update_that_never_becomes_ready_and_two_operators_at_once(served: Platform, counter: Counted) -> None:
    service = make(served, counter, replicas=2)
    id, variables = service["id"], {"COUNTER": str(counter.port)}
    async with Traffic(served, id, counter) as traffic:
        await change(served, id, version=BAD)
        back = await once(served, id, "the way back", lambda found: "was rolled back" in found["reason"])
        assert "not in the mood" in back["reason"]
        back = await settled(served, id, 2)
        assert (ready(back), back["env"]["version"]) == (ready(service), FIRST)
        one = {"version": NEXT, "environment_variables": {**variables, "SIGN": "ada"}}
        other = {"version": FIRST, "environment_variables": {**variables, "SIGN": "bob"}}
        await asyncio.gather(change(served, id, **one), change(served, id, **other))
        done = await settled(served, id, 2)
        now = time.monotonic()
        await traffic.more()
    traffic.all_well()
    wanted = {"version": done["env"]["version"], "environment_variables": done["environment_variables"]}
    assert wanted in (one, other)
    after = {(call.answer["edition"], call.answer["sign"]) for call in traffic.calls.values() if call.began > now}
    assert after == {(wanted["version"], wanted["environment_variables"]["SIGN"])}
    await delete(served, id)


async def test_the_official_client_in_an_update(served: Platform, counter: Counted) -> None:
    """Its session ends by the word that MCP has for that; what was asked in it then did not run."""
    pytest.importorskip("mcp", reason="the extra 'mcp' is not installed")
    from mcp import ClientSession, MCPError
    from mcp.client.streamable_http import streamable_http_client

    service = make(served, counter, replicas=1)
    id, url = service["id"], f"{service['service_url']}/mcp?token={service['agent_token']}"
    done: list[str] = []
    ends: list[str] = []
    enough = asyncio.Event()

    async def talk() -> None:
        """Call, one after the other, until the session is gone."""
        async with streamable_http_client(url) as streams, ClientSession(streams[0], streams[1]) as session:
            await session.initialize()
            while not enough.is_set():
                name = f"official-{len(done)}"
                result = await session.call_tool("count", {"id": name})
                assert not result.is_error, result
                done.append(name)

    async def client() -> None:
        while not enough.is_set():
            try:
                await talk()
            except* MCPError as group:
                ends.append(repr(group))

    async def more() -> None:
        wanted = len(done) + 10
        while len(done) < wanted and not talking.done():
            await asyncio.sleep(0.02)

    async with asyncio.timeout(4 * PATIENCE):
        talking = asyncio.create_task(client())
        await more()
        await change(served, id, environment_variables={"COUNTER": str(counter.port), "SIGN": "new"})
        await settled(served, id, 1)
        await more()
        enough.set()
        await talking
    assert len(ends) == 1, ends
    assert "Session terminated" in ends[0]
    eventually("the counter to hear of all", lambda: set(done) <= counter.ran.keys())
    assert {counter.ran[name] for name in done} == {1}
    await delete(served, id)


# Only what was under way in what is killed may fail


async def test_replicas_killed_and_updated_at_once(served: Platform, counter: Counted) -> None:
    service = make(served, counter, replicas=3)
    id = service["id"]
    async with Traffic(served, id, counter) as traffic:
        dead = {await kill_one(served, id, counter)}
        await once(served, id, "another replica", lambda found: len(ready(found) - dead) == 3)
        await traffic.more()
        await change(served, id, version=NEXT)
        await once(served, id, "a new one", lambda found: any(one["generation"] > 1 for one in found["members"]))
        dead.add(await kill_one(served, id, counter))
        await traffic.more()
        dead.add(await kill_one(served, id, counter))
        again = await settled(served, id, 3)
        now = time.monotonic()
        await traffic.more()
    traffic.lost(now, dead)
    assert again["env"]["version"] == NEXT
    assert not ready(again) & dead
    await delete(served, id)


async def test_a_server_that_ends_or_is_killed_and_comes_back(served: Platform, counter: Counted) -> None:
    """When it ends by itself, calls under way are answered before, and others when it is back: no client hears of it.
    Sessions go on, whoever passes their calls on."""
    service = make(served, counter, replicas=3)
    async with Traffic(served, service["id"], counter) as traffic:
        await traffic.more()
        assert await asyncio.to_thread(served.stop) == 0
        await asyncio.to_thread(served.start)
        await traffic.more()
        traffic.all_well()
        await asyncio.to_thread(served.kill)
        now = time.monotonic()
        await asyncio.to_thread(served.start)
        await traffic.more()
        again = await settled(served, service["id"], 3)
    traffic.lost(now)
    assert ready(again) == ready(service)
    await delete(served, service["id"])


async def test_a_service_deleted_under_traffic(served: Platform, counter: Counted) -> None:
    """Calls end as they would, or with the word that it is gone; none hangs, and none is lost on the way."""
    service = make(served, counter, replicas=2)
    async with Traffic(served, service["id"], counter) as traffic:
        await delete(served, service["id"])
        await traffic.more()
    told = {type(call.error) for call in traffic.failed.values() if not call.is_unknown}
    assert told == {NotFound, SandboxLost}, traffic.failed
    assert all("was deleted" in str(call.error) for call in traffic.failed.values() if not call.is_unknown)
    unheard = {id for id, call in traffic.failed.items() if isinstance(call.error, NotFound)}
    assert not unheard & counter.ran.keys()
    traffic.once_each()


# Two servers


@pytest.fixture(scope="module")
def both(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Replicas]:
    with redis_server(tmp_path_factory.mktemp("redis")) as redis, replicas(redis.url, AENV_GRACE="30") as found:
        push(found, tmp_path_factory.mktemp("projects"), FIRST, NEXT)
        yield found


async def test_an_update_through_one_server_and_calls_through_the_other(both: Replicas, counter: Counted) -> None:
    """The one that looks after the service is killed when half of it is done, and the other one goes on."""
    one, other = both.servers
    service = make(one, counter, replicas=2)
    id = service["id"]
    async with Traffic(both, id, counter, data=f"http://127.0.0.1:{other._ports[1]}") as traffic:
        await change(one, id, version=NEXT)
        await once(
            one, id, "an old one to leave", lambda found: any(m["reason"] == "it leaves" for m in found["members"])
        )
        await traffic.more()
        await asyncio.to_thread(one.kill)
        done = await settled(other, id, 2)
        now = time.monotonic()
        await traffic.more()
    assert {member["env"] for member in done["members"]} == {f"counted@{NEXT}"}
    traffic.lost(now)
    assert {id.rpartition("-")[2] for id in traffic.failed} <= {"by_sdk"}, "only those went through the one"
    await delete(other, id)


# Storage


async def test_storage_that_is_full(served: Platform, counter: Counted) -> None:
    """Who writes is told; the service goes on. What it stored survives an update, a death and its own end."""
    if why := powers.probe().no_volumes:
        pytest.skip(why)
    storage = {"enable_storage": True, "pvc_name": "load", "storage_size": "8Mi"}
    service = make(served, counter, **storage)

    async def call(tool: str, **arguments: Any) -> Any:
        async with Environment(service_id=service["id"], aenv_url=served.control, api_key=served.token) as env:
            return await env.call_tool(tool, arguments)

    assert not (await call("store", name="a", size=1_000_000)).is_error
    full = await call("store", name="b", size=20_000_000)
    assert full.is_error
    assert "No space left" in full.text
    assert not (await call("count", id="with-full-storage")).is_error
    await change(served, service["id"], environment_variables={"COUNTER": str(counter.port), "SIGN": "new"})
    await settled(served, service["id"], 1)
    assert (await call("stored")).structured.keys() == {"a", "b"}
    assert not (await call("drop", name="b")).is_error
    assert not (await call("store", name="c", size=1_000_000)).is_error
    dead = await kill_one(served, service["id"], counter)
    await once(served, service["id"], "another replica", lambda found: ready(found) - {dead} != set())
    kept = {"a": 1_000_000, "c": 1_000_000}
    assert (await call("stored")).structured == kept
    async with Traffic(served, service["id"], counter, sessions=1) as traffic:
        await delete(served, service["id"])
        await traffic.more()
    told = {type(call.error) for call in traffic.failed.values() if not call.is_unknown}
    assert told <= {NotFound, SandboxLost}, traffic.failed
    traffic.once_each()
    service = make(served, counter, **storage)
    assert (await call("stored")).structured == kept
    served.ask("DELETE", f"/env-service/{service['id']}?deleteStorage=true").data  # noqa: B018
    with pytest.raises(SandboxLost, match="it was deleted"):
        await call("stored")
    service = make(served, counter, **storage)
    assert (await call("stored")).structured == {}
    served.ask("DELETE", f"/env-service/{service['id']}?deleteStorage=true").data  # noqa: B018
    await http.close()
