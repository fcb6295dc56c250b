"""Warm pools, with real sandboxes of the process engine: what is taken from them, and what becomes of what waits."""

from __future__ import annotations

import asyncio
import shutil
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest
import pytest_asyncio

from aenv.api import demand, pools
from aenv.api.demand import Demand
from aenv.api.directory import InstanceDirectory
from aenv.api.entry import Entry
from aenv.api.top import Loads
from aenv.auth.callers import Caller, Scope
from aenv.engines.process.engine import ProcessEngine
from aenv.errors import NotFound
from aenv.store import Put
from aenv.wire import Instance, InstanceRequest, Pool, QuotaRequest
from tests.api.ground import ALICE, Api, Platform, Shelf, call, on_processes, service, short_home, until
from tests.store.servers import Server

pytestmark = [
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.skipif(sys.platform != "linux", reason="the process engine needs Linux"),
]

MODULE = """
import os
import random
import sys
from pathlib import Path

from aenv import Context, register_setup, register_tool

AT_IMPORT = {at_import}
seen = []


@register_setup
def prepare() -> None:
    print("setting up", os.environ.get("TOKEN"), flush=True)
    if "BROKEN" in os.environ:
        raise RuntimeError("broken by a variable")
    seen.append(os.environ.get("NAME"))


@register_tool
def about(context: Context) -> dict[str, object]:
    return {{
        "id": context.instance_id,
        "name": os.environ.get("NAME"),
        "told": context.environment_variables.get("NAME"),
        "project": os.environ.get("OF_THE_PROJECT"),
        "token": os.environ.get("TOKEN"),
        "arguments": sys.argv[1:],
        "seed": context.seed,
        "setup": seen,
        "import": AT_IMPORT,
    }}


@register_tool
def mark(text: str) -> list[str]:
    with open("marks", "a") as file:
        file.write(text + "\\n")
    return Path("marks").read_text().split()


@register_tool
def draw() -> float:
    return random.random()
"""
SHARED = MODULE.format(at_import="None")
OWN = MODULE.format(at_import='[os.environ.get("NAME"), sys.argv[1:]]')
BROKEN = "import os\nraise RuntimeError('broken on purpose by ' + os.environ.get('NAME', 'nobody'))\n"
SECRET = "s3cr3t-value"
KEYED = InstanceRequest(env_name="shared", environment_variables={"NAME": "ada"}, seed=3)


def published(shelf: Shelf, home: Path) -> None:
    given = {"OF_THE_PROJECT": "yes"}
    for name, module in (("shared", SHARED), ("own", OWN)):
        shelf.publish(home, name, module=module, pool={"min": 1, "max": 8}, environmentVariables=given)
        shelf.publish(home, f"{name}-secret", module=module, pool={"max": 2}, secrets=["TOKEN"])
    shelf.publish(home, "broken", module=BROKEN, pool={"min": 1, "max": 2})
    shelf.publish(home, "none", module=SHARED)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def platform() -> AsyncIterator[Platform]:
    async with on_processes(published) as running:
        yield running


def waiting(platform: Platform, owner: str) -> list[Entry]:
    found = platform.instances.lives.entries.values()
    return [entry for entry in found if entry.kept.record.warm and entry.kept.record.owner == owner]


def pool_of(platform: Platform, owner: str, env: str) -> Pool | None:
    found = (pool for pool in platform.instances.pools.list() if (pool.owner, pool.env) == (owner, f"{env}@1.0.0"))
    return next(found, None)


async def filled(platform: Platform, owner: str, env: str, ready: int = 1) -> Pool:
    """A pool once so many of it can be taken."""

    def full() -> Pool | None:
        pool = pool_of(platform, owner, env)
        return pool if pool is not None and pool.ready >= ready else None

    found: Pool = await until(full, f"{ready} warm sandboxes of {env}", 60)
    return found


async def make(api: Api, env: str, **more: Any) -> Instance:
    made = (await api.create(env, **more)).instance
    assert made.status == "Running", made.reason
    return made


