"""Servers beside each other: who is there, who is gone, and what one learns of what another did."""

from __future__ import annotations

import asyncio
import json
import signal
import sys
import time
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import msgspec
import pytest

from aenv.api import peers as module
from aenv.api.directory import InstanceDirectory
from aenv.api.gateway.failures import Busy
from aenv.api.peers import KIND, Peers
from aenv.api.records import KIND as INSTANCE
from aenv.api.records import InstanceRecord, Records, put
from aenv.engines.failing import PaperEngine
from aenv.errors import Conflict, NetworkError
from aenv.models import State
from aenv.store import Put, Record, Store, open_store
from aenv.wire import InstanceRequest
from tests.api.ground import ALICE, FragileStore, GatedEngine, PaperShelf, service, until
from tests.store.servers import Server

NEVER = 3600.0


@pytest.fixture
def shelf() -> PaperShelf:
    made = PaperShelf()
    made.on_paper("env")
    return made


@pytest.fixture
async def shared(redis: Server) -> Any:
    redis.empty()
    async with await open_store(redis.url) as store:
        yield store


def record(id: str, **more: Any) -> InstanceRecord:
    now = time.time()
    given = {"server": "one", "owner": "alice", "status": State.RUNNING, "url": "unix:/nonexistent", **more}
    return InstanceRecord(
        id=id,
        env=PaperShelf().on_paper("env"),
        created_at=now,
        updated_at=now,
        ttl=600.0,
        expires_at=now + 600.0,
        **given,
    )


# Who is there


async def test_servers_hear_of_each_other(shared: Store, tmp_path: Path) -> None:
    one = Peers(shared, "one", control_url="http://a:1", data_url="http://a:2", folder=tmp_path)
    two = Peers(shared, "one", folder=tmp_path)
    far = Peers(shared, "far")
    for each in (one, two, far):
        await each.beat()
    await one.beat()
    assert {peer.boot for peer in one.others} == {two.me.boot, far.me.boot}
    found = far.find("one")
    assert found is not None
    assert found in (one.me, two.me)
    assert (far.find("far"), far.find("nobody")) == (None, None)
    # One that is about to end is sent nothing new; one that left is gone.
    other = two if found == one.me else one
    await (one if found == one.me else two).drain()
    await far.beat()
    assert far.find("one") == other.me
    await other.leave()
    await far.beat()
    assert far.alive(found.boot)
    assert not far.alive(other.me.boot)
    for each in (one, two, far):
        await each.leave()


async def test_one_of_the_same_home_that_died_is_gone_at_once(shared: Store, tmp_path: Path) -> None:
    code = f"""
import asyncio, os, signal
from pathlib import Path
from aenv.api.peers import Peers
from aenv.store import open_store

async def main():
    async with await open_store({_url(shared)!r}) as store:
        peers = Peers(store, "one", folder=Path({str(tmp_path)!r}))
        await peers.beat()
        print(peers.me.boot, flush=True)
        await asyncio.sleep(3600)

asyncio.run(main())
"""
    process = await asyncio.create_subprocess_exec(sys.executable, "-c", code, stdout=asyncio.subprocess.PIPE)
    assert process.stdout is not None
    boot = (await process.stdout.readline()).decode().strip()
    near, far = Peers(shared, "one", folder=tmp_path), Peers(shared, "two")
    for each in (near, far):
        await each.beat()
        assert each.alive(boot)
    process.kill()
    await process.wait()
    await near.beat()
    assert not near.alive(boot)
    await far.beat()  # which was told
    assert not far.alive(boot)
    assert not (tmp_path / boot).exists()
    await near.leave()
    assert list(tmp_path.iterdir()) == []


def _url(store: Store) -> str:
    address = store._shown  # type: ignore[attr-defined]
    return f"redis://{address}/0"


