"""Making instances: once for each key, in the order record, engine, answer, and with a reason when it fails."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import Any, ClassVar

import pytest

from aenv.api import idempotency, lives
from aenv.auth.callers import Caller, Scope
from aenv.auth.tokens import local_token
from aenv.engines.failing import FailingEngine, NeverReadyEngine, PaperEngine
from aenv.engines.plain import PlainEngine
from aenv.errors import (
    AEnvError,
    Conflict,
    Forbidden,
    Invalid,
    NetworkError,
    NotFound,
    StartFailed,
    TooLarge,
    Unsupported,
)
from aenv.models import Sandbox, SandboxSpec, Second, State
from aenv.store import Store, open_store
from aenv.wire import Instance, InstanceRequest
from tests.api.ground import ADMIN, ALICE, BOB, Api, FragileStore, GatedEngine, PaperShelf, Platform, service, until
from tests.store.servers import Server, redis_server
from tests.support import ROOT


@pytest.fixture
def shelf() -> PaperShelf:
    made = PaperShelf()
    made.on_paper("env", ttl="90s")
    made.on_paper("plain")
    return made


@pytest.fixture
async def platform(store: Store, shelf: PaperShelf, tmp_path: Path) -> AsyncIterator[Platform]:
    async with service(store, PaperEngine(), shelf, tmp_path) as running:
        yield running


def wanted(env: str = "env", **more: Any) -> InstanceRequest:
    return InstanceRequest(env_name=env, **more)


async def one(platform: Platform, request: InstanceRequest | None = None, wait: float = 30.0) -> Instance:
    [made] = await platform.instances.create(ALICE, request or wanted(), wait=wait)
    return made


async def test_an_instance_is_answered_with_all_that_its_owner_needs(platform: Platform) -> None:
    made = await one(platform, wanted("env@^1.0", labels={"team": "blue"}))
    assert (made.status, made.reason, made.owner, made.ttl) == ("Running", "", "alice", "90s")
    assert made.env.id == "env@1.0.0"
    assert made.env.readme == ""
    assert made.ip == "127.0.0.1"
    assert made.url == f"http://127.0.0.1:1/env-instance/{made.id}"
    assert made.socket == ""
    assert made.labels == {"team": "blue"}
    assert made.owner_token
    assert made.agent_token
    assert made.owner_token != made.agent_token
    again = await platform.instances.get(ALICE, made.id, local=True)
    assert again.socket == f"unix:/nonexistent/{made.id}"
    assert again.owner_token == made.owner_token
    reader = Caller("alice", frozenset((Scope.READ,)))
    assert (await platform.instances.get(reader, made.id)).owner_token == ""
    assert (await platform.instances.get(ADMIN, made.id)).owner_token == made.owner_token


async def test_without_waiting_the_answer_comes_at_once(store: Store, shelf: PaperShelf, tmp_path: Path) -> None:
    engine = GatedEngine()
    async with service(store, engine, shelf, tmp_path) as platform:
        made = await one(platform, wait=0)
        assert made.status in ("Pending", "Creating")
        assert (await one(platform, wait=0.05)).status in ("Pending", "Creating")
        engine.gate.set()
        assert (await platform.instances.get(ALICE, made.id, wait=30)).status == "Running"


async def test_a_start_that_takes_long_says_what_it_waits_for(store: Store, shelf: PaperShelf, tmp_path: Path) -> None:
    async with service(store, NeverReadyEngine("no place is free"), shelf, tmp_path) as platform:
        made = await one(platform, wait=0)

        async def creating() -> bool:
            found = await platform.instances.get(ALICE, made.id)
            return (found.status, found.reason) == ("Creating", "no place is free")

        await until(creating, "what it waits for")
        found, _ = await platform.instances.list(ALICE, status=["creating"], limit=10, offset=0)
        assert [each.id for each in found] == [made.id]


async def test_a_failure_has_its_reason_and_leaves_nothing(store: Store, shelf: PaperShelf, tmp_path: Path) -> None:
    engine = FailingEngine(create=StartFailed("no such image", hint="build it"), times=3)
    async with service(store, engine, shelf, tmp_path) as platform:
        made = await platform.instances.create(ALICE, wanted(count=5), wait=30)
        assert sorted(each.status for each in made) == ["Failed"] * 3 + ["Running"] * 2
        reasons = {each.reason.partition("; the time went")[0] for each in made if each.status == "Failed"}
        assert reasons == {"no such image (build it)"}
        assert all(not each.owner_token and not each.url for each in made if each.status == "Failed")
        assert isinstance(engine.inner, PaperEngine)
        assert set(engine.inner.sandboxes) == {each.id for each in made if each.status == "Running"}


async def test_a_start_has_so_much_time(
    store: Store, shelf: PaperShelf, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("aenv.api.lives._LONGER", 0.0)
    engine = GatedEngine()
    async with service(store, engine, shelf, tmp_path) as platform:
        made = await one(platform, wanted(startup_timeout=0.1))
        assert made.status == "Failed"
        assert made.reason.startswith("it did not start within 0.1 s; the time went to: "), made.reason
    never = NeverReadyEngine("no place is free")
    async with service(store, never, shelf, tmp_path) as platform:
        made = await one(platform, wanted(startup_timeout=1.0))
        assert made.status == "Failed"
        assert "no place is free" in made.reason
        await until(lambda: not never.sandboxes, "its end")


class FullEngine(GatedEngine):
    """It has no room until its gate is open."""

    async def get(self, id: str) -> Sandbox:
        if self.gate.is_set() or id not in self.asked:
            return await super().get(id)
        return Sandbox(url="", id=id, state=State.PENDING, reason="all nodes are full")


async def test_what_finds_no_room_in_the_engine_waits_without_its_time_running(
    store: Store, shelf: PaperShelf, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("aenv.api.lives._SLOW", 0.05)
    monkeypatch.setattr("aenv.api.lives._SLOWER", 0.05)
    engine = FullEngine()
    async with service(store, engine, shelf, tmp_path) as platform:
        [made] = await platform.instances.create(ALICE, wanted(startup_timeout=2.0, ttl=1.0), wait=0)

        async def waits() -> Instance | None:
            found = await platform.instances.get(ALICE, made.id)
            return found if found.reason else None

        waiting: Instance = await until(waits, "what it waits for")
        assert (waiting.status, waiting.reason) == ("Pending", "all nodes are full")
        entry = platform.instances.lives.entries[made.id]
        await until(lambda: time.time() > entry.kept.record.created_at + 1.2, "the end of its first time to live")
        assert (await platform.instances.get(ALICE, made.id)).status == "Pending"
        began = time.time()
        engine.gate.set()
        await until(lambda: entry.kept.record.status is State.RUNNING, "its start")
        assert began + 1.0 <= entry.kept.record.expires_at <= time.time() + 1.0


async def test_what_waited_for_room_has_all_its_time_after_a_restart(
    store: Store, shelf: PaperShelf, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("aenv.api.lives._SLOW", 0.05)
    async with service(store, FullEngine(), shelf, tmp_path) as platform:
        [made] = await platform.instances.create(ALICE, wanted(startup_timeout=60.0, ttl=20.0), wait=0)
        entry = platform.instances.lives.entries[made.id]
        await until(lambda: entry.kept.record.lacks_room, "what it waits for")

    specs: list[SandboxSpec] = []

    class RoomyEngine(PaperEngine):
        async def create(self, id: str, spec: SandboxSpec) -> Sandbox:
            specs.append(spec)
            return await super().create(id, spec)

    async with service(store, RoomyEngine(), shelf, tmp_path) as platform:
        await until(lambda: specs, "its second start", 60.0)
        assert specs[0].ttl == pytest.approx(20.0 + lives.MARGIN)


async def test_those_behind_the_ones_that_wait_lose_no_time(
    store: Store, shelf: PaperShelf, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("aenv.api.lives.AT_ONCE", 1)
    monkeypatch.setattr("aenv.api.lives._SLOW", 0.05)
    engine = FullEngine()
    async with service(store, engine, shelf, tmp_path) as platform:
        made = await platform.instances.create(ALICE, wanted(startup_timeout=30.0, ttl=1.0, count=2), wait=0)
        other = await platform.instances.create(ALICE, wanted(startup_timeout=30.0, resources={"cpu": "2"}), wait=0)
        entries = [platform.instances.lives.entries[each.id] for each in made]
        await until(lambda: all(entry.kept.record.lacks_room for entry in entries), "what both wait for")
        assert {entry.kept.record.reason for entry in entries} == {
            "all nodes are full",
            "1 that want the same are made before it",
        }
        assert other[0].id in engine.asked  # what wants something else does not wait behind them
        await until(
            lambda: time.time() > entries[0].kept.record.created_at + 1.2, "the end of their first time to live"
        )
        engine.gate.set()
        await until(lambda: all(entry.kept.record.status is State.RUNNING for entry in entries), "their starts")


async def test_what_never_finds_room_is_given_up(
    store: Store, shelf: PaperShelf, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("aenv.api.lives._SLOW", 0.05)
    engine = FullEngine()
    async with service(store, engine, shelf, tmp_path) as platform:
        made = await one(platform, wanted(startup_timeout=0.5, ttl=0.5))
        assert (made.status, made.reason) == ("Terminated", "there was no room for it: all nodes are full")
        assert engine.sandboxes == {}


async def test_an_engine_may_give_more_than_others(store: Store, shelf: PaperShelf, tmp_path: Path) -> None:
    class GenerousEngine(PaperEngine):
        given: ClassVar[list[dict[str, str]]] = []

        def check_resources(self, resources: Mapping[str, str]) -> None:
            pass

        async def create(self, id: str, spec: SandboxSpec) -> Sandbox:
            self.given.append(spec.resources)
            return await super().create(id, spec)

    async with service(store, GenerousEngine(), shelf, tmp_path) as platform:
        assert (await one(platform, wanted(resources={"example.org/gpu": "2"}))).status == "Running"
        assert GenerousEngine.given[0]["example.org/gpu"] == "2"


async def test_an_engine_with_a_defect_fails_the_instance_and_not_the_server(
    store: Store, shelf: PaperShelf, tmp_path: Path
) -> None:
    class Defective(PaperEngine):
        async def create(self, id: str, spec: SandboxSpec) -> Sandbox:
            raise ZeroDivisionError("secret words")

    async with service(store, Defective(), shelf, tmp_path) as platform:
        made = await one(platform)
        assert made.status == "Failed"
        assert made.reason.startswith("the platform itself failed: ZeroDivisionError")
        assert "secret" not in made.reason


@pytest.mark.parametrize("count", [1, 3])
async def test_the_same_key_gives_the_same_instances(platform: Platform, count: int) -> None:
    request = wanted(count=count)
    first = await platform.instances.create(ALICE, request, key="k", wait=30)
    again = await platform.instances.create(ALICE, request, key="k", wait=30)
    assert [each.id for each in again] == [each.id for each in first]
    assert len(platform.instances.lives.engine.sandboxes) == count  # type: ignore[attr-defined]
    assert (await platform.instances.create(BOB, request, key="k", wait=30))[0].id != first[0].id
    with pytest.raises(Invalid, match="another request"):
        await platform.instances.create(ALICE, wanted(ttl="5m", count=count), key="k")
    await platform.instances.delete(ALICE, first[0].id)
    ended = await platform.instances.create(ALICE, request, key="k", wait=30)
    assert (ended[0].id, ended[0].status) == (first[0].id, "Terminated")


async def test_a_key_outlives_the_record(platform: Platform, monkeypatch: pytest.MonkeyPatch) -> None:
    [made] = await platform.instances.create(ALICE, wanted(), key="k", wait=30)
    await platform.instances.delete(ALICE, made.id)
    monkeypatch.setattr("aenv.api.reaper.KEPT_FOR", -1.0)
    await platform.instances.reaper.sweep()
    with pytest.raises(NotFound):
        await platform.instances.get(ALICE, made.id)
    with pytest.raises(Conflict, match="ended long ago"):
        await platform.instances.create(ALICE, wanted(), key="k", wait=30)


async def test_who_asks_again_while_it_is_made_gets_the_same_answer(
    store: Store, shelf: PaperShelf, tmp_path: Path
) -> None:
    engine = GatedEngine()
    async with service(store, engine, shelf, tmp_path) as platform:
        asking = [asyncio.create_task(platform.instances.create(ALICE, wanted(), key="k", wait=30)) for _ in range(8)]
        await until(lambda: engine.asked, "the engine's turn")
        assert not any(task.done() for task in asking)
        engine.gate.set()
        answers = [await task for task in asking]
        assert len({answer[0].id for answer in answers}) == 1
        assert {answer[0].status for answer in answers} == {"Running"}
        assert len(engine.asked) == 1


async def test_another_server_on_the_same_store_joins_too(redis: Server, shelf: PaperShelf, tmp_path: Path) -> None:
    redis.empty()
    engine, other = GatedEngine(), PaperEngine()
    async with (
        service(redis.url, engine, shelf, tmp_path, name="one") as first,
        service(redis.url, other, shelf, tmp_path, name="two") as second,
    ):
        [made] = await first.instances.create(ALICE, wanted(lease=60.0), key="k")
        joining = asyncio.create_task(second.instances.create(ALICE, wanted(lease=60.0), key="k", wait=30))
        engine.gate.set()
        [joined] = await joining
        assert (joined.id, joined.status) == (made.id, "Running")
        assert not other.sandboxes
        assert (await second.instances.get(ALICE, made.id)).status == "Running"
        assert (await second.instances.renew(ALICE, made.id)).lease_expires_at
        await second.instances.reaper.sweep()  # it is none of its own: it lives on
        assert made.id in engine.sandboxes
        await second.instances.delete(ALICE, made.id)
        await first.instances.reaper.sweep()
        await until(lambda: made.id not in engine.sandboxes, "the end of what another server ended")
        assert (await first.instances.get(ALICE, made.id)).status == "Terminated"


async def test_the_record_is_there_before_the_engine_is_asked(url: str, shelf: PaperShelf, tmp_path: Path) -> None:
    """A server that is gone after that is gone on for, under the same id, and the retry finds it."""
    engine = GatedEngine()
    async with await open_store(url) as store:
        async with service(store, engine, shelf, tmp_path) as platform:
            platform.instances.lives.close = _nothing  # type: ignore[method-assign, assignment]
            [made] = await platform.instances.create(ALICE, wanted(arguments=["-v"]), key="k")
            await until(lambda: engine.asked, "the engine's turn")
        for entry in platform.instances.lives.entries.values():
            assert entry.starting is not None
            entry.starting.cancel()
    paper = PaperEngine()
    async with await open_store(url) as store, service(store, paper, shelf, tmp_path) as platform:
        [again] = await platform.instances.create(ALICE, wanted(arguments=["-v"]), key="k", wait=30)
        assert (again.id, again.status) == (made.id, "Running")
        assert list(paper.sandboxes) == [made.id]


async def _nothing(grace: float) -> None:
    """As if the process had been killed."""


async def test_a_killed_server_makes_no_second_instance(shelf: PaperShelf, tmp_path: Path) -> None:
    url = f"sqlite:{tmp_path / 'store.db'}"
    program = [sys.executable, "-m", "tests.api.killed", url, str(tmp_path)]
    process = await asyncio.to_thread(
        subprocess.run, program, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False
    )
    assert process.returncode == -9, process.stderr
    paper = PaperEngine()
    async with service(url, paper, shelf, tmp_path) as platform:
        [made] = await platform.instances.create(ALICE, wanted(), key="k", wait=30)
        assert made.status == "Running"
        assert list(paper.sandboxes) == [made.id]
        assert (await platform.instances.list(ADMIN, limit=10, offset=0))[1] == 1


async def test_a_store_that_fails_fails_before_the_engine(shelf: PaperShelf, tmp_path: Path) -> None:
    paper = PaperEngine()
    async with await open_store(f"sqlite:{tmp_path / 'store.db'}") as inner:
        store = FragileStore(inner)
        async with service(store, paper, shelf, tmp_path) as platform:
            made = await one(platform)
            store.full = True
            with pytest.raises(AEnvError, match="full"):
                await one(platform)
            store.down = True
            with pytest.raises(NetworkError, match="down"):
                await platform.instances.create(ALICE, wanted(), key="k")
            assert list(paper.sandboxes) == [made.id]
            await platform.instances.delete(ALICE, made.id)
            assert not paper.sandboxes
            assert (await platform.instances.get(ALICE, made.id)).status == "Terminated"
            store.full = store.down = False
            assert (await inner.get("instance", made.id)).value.count(b'"Running"') == 1  # type: ignore[union-attr]
            assert (await platform.instances.get(ALICE, made.id)).status == "Terminated"
            await platform.instances.reaper.write()
            assert (await inner.get("instance", made.id)).value.count(b'"Terminated"') == 1  # type: ignore[union-attr]


async def test_a_store_that_fails_when_it_runs_ends_it_again(shelf: PaperShelf, tmp_path: Path) -> None:
    engine = GatedEngine()
    async with await open_store(f"sqlite:{tmp_path / 'store.db'}") as inner:
        store = FragileStore(inner)
        async with service(store, engine, shelf, tmp_path) as platform:
            made = await one(platform, wait=0)
            await until(lambda: engine.asked, "the engine's turn")
            store.full = True
            engine.gate.set()
            await until(lambda: made.id in engine.deleted, "its end")
            assert not engine.sandboxes
            store.full = False
            await platform.instances.reaper.write()
            assert (await platform.instances.get(ALICE, made.id)).status == "Failed"


async def test_not_all_of_a_batch_at_once(store: Store, shelf: PaperShelf, tmp_path: Path) -> None:
    engine = GatedEngine()
    async with service(store, engine, shelf, tmp_path) as platform:
        making = asyncio.create_task(platform.instances.create(ALICE, wanted(count=100), wait=30))
        await until(lambda: len(engine.asked) == 32, "the first of them")
        engine.gate.set()
        assert {each.status for each in await making} == {"Running"}
        assert (len(engine.asked), engine.most) == (100, 32)


async def test_the_largest_batch_under_a_key(platform: Platform) -> None:
    request = wanted(count=1000)
    made = await platform.instances.create(ALICE, request, key="k", wait=60)
    assert {each.status for each in made} == {"Running"}
    again = await platform.instances.create(ALICE, request, key="k", wait=60)
    assert [each.id for each in again] == [each.id for each in made]
    first, total = await platform.instances.list(ALICE, limit=600, offset=0)
    rest, _ = await platform.instances.list(ALICE, limit=600, offset=600)
    assert total == 1000
    assert {each.id for each in first + rest} == {each.id for each in made}


async def test_a_batch_is_not_written_when_it_is_too_much_at_once(platform: Platform) -> None:
    with pytest.raises(TooLarge, match="count 1000"):
        await platform.instances.create(ALICE, wanted(count=1000, environment_variables={"A": "x" * 100_000}))
    assert (await platform.instances.list(ADMIN, limit=1, offset=0))[1] == 0


async def test_secrets_of_an_instance_have_a_bound(platform: Platform, shelf: PaperShelf) -> None:
    shelf.on_paper("secretive", secrets=["KEY_ONE", "KEY_TWO"])
    for name in ("KEY_ONE", "KEY_TWO"):
        await platform.secrets.set(ALICE, name, "x" * 40_000)
    with pytest.raises(TooLarge, match="KEY_ONE, KEY_TWO have 80000 bytes"):
        await platform.instances.create(ALICE, wanted(env="secretive"))


BAD = {
    "no environment name": ({"env": "../env"}, Invalid, "not an environment name"),
    "unicode": ({"env": "größe"}, Invalid, "not an environment name"),
    "no version": ({"env": "env@one"}, Invalid, "not a version"),
    "unknown": ({"env": "nothing"}, NotFound, "nothing"),
    "ttl": ({"ttl": "soon"}, Invalid, "ttl 'soon'"),
    "endless": ({"ttl": "31d"}, Invalid, "30 days"),
    "negative": ({"ttl": -1}, Invalid, "ttl"),
    "count": ({"count": 0}, Invalid, "count"),
    "too many": ({"count": 1001}, Invalid, "count"),
    "lease": ({"lease": 0.0}, Invalid, "lease"),
    "startup": ({"startup_timeout": 1e9}, Invalid, "startup_timeout"),
    "seed": ({"seed": 2**63}, Invalid, "seed"),
    "somebody else": ({"owner": "bob"}, Forbidden, "'bob'"),
    "no owner": ({"owner": "a/b"}, Invalid, "owner"),
    "variable": ({"environment_variables": {"1A": "x"}}, Invalid, "'1A'"),
    "variable's value": ({"environment_variables": {"A": "x\0"}}, Invalid, "environment_variables.A"),
    "variables": ({"environment_variables": {"A": "x" * 200_000}}, Invalid, "bytes"),
    "half a character": ({"environment_variables": {"A": "\ud800"}}, Invalid, "half a character"),
    "arguments": ({"arguments": ["x" * 200_000]}, Invalid, "bytes"),
    "label": ({"labels": {"a=b": "x"}}, Invalid, "label"),
    "label's length": ({"labels": {"a" * 64: "x"}}, Invalid, "label"),
    "label's value": ({"labels": {"a": "x" * 257}}, Invalid, "label"),
    "our label": ({"labels": {"aenv/server": "x"}}, Invalid, "label"),
    "labels": ({"labels": {f"l{n}": "x" for n in range(33)}}, Invalid, "33 labels"),
    "resource": ({"resources": {"gpu": "1"}}, Invalid, "gpu"),
    "resource of some nodes": (
        {"resources": {"example.org/gpu": "1"}},
        Invalid,
        "paper engine does not give 'example.org/gpu'",
    ),
    "memory": ({"resources": {"memory": "much"}}, Invalid, "memory"),
    "datasource": ({"datasource": "/etc"}, Invalid, "datasource '/etc'"),
    "secret": ({"env": "secretive"}, Invalid, "API_TOKEN"),
    "second image": ({"env": "dual"}, Invalid, "no image"),
    "second image's name": ({"env": "dual", "datasource": "Ubuntu"}, Invalid, "upper-case"),
    "second directory": ({"env": "dual", "datasource": "/etc"}, Invalid, "datasource '/etc'"),
    "second path": ({"env": "prefixed", "datasource": "docker.io/x:1"}, Invalid, "outside"),
    "bad config": ({"env": "broken"}, Invalid, "deployConfig.cpu"),
}


async def test_bad_requests_are_refused_by_name(shelf: PaperShelf, tmp_path: Path) -> None:
    shelf.on_paper("secretive", secrets=["API_TOKEN"])
    shelf.on_paper("dual", podTemplate="dualcontainer")
    shelf.on_paper("prefixed", podTemplate="DualContainer", imagePrefix="reg.example.com/envs")
    shelf.on_paper("broken", cpu="plenty")
    paper = PaperEngine()
    async with service(f"sqlite:{tmp_path / 'store.db'}", paper, shelf, tmp_path) as platform:
        for name, (fields, error, words) in BAD.items():
            with pytest.raises(error) as caught:
                await platform.instances.create(ALICE, wanted(**{"env": "env", **fields}))
            assert words in str(caught.value), name
        for key in ("", "x" * 256, "a\nb"):
            with pytest.raises(Invalid, match="Idempotency-Key"):
                await platform.instances.create(ALICE, wanted(), key=key)
        assert not paper.sandboxes
        assert (await platform.instances.list(ADMIN, limit=1, offset=0))[1] == 0
        assert (await platform.store.find(idempotency.KIND)).total == 0
        [made] = await platform.instances.create(ADMIN, wanted(owner="bob"))
        assert made.owner == "bob"


async def test_data_only_from_where_the_operator_allows(shelf: PaperShelf, tmp_path: Path) -> None:
    allowed, other = tmp_path / "allowed", tmp_path / "other"
    (allowed / "set").mkdir(parents=True)
    other.mkdir()
    (allowed / "out").symlink_to(other)
    (other / "in").symlink_to(allowed / "set")
    seen: dict[str, str] = {}

    class Looking(PaperEngine):
        async def create(self, id: str, spec: SandboxSpec) -> Sandbox:
            seen[id] = spec.datasource
            return await super().create(id, spec)

    url = f"sqlite:{tmp_path / 'store.db'}"
    async with service(url, Looking(), shelf, tmp_path, datasources=[allowed]) as platform:
        for path in (allowed / "out", other, allowed / ".." / "other", allowed / "none", Path("set")):
            with pytest.raises(Invalid, match="datasource"):
                await one(platform, wanted(datasource=str(path)))
        for path in (allowed, allowed / "set", other / "in"):
            made = await one(platform, wanted(datasource=str(path)))
            assert seen[made.id] == str(path.resolve())


async def test_an_engine_is_told_the_image_and_the_second_container(shelf: PaperShelf, tmp_path: Path) -> None:
    tasks = tmp_path / "tasks"
    (tasks / "one").mkdir(parents=True)
    (tasks / "file").touch()
    shelf.on_paper("dual", podTemplate="DUALCONTAINER")
    shelf.on_paper("prefixed", podTemplate="DualContainer", imagePrefix="reg.example.com/envs")
    shelf.on_paper("usual", podTemplate="DualContainer", datasource="aenv-base")
    digest = f"sha256:{'0' * 64}"
    shelf.on_paper("built").artifacts = [{"id": digest, "type": "image", "content": "reg.example.com/built:1"}]
    seen: list[SandboxSpec] = []

    class Looking(PaperEngine):
        async def create(self, id: str, spec: SandboxSpec) -> Sandbox:
            seen.append(spec)
            return await super().create(id, spec)

    url = f"sqlite:{tmp_path / 'store.db'}"
    async with service(url, Looking(), shelf, tmp_path, datasources=[tasks]) as platform:
        for env, datasource, second in (
            ("dual", "ubuntu:22.04", Second(image="ubuntu:22.04")),
            ("dual", str(tasks / "one"), Second(directory=str((tasks / "one").resolve()))),
            ("prefixed", "task-1", Second(image="reg.example.com/envs:task-1")),
            ("prefixed", str(tasks / "one"), Second(directory=str((tasks / "one").resolve()))),
            ("usual", "", Second(image="aenv-base")),
            ("usual", "ubuntu:22.04", Second(image="ubuntu:22.04")),
        ):
            await one(platform, wanted(env, datasource=datasource))
            assert (seen[-1].second, seen[-1].datasource, seen[-1].image) == (second, "", "")
        with pytest.raises(Invalid, match="no directory"):
            await one(platform, wanted("dual", datasource=str(tasks / "file")))
        await one(platform, wanted("built"))
        assert (seen[-1].image, seen[-1].second) == (f"reg.example.com/built@{digest}", None)


async def test_an_engine_without_second_containers_says_so(shelf: PaperShelf, tmp_path: Path) -> None:
    shelf.on_paper("dual", podTemplate="dualcontainer")
    async with PlainEngine() as engine, service(f"sqlite:{tmp_path / 'db'}", engine, shelf, tmp_path) as platform:
        with pytest.raises(Unsupported, match=r"the plain engine cannot make a second container \(ubuntu\)") as caught:
            await one(platform, wanted("dual", datasource="ubuntu"))
        assert caught.value.hint == "use the docker engine: aenv serve --engine docker, or AENV_ENGINE=docker"
        assert (await platform.instances.list(ADMIN, limit=1, offset=0))[1] == 0


async def test_closing_waits_for_what_is_made(
    store: Store, shelf: PaperShelf, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("aenv.api.instances.GRACE", 60.0)
    engine = GatedEngine()
    async with service(store, engine, shelf, tmp_path) as platform:
        made = await one(platform, wait=0)
        await until(lambda: engine.asked, "the engine's turn")
        asyncio.get_running_loop().call_later(0.1, engine.gate.set)
    assert made.id in engine.sandboxes
    kept = await platform.instances.lives.records.get(made.id)
    assert kept is not None
    assert kept.record.status is State.RUNNING


async def test_a_redis_that_is_killed_and_comes_back(shelf: PaperShelf, tmp_path: Path) -> None:
    paper = PaperEngine()
    with redis_server(tmp_path, "--appendonly", "yes", "--appendfsync", "always") as server:
        async with service(server.url, paper, shelf, tmp_path) as platform:
            doomed, kept = await one(platform), await one(platform)
            local = Api(platform.url, local_token(tmp_path))
            server.kill()
            refused, _ = await asyncio.gather(local.create("env"), platform.instances.delete(ALICE, doomed.id))
            assert (refused.status, refused.json["error"]) == (503, "network")
            assert list(paper.sandboxes) == [kept.id]
            assert (await platform.instances.get(ALICE, doomed.id)).status == "Terminated"
            server.start()
            assert (await local.create("env")).instance.status == "Running"
            await platform.instances.reaper.write()
            await platform.instances.reaper.sweep()
            assert (await platform.instances.get(ALICE, kept.id)).status == "Running"
            found, total = await platform.instances.list(ADMIN, status=["Running"], limit=10, offset=0)
            assert total == len(found) == len(paper.sandboxes) == 2