@pytest.mark.parametrize("env", ["shared", "own"])
async def test_a_create_takes_one_that_waits(platform: Platform, env: str) -> None:
    api = await platform.api(f"taker-of-{env}")
    owner = f"taker-of-{env}"
    first = await make(api, env)
    assert (await filled(platform, owner, env)).claims == 0
    ids = {entry.id for entry in waiting(platform, owner)}
    told = {"environment_variables": {"NAME": "ada"}, "arguments": ["-v", "a b"], "seed": 7, "labels": {"a": "b"}}
    made = await make(api, env, ttl="10m", **told)
    assert made.id in ids
    assert made.labels == {"a": "b"}
    assert (made.ttl, made.owner) == ("600s", owner)
    assert {"engine", "engine.import", "engine.setup"} <= set(made.phases)
    assert await call(made, "about") == {
        "id": made.id,
        "name": "ada",
        "told": "ada",
        "project": "yes",
        "token": None,
        "arguments": ["-v", "a b"],
        "seed": 7,
        "setup": ["ada"],
        "import": ["ada", ["-v", "a b"]] if env == "own" else None,
    }
    assert await call(made, "draw") != await call(first, "draw")
    sandbox = await platform.instances.lives.engine.get(made.id)
    assert sandbox.expires_at is not None
    assert 600 < sandbox.expires_at - sandbox.created_at < 3000
    pool = await filled(platform, owner, env)
    assert (pool.claims, pool.misses) == (1, 1)
    listed = (await api.ask("GET", "/env-instance/list")).json
    assert {each["id"] for each in listed["data"]} == {first.id, made.id}
    await api.ask("DELETE", f"/env-instance/{made.id}")
    assert (await api.ask("GET", f"/env-instance/{made.id}")).instance.status == "Terminated"


async def test_what_does_not_fit_is_made_anew(platform: Platform) -> None:
    api = await platform.api("misfit")
    await make(api, "shared")
    await filled(platform, "misfit", "shared")
    ids = {entry.id for entry in waiting(platform, "misfit")}
    for more in ({"resources": {"memory": "1Gi"}}, {"environment_variables": {"AENV_THREADS": "3"}}):
        assert (await make(api, "shared", **more)).id not in ids
    assert (await make(api, "none")).id not in ids
    assert pool_of(platform, "misfit", "none") is None
    other = await platform.api("somebody-else")
    assert (await make(other, "shared")).id not in ids


@pytest.mark.parametrize("env", ["shared-secret", "own-secret"])
async def test_secrets_are_those_of_the_moment(platform: Platform, env: str) -> None:
    owner = f"keeper-of-{env}"
    api = await platform.api(owner)
    caller = Caller(owner, frozenset((Scope.READ, Scope.RUN)))
    await platform.secrets.set(caller, "TOKEN", "old-value")
    await make(api, env)
    await filled(platform, owner, env)
    await platform.secrets.set(caller, "TOKEN", SECRET)
    made = await make(api, env)
    assert pool_of(platform, owner, env).claims == 1  # type: ignore[union-attr]
    assert (await call(made, "about"))["token"] == "***"
    assert SECRET.encode() not in (await api.ask("GET", f"/env-instance/{made.id}/logs")).body
    engine = platform.instances.lives.engine

    async def printed() -> str:
        found = (await engine.output(made.id, 0)).data.decode()
        return found if "setting up" in found and found.endswith("\n") else ""

    assert "setting up ***" in await until(printed, "what its engine keeps")
    await filled(platform, owner, env)
    failed = (await api.create(env, environment_variables={"BROKEN": "1"})).instance
    assert failed.status == "Failed"
    assert "broken by a variable" in failed.reason