async def test_one_that_is_silent_is_gone_unless_nobody_could_be_heard(
    shared: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 100.0
    monkeypatch.setattr(module, "steady", lambda: now)
    near, far = Peers(shared, "one"), Peers(shared, "two")
    await far.beat()
    await near.beat()
    for _ in range(4):
        now += module.QUIET / 4
        await near.beat()
    assert near.alive(far.me.boot)
    now += 1.0
    await near.beat()
    assert not near.alive(far.me.boot)
    assert near.silence("two") > module.QUIET
    assert near.silence("one") == near.silence("unheard of") == 0.0
    await far.beat()
    await near.beat()
    assert near.alive(far.me.boot)
    now += 10 * module.QUIET  # the store was away, or this server was
    await near.beat()
    assert near.alive(far.me.boot)
    await shared.change(Put(KIND, "strange", b'{"boot": 3}'))
    await near.beat()
    assert [peer.name for peer in near.others] == ["two"]


async def test_a_file_has_one_server(tmp_path: Path) -> None:
    async with await open_store(f"sqlite:{tmp_path / 'store.db'}") as store:
        alone = Peers(store, "one", folder=tmp_path / "servers")
        await alone.beat()
        await alone.drain()
        assert await store.kinds() == []
        assert alone.alive(alone.me.boot)
        assert not alone.alive("of an earlier life")
        await alone.leave()
    assert not (tmp_path / "servers").exists()


async def test_where_a_sandbox_is_reached_from(shared: Store, tmp_path: Path) -> None:
    near, far = Peers(shared, "one"), Peers(shared, "two", data_url="http://far:8081")
    await far.beat()
    await near.beat()
    (tmp_path / "here.sock").touch()
    for server, url, reached in (
        ("one", "unix:/nonexistent", "unix:/nonexistent"),
        ("two", "http://10.0.0.1:8081", "http://10.0.0.1:8081"),
        ("two", f"unix:{tmp_path}/here.sock", f"unix:{tmp_path}/here.sock"),
        ("two", "unix:/nonexistent", "http://far:8081/env-instance/env-a"),
    ):
        assert near.url(record("env-a", server=server, url=url)) == reached
    with pytest.raises(NetworkError, match=r"env-a is at the server three, which was not heard of"):
        near.url(record("env-a", server="three"))


# What one learns of another


async def test_each_knows_what_the_other_has(redis: Server, shelf: PaperShelf, tmp_path: Path) -> None:
    redis.empty()
    paper = PaperEngine()
    async with (
        service(redis.url, paper, shelf, tmp_path) as first,
        service(redis.url, paper, shelf, tmp_path) as second,
    ):
        lives, reaper = second.instances.lives, second.instances.reaper
        told: list[str] = []
        lives.listeners.append(lambda record: told.append(record.id))
        [made] = await first.instances.create(ALICE, InstanceRequest(env_name="env", lease=60.0), wait=30)
        await until(lambda: made.id in lives.entries, "word of it")
        directory = InstanceDirectory(second.instances, second.tokens.authenticate)
        assert directory.known(made.id) is not None
        extended = await first.instances.extend(ALICE, made.id, NEVER)
        assert (await second.instances.get(ALICE, made.id)).expires_at == extended.expires_at
        assert [one.expires_at for one in (await second.instances.list(ALICE, limit=9, offset=0))[0]] == [
            extended.expires_at
        ]
        # It is used at the second, and the first is told.
        entry = first.instances.lives.entries[made.id]
        lives.entries[made.id].lease_until = time.time() + NEVER
        await reaper.follow()
        await first.instances.reaper.follow()
        assert (entry.lease_until or 0.0) > time.time() + NEVER / 2
        await first.instances.delete(ALICE, made.id)
        assert (await second.instances.get(ALICE, made.id)).status == "Terminated"
        await until(lambda: told == [made.id], "word of its end")
        assert directory.known(made.id) is None
        with pytest.raises(Conflict):
            await second.instances.extend(ALICE, made.id, 60.0)


async def test_what_one_had_begun_another_goes_on_with(redis: Server, shelf: PaperShelf, tmp_path: Path) -> None:
    redis.empty()
    paper, gated = PaperEngine(), GatedEngine()
    async with service(redis.url, paper, shelf, tmp_path) as second:
        async with service(redis.url, gated, shelf, tmp_path) as first:
            made = await first.instances.create(ALICE, InstanceRequest(env_name="env", count=3))
            await until(lambda: len(gated.asked) == 3, "the engine's turn")
            for _ in range(3):  # as long as the first is there, they are its own
                await second.instances.reaper.follow()
            await second.instances.reaper.sweep()
            assert not paper.sandboxes
        for each in made:
            found = await second.instances.get(ALICE, each.id, wait=30)
            assert found.status == "Running"
        assert set(paper.sandboxes) == {each.id for each in made}


async def test_a_look_at_everything_reads_nothing_by_itself_that_is_known(shelf: PaperShelf, tmp_path: Path) -> None:
    asked: list[str] = []

    class Counting(FragileStore):
        async def get(self, kind: str, key: str) -> Record | None:
            asked.append(kind)
            return await super().get(kind, key)

    async with await open_store(f"sqlite:{tmp_path / 'store.db'}") as inner:
        async with service(Counting(inner), PaperEngine(), shelf, tmp_path) as platform:
            await platform.instances.create(ALICE, InstanceRequest(env_name="env", count=5), wait=30)
            asked.clear()
            await platform.instances.reaper.sweep()
            assert INSTANCE not in asked
            assert len(platform.instances.lives.entries) == 5


async def test_leases_begin_anew_when_others_could_not_be_heard(
    redis: Server, shelf: PaperShelf, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    redis.empty()
    paper = PaperEngine()
    async with (
        service(redis.url, paper, shelf, tmp_path) as first,
        service(redis.url, paper, shelf, tmp_path) as second,
    ):
        [made] = await first.instances.create(ALICE, InstanceRequest(env_name="env", lease=600.0), wait=30)
        reaper, entry = first.instances.reaper, first.instances.lives.entries[made.id]
        await until(lambda: first.instances.peers.others and second.instances.peers.others, "each other")
        entry.lease_until = time.time() + 300.0
        await reaper.follow()
        assert entry.lease_until < time.time() + 400.0
        reaper._followed -= NEVER
        await reaper.follow()
        assert entry.lease_until > time.time() + 400.0


@pytest.mark.parametrize("count", [1, 2])
async def test_while_the_store_is_away_no_lease_is_over(
    count: int, redis: Server, shelf: PaperShelf, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its client may be waiting at another server, which asks the store where the instance is, and of which the first
    has not even heard yet."""
    monkeypatch.setattr("aenv.api.reaper.LATE", 2.0)
    redis.empty()
    paper = PaperEngine()
    async with AsyncExitStack() as stack:
        servers = [await stack.enter_async_context(service(redis.url, paper, shelf, tmp_path)) for _ in range(count)]
        await until(lambda: all(len(it.instances.peers.others) == count - 1 for it in servers), "each other")
        first = servers[0].instances
        [made] = await first.create(ALICE, InstanceRequest(env_name="env", lease=4.0), wait=30)
        await until(lambda: all(made.id in it.instances.lives.entries for it in servers), "the news")
        over_at = (first.lives.entries[made.id].lease_until or 0.0) + first.lives.late + 1.0
        assert redis._process is not None
        redis._process.send_signal(signal.SIGSTOP)
        try:
            await until(lambda: time.time() > over_at, "the moment in which it would be over")
        finally:
            redis._process.send_signal(signal.SIGCONT)
        for server in servers:
            await server.instances.reaper.follow()
            assert made.id in server.instances.lives.entries
        kept = await first.lives.records.get(made.id)
        assert kept is not None
        assert kept.record.status is State.RUNNING


async def test_what_only_a_server_can_reach_that_is_gone(redis: Server, shelf: PaperShelf, tmp_path: Path) -> None:
    redis.empty()
    async with service(redis.url, PaperEngine(), shelf, tmp_path) as platform:
        await platform.instances.lives.records.write(put(record("env-theirs", server="gone"), 0))
        directory = InstanceDirectory(platform.instances, platform.tokens.authenticate)
        failure = (await directory.place("env-theirs")).failure
        assert isinstance(failure, Busy)
        assert "at the server gone" in failure.message
        api = await platform.api("alice")
        for method, path, body in (("GET", "logs", None), ("GET", "history", None), ("POST", "exec", {"command": "x"})):
            answer = await api.ask(method, f"/env-instance/env-theirs/{path}", body)
            assert (answer.status, "at the server gone" in answer.json["message"]) == (503, True)
        passed_on = await api.ask("GET", "/env-instance/env-theirs/logs", headers={"AEnv-Hop": "1"})
        assert passed_on.status == 501  # as its engine says, which has no logs


# Records of other versions


async def test_records_of_a_newer_server_are_read_and_left(store: Store) -> None:
    """What it does not know is left where it is, as long as it does not write the record itself."""
    records = Records(store)
    newer = json.loads(msgspec.json.encode(record("env-newer"))) | {"colour": "red", "wanted": {"mood": 1}}
    strange = newer | {"id": "env-strange", "status": "Dreaming"}
    for each in (newer, strange):
        await store.change(Put(INSTANCE, each["id"], json.dumps(each).encode()))
    found = await records.get("env-newer")
    assert found is not None
    assert found.record.status is State.RUNNING
    assert [kept.record.id async for kept in records.scan()] == ["env-newer"]
    kept, last = await records.since(0)
    assert [one.record.id for one in kept] == ["env-newer"]
    assert await records.since(last) == ([], last)
    written = await store.get(INSTANCE, "env-newer")
    assert written is not None
    assert json.loads(written.value)["colour"] == "red"


class SharedEngine(PaperEngine):
    """One that several servers have."""

    shared = True


async def test_what_one_server_left_to_be_read_another_one_leaves(
    redis: Server, shelf: PaperShelf, tmp_path: Path
) -> None:
    redis.empty()
    engine = SharedEngine()
    async with (
        service(redis.url, engine, shelf, tmp_path) as one,
        service(redis.url, engine, shelf, tmp_path) as other,
    ):
        dead, gone = [
            made
            for _ in range(2)
            for made in await one.instances.create(ALICE, InstanceRequest(env_name="env"), wait=30)
        ]
        entries = other.instances.lives.entries
        await until(lambda: {dead.id, gone.id} <= entries.keys(), "the news of them")
        engine.sandboxes[dead.id] = msgspec.structs.replace(engine.sandboxes[dead.id], state=State.FAILED)
        await one.instances.get(ALICE, dead.id)
        await one.instances.delete(ALICE, gone.id)
        await until(lambda: not {dead.id, gone.id} & entries.keys(), "the news of their end")
        await other.instances.lives.endings.close(30)
        assert engine.deleted == [gone.id]
        await other.instances.delete(ALICE, dead.id)
        assert engine.deleted == [gone.id, dead.id]


async def test_what_a_server_with_another_engine_ended_is_ended_here(
    redis: Server, shelf: PaperShelf, tmp_path: Path
) -> None:
    redis.empty()
    engine = SharedEngine()
    async with (
        service(redis.url, engine, shelf, tmp_path) as one,
        service(redis.url, SharedEngine(), shelf, tmp_path, name="another") as other,
    ):
        [made] = await one.instances.create(ALICE, InstanceRequest(env_name="env"), wait=30)
        await other.instances.delete(ALICE, made.id)
        await one.instances.reaper.follow()
        await until(lambda: engine.deleted == [made.id], "the end of its sandbox")