async def test_a_failure_is_told_as_that_of_a_new_one(platform: Platform) -> None:
    api = await platform.api("unlucky")
    fresh = (await api.create("broken", environment_variables={"NAME": "ada"})).instance
    await filled(platform, "unlucky", "broken")
    warm = (await api.create("broken", environment_variables={"NAME": "ada"})).instance
    assert pool_of(platform, "unlucky", "broken").claims == 1  # type: ignore[union-attr]
    assert (fresh.status, warm.status) == ("Failed", "Failed")
    why, whyless = (made.reason.partition("; the time went to")[0] for made in (fresh, warm))
    assert why == whyless
    assert "RuntimeError: broken on purpose by ada" in why

    async def printed() -> bool:
        return b"broken on purpose" in (await api.ask("GET", f"/env-instance/{warm.id}/logs")).body

    await until(printed, "what it printed")
    again = (await api.create("broken", startup_timeout=20)).instance  # of whichever is there
    assert again.status == "Failed"


async def test_each_is_taken_once(platform: Platform) -> None:
    api = await platform.api("crowd")
    first = await api.create("shared", count=6)
    assert first.status == 200
    await filled(platform, "crowd", "shared", 6)
    ids = {entry.id for entry in waiting(platform, "crowd")}
    made = await asyncio.gather(*(make(api, "shared", environment_variables={"NAME": str(n)}) for n in range(20)))
    assert len({each.id for each in made}) == 20
    assert ids & {each.id for each in made}
    marked = await asyncio.gather(*(call(each, "mark", text=each.id) for each in made))
    assert marked == [[each.id] for each in made]
    assert [(await call(each, "about"))["name"] for each in made] == [str(number) for number in range(20)]
    several = [msgspec.convert(each, Instance) for each in (await api.create("shared", count=3)).data]
    assert {each.status for each in several} == {"Running"}
    assert len({each.id for each in [*made, *several]}) == 23


async def test_one_that_waits_is_nobodys(platform: Platform) -> None:
    api = await platform.api("curious")
    made = await make(api, "shared")
    await filled(platform, "curious", "shared")
    directory = InstanceDirectory(platform.instances, platform.tokens.authenticate)
    assert (await directory.place(made.id)).failure is None
    for entry in waiting(platform, "curious"):
        assert directory.known(entry.id) is None
        with pytest.raises(NotFound):
            await directory.place(entry.id)
        assert (await api.ask("GET", f"/env-instance/{entry.id}")).status == 404
        assert (await api.ask("DELETE", f"/env-instance/{entry.id}")).status == 404
    shown = await Loads(platform.instances.lives).top(Caller("curious", frozenset((Scope.READ,))), None, 10)
    assert (shown.counts, [load.id for load in shown.loads]) == ({"Running": 1}, [made.id])


async def test_one_that_was_not_taken_after_all_waits_on_when_who_asked_has_left(platform: Platform) -> None:
    caller = Caller("leaver", frozenset((Scope.READ, Scope.RUN)))
    api, pools = await platform.api("leaver"), platform.instances.pools
    await make(api, "shared")
    await filled(platform, "leaver", "shared")
    ids = {entry.id for entry in waiting(platform, "leaver")}
    made = await platform.instances._planned(caller, InstanceRequest(env_name="shared"), api.token)
    lost = Put("test", "was here before", b"{}", expect=1)
    asking = asyncio.create_task(pools.begin(made, lambda made: [lost], api.token, caller))
    async with asyncio.timeout(30):
        while not pools._claimed:
            await asyncio.sleep(0)
    asking.cancel()
    await asyncio.wait((asking,))
    assert asking.cancelled()
    await filled(platform, "leaver", "shared", len(ids))
    assert (await make(api, "shared")).id in ids


async def test_one_key_takes_one(platform: Platform) -> None:
    api = await platform.api("keyed")
    await make(api, "shared")
    await filled(platform, "keyed", "shared")
    made = await asyncio.gather(*(make(api, "shared", key="once") for _ in range(5)))
    assert len({each.id for each in made}) == 1
    listed = (await api.ask("GET", "/env-instance/list")).json
    assert listed["total"] == 2


async def test_what_dies_while_it_waits_is_replaced(platform: Platform, monkeypatch: pytest.MonkeyPatch) -> None:
    api = await platform.api("unhappy")
    await make(api, "shared")
    await filled(platform, "unhappy", "shared")
    engine = platform.instances.lives.engine
    for entry in (dead := waiting(platform, "unhappy")):
        await engine.delete(entry.id)
    made = await make(api, "shared", environment_variables={"NAME": "ada"})
    assert (await call(made, "about"))["name"] == "ada"  # under the id of the dead one, or another
    monkeypatch.setattr(pools, "CHECK", 0.1)
    gone = {entry.id for entry in dead} - {made.id}
    await until(lambda: not gone & {entry.id for entry in waiting(platform, "unhappy")}, "the end of what is dead")
    await filled(platform, "unhappy", "shared")
    await make(api, "shared")


async def test_what_hangs_while_it_waits_is_replaced(platform: Platform, monkeypatch: pytest.MonkeyPatch) -> None:
    api = await platform.api("hung")
    await make(api, "shared")
    await filled(platform, "hung", "shared")
    [entry, *_] = waiting(platform, "hung")
    monkeypatch.setattr("aenv.api.specialising._LOOK", 0.0)
    monkeypatch.setattr(pools, "CHECK", 0.1)
    await until(lambda: entry.id not in platform.instances.lives.entries, "the end of what does not answer")
    monkeypatch.undo()
    await make(api, "shared")


async def test_none_waits_where_there_is_no_room(platform: Platform) -> None:
    api = await platform.api("limited")
    await make(api, "shared")
    await filled(platform, "limited", "shared")
    quotas = platform.instances.quotas
    await quotas.set("owner:limited", QuotaRequest(instances=2), 0.0)
    try:
        made = await make(api, "shared")  # of the pool: it counts from now on
        await until(lambda: not waiting(platform, "limited"), "the end of the pool")
        await api.ask("DELETE", f"/env-instance/{made.id}")
        await filled(platform, "limited", "shared")
        assert len(waiting(platform, "limited")) == 1
    finally:
        await quotas.delete("owner:limited")


async def test_an_operator_sees_pools(platform: Platform) -> None:
    api = await platform.api("watched")
    await make(api, "shared")
    await filled(platform, "watched", "shared")
    assert (await api.ask("GET", "/pool")).status == 403
    admin = await platform.api("admin", *Scope)
    listed = (await admin.ask("GET", "/pool")).json
    found = [msgspec.convert(each, Pool) for each in listed["data"]]
    mine = next(pool for pool in found if pool.owner == "watched")
    assert (mine.env, mine.min, mine.max) == ("shared@1.0.0", 1, 8)
    assert mine.target >= mine.min


async def test_pools_shrink_and_end(platform: Platform, monkeypatch: pytest.MonkeyPatch) -> None:
    api = await platform.api("leaver")
    assert (await api.create("shared", count=4)).status == 200
    await filled(platform, "leaver", "shared", 4)
    monkeypatch.setattr(demand, "QUIET", 0.0)
    await until(lambda: len(waiting(platform, "leaver")) == 1, "no more than the least")
    monkeypatch.setattr(demand, "FORGOTTEN", 0.0)
    monkeypatch.setattr(pools, "FORGOTTEN", 0.0)
    await until(lambda: pool_of(platform, "leaver", "shared") is None, "the end of the pool")
    assert not waiting(platform, "leaver")


@pytest_asyncio.fixture(loop_scope="module")
async def home(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Path]:
    """A home of its own, with whose end all sandboxes end."""
    path = short_home()
    monkeypatch.setenv("AENV_HOME", str(path))
    yield path
    await ProcessEngine(state="platform").end()
    shutil.rmtree(path, ignore_errors=True)


@asynccontextmanager
async def serving(url: str, home: Path, shelf: Shelf) -> AsyncIterator[Platform]:
    async with ProcessEngine(state="platform") as engine, service(url, engine, shelf, home) as running:
        yield running


async def all_known(platform: Platform) -> bool:
    """Whether every sandbox that lives is in a record that does."""
    lives = platform.instances.lives
    return {sandbox.id for sandbox in await lives.engine.find() if not sandbox.state.over} == set(lives.entries)


async def test_what_waits_is_found_again(home: Path) -> None:
    shelf, url = Shelf(), f"sqlite:{home / 'store.db'}"
    published(shelf, home)
    async with serving(url, home, shelf) as platform:
        await make(await platform.api("alice"), "shared")
        await filled(platform, "alice", "shared")
        before = {entry.id for entry in waiting(platform, "alice")}
    async with serving(url, home, shelf) as platform:
        await filled(platform, "alice", "shared")
        assert before & {entry.id for entry in waiting(platform, "alice")}
        made = await make(await platform.api("alice"), "shared", environment_variables={"NAME": "ada"})
        assert made.id in before
        assert (await call(made, "about"))["name"] == "ada"
        await until(lambda: all_known(platform), "that nothing lives that is not known")


async def test_a_server_that_is_killed_loses_nothing(home: Path) -> None:
    shelf, url = Shelf(), f"sqlite:{home / 'store.db'}"
    process = await asyncio.create_subprocess_exec(sys.executable, "-m", "tests.api.killed_claiming", url, str(home))
    async with asyncio.timeout(120):
        assert await process.wait() == -signal.SIGKILL
    published(shelf, home / "again")
    async with serving(url, home, shelf) as platform:
        lives = platform.instances.lives
        [claimed] = [entry for entry in lives.entries.values() if entry.kept.record.claimed]
        [made] = await platform.instances.create(ALICE, KEYED, key="k", wait=60, local=True)
        assert (made.id, made.status) == (claimed.id, "Running")
        about = await call(made, "about")
        assert (about["name"], about["seed"], about["setup"]) == ("ada", 3, ["ada"])
        await platform.instances.create(ALICE, InstanceRequest(env_name="shared"), wait=60)
        await filled(platform, "alice", "shared")
        await until(lambda: all_known(platform), "that nothing lives that is not known")


async def test_servers_share_what_waits(home: Path, redis: Server) -> None:
    redis.empty()
    shelf = Shelf()
    published(shelf, home)
    async with serving(redis.url, home, shelf) as one, serving(redis.url, home, shelf) as other:
        apis = [await one.api("alice"), await other.api("alice")]
        assert (await apis[0].create("shared", count=4)).status == 200
        await filled(one, "alice", "shared", 4)
        await filled(other, "alice", "shared", 4)
        ids = {entry.id for entry in waiting(other, "alice")}
        made = await asyncio.gather(*(make(apis[number % 2], "shared") for number in range(12)))
        assert len({each.id for each in made}) == 12
        assert ids & {each.id for each in made}
        assert await asyncio.gather(*(call(each, "mark", text=each.id) for each in made)) == [[e.id] for e in made]
        for platform in (one, other):
            await until(lambda platform=platform: all_known(platform), "that both know all that lives")
            entries = platform.instances.lives.entries
            await until(lambda entries=entries: all(entries[each.id].place for each in made), "where all of them are")


async def test_how_many_are_worth_having() -> None:
    found = Demand(0.0)
    assert found.target(0.0, 0, 10) == 0
    assert found.target(0.0, 2, 10) == 2
    found.note(0.0, 1)
    assert found.target(0.0, 0, 10) == 1
    found.note(0.1, 7)
    assert found.target(0.2, 0, 100) in (9, 10)
    assert found.target(0.2, 0, 4) == 4
    assert 0 < found.target(120.0, 0, 100) < 9
    assert found.target(601.0, 0, 100) == 0
    assert found.target(601.0, 3, 100) == 3
    assert found.target(3700.0, 3, 100) == 0
    steady = Demand(0.0)
    steady.took(5.0)
    for tenth in range(300):
        steady.note(tenth / 10, 1)
    assert 50 <= steady.target(30.0, 0, 1000) <= 80  # ten a second, of which each takes five
