"""How instances end by themselves: time to live, leases, clocks that are set, and what does not agree."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from aenv.api import lives
from aenv.api.clock import Clock
from aenv.api.directory import InstanceDirectory
from aenv.api.records import InstanceRecord, Kept, put
from aenv.engines.failing import FailingEngine, NeverReadyEngine, PaperEngine
from aenv.errors import AEnvError, Conflict, NetworkError, NotFound, SandboxLost, StartFailed, Unsupported
from aenv.models import EnvRef, Sandbox, SandboxSpec, State
from aenv.store import Store, open_store
from aenv.wire import Expose, Instance, InstanceRequest
from tests.api.ground import (
    ADMIN,
    ALICE,
    BOB,
    FragileStore,
    GatedEngine,
    PaperShelf,
    Platform,
    StuckEngine,
    service,
    until,
)
from tests.store.servers import Server

HOUR = 3600.0


@pytest.fixture
def shelf() -> PaperShelf:
    made = PaperShelf()
    made.on_paper("env")
    return made


@pytest.fixture
def paper() -> StuckEngine:
    return StuckEngine()


@pytest.fixture
async def platform(paper: StuckEngine, shelf: PaperShelf, tmp_path: Path) -> AsyncIterator[Platform]:
    async with service(f"sqlite:{tmp_path / 'store.db'}", paper, shelf, tmp_path) as running:
        yield running


@pytest.fixture
async def shared(store: Store, paper: StuckEngine, shelf: PaperShelf, tmp_path: Path) -> AsyncIterator[Platform]:
    """A platform on each kind of store."""
    async with service(store, paper, shelf, tmp_path) as running:
        yield running


async def make(platform: Platform, **more: Any) -> Instance:
    [made] = await platform.instances.create(ALICE, InstanceRequest(env_name="env", **more), wait=30)
    assert made.status == "Running", made.reason
    return made


async def status(platform: Platform, id: str) -> str:
    return (await platform.instances.get(ALICE, id)).status


async def over(platform: Platform, id: str) -> Instance:
    async def ended() -> Instance | None:
        found = await platform.instances.get(ALICE, id)
        return found if found.status in ("Failed", "Terminated") else None

    found: Instance = await until(ended, "its end")
    return found


async def test_a_time_to_live_ends(platform: Platform, paper: StuckEngine) -> None:
    short, long = await make(platform, ttl=2), await make(platform)
    ended = await over(platform, short.id)
    assert (ended.status, ended.reason) == ("Terminated", "its time to live of 2 s is over")
    await until(lambda: short.id not in paper.sandboxes, "the end of its sandbox")
    assert await status(platform, long.id) == "Running"
    with pytest.raises(Conflict, match="time to live"):
        await platform.instances.extend(ALICE, short.id, "5m")


async def test_it_is_extended_while_it_lives(platform: Platform, paper: StuckEngine) -> None:
    made = await make(platform, ttl=5)
    renewed = await platform.instances.extend(ALICE, made.id, "1h")
    assert renewed.expires_at > made.expires_at
    assert (await platform.instances.get(ALICE, made.id)).expires_at == renewed.expires_at
    assert (paper.sandboxes[made.id].expires_at or 0) > time.time() + HOUR - 60
    kept = await platform.instances.lives.records.get(made.id)
    assert kept is not None
    assert kept.record.expires_at > time.time() + HOUR - 60
    await platform.instances.extend(ALICE, made.id, 0.2)
    assert (await over(platform, made.id)).status == "Terminated"
    with pytest.raises(AEnvError, match="30 days"):
        await platform.instances.extend(ALICE, made.id, "40d")


async def test_a_lease_is_kept_up_by_calls_and_renewals(platform: Platform) -> None:
    left, used, waited = [await make(platform, lease=2.0) for _ in range(3)]
    directory = InstanceDirectory(platform.instances, platform.tokens.authenticate)
    entry = platform.instances.lives.entries[waited.id]
    entry.waiting += 1  # as while somebody waits for an answer

    async def ended() -> bool:
        directory.touched(used.id)
        assert (await platform.instances.renew(ALICE, used.id)).lease_expires_at
        return await status(platform, left.id) == "Terminated"

    await until(ended, "the end of the one that nobody used")
    assert "not heard of for 2 s" in (await platform.instances.get(ALICE, left.id)).reason
    directory.touched(used.id)
    assert await status(platform, used.id) == await status(platform, waited.id) == "Running"
    entry.waiting -= 1
    assert (await over(platform, used.id)).status == (await over(platform, waited.id)).status == "Terminated"
    with pytest.raises(Conflict, match="not heard of"):
        await platform.instances.renew(ALICE, used.id)
    assert (await platform.instances.renew(ALICE, (await make(platform)).id)).lease_expires_at == ""


async def test_renewed_leases_are_written_together(shared: Platform) -> None:
    made = [await make(shared, lease=600.0) for _ in range(3)]
    lives = shared.instances.lives
    for each in made[:2]:
        lives.entries[each.id].lease_until = time.time() + 700
    before = {each.id: await lives.records.get(each.id) for each in made}
    # One of them was changed by another server in between.
    kept = before[made[0].id]
    assert kept is not None
    await lives.records.save(kept, msgspec.structs.replace(kept.record, expires_at=kept.record.expires_at + 5))
    await shared.instances.reaper.write()
    after = {each.id: await lives.records.get(each.id) for each in made}
    assert [(after[each.id].record.lease_until or 0) > time.time() + 650 for each in made] == [True, True, False]  # type: ignore[union-attr]
    assert after[made[0].id].record.expires_at == kept.record.expires_at + 5  # type: ignore[union-attr]
    assert after[made[2].id] == before[made[2].id]


async def test_who_leaves_during_a_create_with_a_lease_leaves_nothing(shelf: PaperShelf, tmp_path: Path) -> None:
    engine = NeverReadyEngine()
    async with service(f"sqlite:{tmp_path / 'store.db'}", engine, shelf, tmp_path) as platform:
        api = await platform.api("alice")
        asking = asyncio.create_task(api.create("env", lease=1.0, wait=60))
        await until(lambda: engine.sandboxes, "the engine's turn")
        [id] = engine.sandboxes
        asking.cancel()
        await asyncio.wait((asking,))
        ended = await over(platform, id)
        assert ended.status == "Terminated"
        await until(lambda: not engine.sandboxes, "its end")


@pytest.mark.parametrize("jump", [100 * HOUR, -100 * HOUR])
async def test_a_clock_that_is_set_ends_nothing_and_prolongs_nothing(
    platform: Platform, paper: StuckEngine, jump: float
) -> None:
    lives = platform.instances.lives
    ahead = 0.0
    lives.clock = Clock(lives.moved, wall=lambda: time.time() + ahead)
    made = await make(platform, ttl=HOUR, lease=HOUR)
    short = await make(platform, ttl=2.0)
    ahead = jump
    later = await make(platform, ttl=HOUR)
    lives.changed.set()
    assert (await over(platform, short.id)).status == "Terminated"
    assert await status(platform, made.id) == await status(platform, later.id) == "Running"
    await platform.instances.reaper.write()
    for each in (made, later):
        kept = await lives.records.get(each.id)
        assert kept is not None
        assert abs(kept.record.expires_at - (time.time() + jump + HOUR)) < 600
        assert abs(kept.record.deadline - (time.time() + jump + HOUR)) < 600


@pytest.mark.parametrize("jump", [100 * HOUR, -100 * HOUR])
async def test_a_clock_that_is_set_is_followed_once_by_servers_of_one_name(
    redis: Server, shelf: PaperShelf, tmp_path: Path, jump: float
) -> None:
    redis.empty()
    paper, ahead = PaperEngine(), 0.0
    async with (
        service(redis.url, paper, shelf, tmp_path) as first,
        service(redis.url, paper, shelf, tmp_path) as second,
    ):
        both = [platform.instances for platform in (first, second)]
        for instances in both:
            instances.lives.clock = Clock(instances.lives.moved, wall=lambda: time.time() + ahead)
        made = [await make(first, ttl=HOUR, lease=HOUR), await make(second, ttl=HOUR)]
        entries = [instances.lives.entries for instances in both]
        await until(lambda: all(each.id in known for each in made for known in entries), "each to know both")
        ahead = jump
        both[0].lives.clock.now()
        for _ in range(3):
            await asyncio.gather(*(instances.reaper.write() for instances in both))
            for instances in both:
                await instances.reaper.follow()
        for each in made:
            kept = await both[0].lives.records.get(each.id)
            assert kept is not None
            assert kept.record.status is State.RUNNING
            assert abs(kept.record.expires_at - (time.time() + jump + HOUR)) < 600
            for known in entries:
                assert abs(known[each.id].record.expires_at - (time.time() + jump + HOUR)) < 600


def test_a_clock_tells_a_jump_from_its_own_drift() -> None:
    now = {"wall": 1000.0, "steady": 10.0}
    moved: list[float] = []
    clock = Clock(moved.append, wall=lambda: now["wall"], steady=lambda: now["steady"])
    for wall, steady in ((1060.5, 70.0), (1120.2, 130.0), (4720.2, 130.0), (4721.2, 131.0), (1121.2, 131.0)):
        now.update(wall=wall, steady=steady)
        assert clock.now() == wall
    assert moved == [3600.0, -3600.0]


async def test_one_that_does_not_end_is_in_nobodys_way(platform: Platform, paper: StuckEngine) -> None:
    stuck, other, expiring = await make(platform), await make(platform), await make(platform, ttl=2.0)
    paper.stuck.update((stuck.id, expiring.id))
    deleting = asyncio.create_task(platform.instances.delete(ALICE, stuck.id))
    await platform.instances.delete(ALICE, other.id)
    assert other.id not in paper.sandboxes
    assert (await over(platform, expiring.id)).status == "Terminated"
    assert await status(platform, stuck.id) == "Terminated"  # nobody reaches it any more
    assert not deleting.done()
    deleting.cancel()  # that, too, leaves it to be ended
    last = await make(platform)
    await platform.instances.delete(ALICE, last.id)
    await asyncio.wait((deleting,), timeout=0.05)
    assert not deleting.done()
    paper.stuck.clear()


async def test_an_end_that_fails_is_tried_again(
    store: Store, shelf: PaperShelf, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("aenv.api.endings._PAUSE", 0.01)
    engine = FailingEngine(delete=AEnvError("not now"), times=3)
    async with service(store, engine, shelf, tmp_path) as platform:
        made = await make(platform)
        await platform.instances.delete(ALICE, made.id)
        assert isinstance(engine.inner, PaperEngine)
        assert not engine.inner.sandboxes
        await platform.instances.delete(ALICE, made.id)  # that it is over already is fine
        with pytest.raises(NotFound):
            await platform.instances.delete(ALICE, "nothing")


async def test_a_start_is_ended_in_its_middle(store: Store, shelf: PaperShelf, tmp_path: Path) -> None:
    engine = GatedEngine()
    async with service(store, engine, shelf, tmp_path) as platform:
        [made] = await platform.instances.create(ALICE, InstanceRequest(env_name="env"))
        await until(lambda: engine.asked, "the engine's turn")
        await platform.instances.delete(ALICE, made.id)
        assert await status(platform, made.id) == "Terminated"
        engine.gate.set()
        await asyncio.sleep(0)
        assert not engine.sandboxes


async def test_restarted_it_finds_what_lives_and_notes_what_does_not(
    url: str, shelf: PaperShelf, tmp_path: Path
) -> None:
    paper = PaperEngine()
    async with await open_store(url) as store:
        async with service(store, paper, shelf, tmp_path) as platform:
            alive, lost, ended = [await make(platform, lease=60.0) for _ in range(3)]
            overdue = await make(platform, ttl=HOUR)
            kept = await platform.instances.lives.records.get(overdue.id)
            assert kept is not None
        await platform.instances.lives.records.save(kept, msgspec.structs.replace(kept.record, expires_at=1.0))
        leased = await platform.instances.lives.records.get(alive.id)
        assert leased is not None
        late = msgspec.structs.replace(leased.record, lease_until=time.time() - 30)  # nobody could renew it
        await platform.instances.lives.records.save(leased, late)
        del paper.sandboxes[lost.id]
        paper.sandboxes[ended.id] = msgspec.structs.replace(
            paper.sandboxes[ended.id], state=State.FAILED, reason="out of memory: 1 MiB"
        )
        spec = SandboxSpec(env=EnvRef("env"), labels={"aenv/server": "server"})
        await paper.create("env-stray00000", spec)
        await paper.create("env-others0000", msgspec.structs.replace(spec, labels={"aenv/server": "other"}))
    async with await open_store(url) as store, service(store, paper, shelf, tmp_path) as platform:
        assert await status(platform, alive.id) == "Running"
        assert (await platform.instances.get(ALICE, lost.id)).reason.startswith("lost")
        assert (await over(platform, overdue.id)).status == "Terminated"
        failed = await platform.instances.get(ALICE, ended.id)
        assert (failed.status, failed.reason) == ("Failed", "out of memory: 1 MiB")
        expected = {alive.id, ended.id, "env-others0000"}  # what failed is kept, for its logs
        await until(lambda: set(paper.sandboxes) == expected, "the end of the strays")


async def test_what_dies_is_noticed(shared: Platform, paper: StuckEngine) -> None:
    first, second = await make(shared), await make(shared)
    directory = InstanceDirectory(shared.instances, shared.tokens.authenticate)
    assert directory.known(first.id) is not None
    told: list[str] = []
    shared.instances.lives.listeners.append(lambda record: told.append(record.id))
    paper.sandboxes[first.id] = msgspec.structs.replace(
        paper.sandboxes[first.id], state=State.FAILED, reason="it ended with exit code 3"
    )
    del paper.sandboxes[second.id]
    failed = await shared.instances.get(ALICE, first.id)
    assert (failed.status, failed.reason) == ("Failed", "it ended with exit code 3")
    assert directory.known(first.id) is None
    await shared.instances.reaper.sweep()
    assert (await shared.instances.get(ALICE, second.id)).reason.startswith("lost")
    assert told == [first.id, second.id]


async def test_what_is_kept_of_a_dead_one_goes_when_it_is_deleted(shared: Platform, paper: StuckEngine) -> None:
    made = await make(shared)
    paper.sandboxes[made.id] = msgspec.structs.replace(paper.sandboxes[made.id], state=State.FAILED, reason="exit 3")
    assert await status(shared, made.id) == "Failed"
    assert paper.deleted == []  # its logs can be read
    with pytest.raises(NotFound):
        await shared.instances.delete(BOB, made.id)
    assert paper.deleted == []
    await shared.instances.delete(ALICE, made.id)
    assert paper.deleted == [made.id]
    found = await shared.instances.get(ALICE, made.id)
    assert (found.status, found.reason) == ("Failed", "exit 3")


async def test_an_engine_that_does_not_answer_has_lost_nothing(store: Store, shelf: PaperShelf, tmp_path: Path) -> None:
    engine = FailingEngine(get=AEnvError("no answer"), find=AEnvError("no answer"))
    async with service(store, engine, shelf, tmp_path) as platform:
        made = await make(platform)
        with pytest.raises(AEnvError, match="no answer"):
            await platform.instances.reaper.sweep()
        assert await status(platform, made.id) == "Running"


async def test_ended_records_are_forgotten_and_lost_ones_written_again(
    shared: Platform, paper: StuckEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    gone, alive = await make(shared), await make(shared)
    await shared.instances.delete(ALICE, gone.id)
    await shared.instances.reaper.sweep()
    assert await status(shared, gone.id) == "Terminated"
    monkeypatch.setattr("aenv.api.reaper.KEPT_FOR", -1.0)
    records = shared.instances.lives.records
    kept = await records.get(alive.id)
    assert kept is not None
    await records.remove(kept)
    await shared.instances.reaper.sweep()
    with pytest.raises(NotFound):
        await status(shared, gone.id)
    again = await records.get(alive.id)
    assert again is not None
    assert again.record == kept.record
    await shared.instances.delete(ALICE, alive.id)
    assert not paper.sandboxes


async def test_a_server_that_is_gone_is_inherited_only_after_a_while(
    shared: Platform, paper: StuckEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = await make(shared)
    records, reaper = shared.instances.lives.records, shared.instances.reaper
    kept = await records.get(made.id)
    assert kept is not None
    theirs = [
        msgspec.structs.replace(kept.record, id=f"env-{expires_at:g}", server="other", expires_at=expires_at)
        for expires_at in (1.0, 2e10)
    ]
    await records.write(*(put(record, 0) for record in theirs))

    async def states() -> list[State]:
        found = [await records.get(record.id) for record in theirs]
        return [each.record.status for each in found if each is not None]

    for _ in range(3):
        await reaper.sweep()
    assert await states() == [State.RUNNING, State.RUNNING]
    monkeypatch.setattr("aenv.api.reaper.SILENT", -1.0)
    await reaper.sweep()
    assert await states() == [State.TERMINATED, State.RUNNING]
    assert await status(shared, made.id) == "Running"


async def test_what_the_gateway_is_told(store: Store, shelf: PaperShelf, tmp_path: Path) -> None:
    engine = GatedEngine()
    async with service(store, engine, shelf, tmp_path) as platform:
        directory = InstanceDirectory(platform.instances, platform.tokens.authenticate)
        [made] = await platform.instances.create(ALICE, InstanceRequest(env_name="env"))
        assert directory.known(made.id) is None
        asking = asyncio.create_task(directory.place(made.id))
        await until(lambda: engine.asked, "the engine's turn")
        engine.gate.set()
        place = await asking
        assert (place.id, place.url, place.owner, place.failure) == (
            made.id,
            f"unix:/nonexistent/{made.id}",
            "alice",
            None,
        )
        assert place.token == made.owner_token
        assert directory.known(made.id) == place
        with pytest.raises(NotFound):
            await directory.place("nothing")
        with pytest.raises(NotFound):
            await directory.place("../\0")
        assert directory.known("nothing") is None
        directory.touched("nothing")
        await platform.instances.delete(ALICE, made.id)
        assert directory.known(made.id) is None
        assert isinstance((await directory.place(made.id)).failure, SandboxLost)


async def test_the_gateway_is_told_of_others_and_of_failures(
    store: Store, shelf: PaperShelf, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("aenv.api.directory._PATIENCE", 0.05)
    engine = FailingEngine(create=StartFailed("no such image"), times=1)
    async with service(store, engine, shelf, tmp_path) as platform:
        directory = InstanceDirectory(platform.instances, platform.tokens.authenticate)
        [failed] = await platform.instances.create(ALICE, InstanceRequest(env_name="env"), wait=30)
        place = await directory.place(failed.id)
        assert isinstance(place.failure, StartFailed)
        assert "no such image" in place.failure.message
        kept = await platform.instances.lives.records.get((await make(platform)).id)
        assert kept is not None
        record = msgspec.structs.replace(kept.record, id="env-theirs", server="other", url="http://10.0.0.1:8081")
        waiting = msgspec.structs.replace(record, id="env-waiting", status=State.CREATING, reason="no place")
        await platform.instances.lives.records.write(put(record, 0), put(waiting, 0))
        place = await directory.place("env-theirs")
        assert (place.url, place.failure) == ("http://10.0.0.1:8081", None)
        assert directory.known("env-theirs") == place
        directory.touched("env-theirs")
        failure = (await directory.place("env-waiting")).failure
        assert isinstance(failure, NetworkError)
        assert "no place" in failure.message


async def test_a_store_that_is_away_ends_nothing_too_early(shelf: PaperShelf, tmp_path: Path) -> None:
    paper = PaperEngine()
    async with await open_store(f"sqlite:{tmp_path / 'store.db'}") as inner:
        store = FragileStore(inner)
        async with service(store, paper, shelf, tmp_path) as platform:
            made = await make(platform, ttl=2.0)
            store.down = True
            await until(lambda: platform.instances.reaper._expiring, "the end of its time")
            with pytest.raises(NetworkError):
                await platform.instances.reaper.sweep()
            assert made.id in paper.sandboxes
            store.down = False
            assert (await over(platform, made.id)).status == "Terminated"
    assert not paper.sandboxes


async def test_a_lease_that_another_server_renewed_is_renewed(redis: Server, shelf: PaperShelf, tmp_path: Path) -> None:
    redis.empty()
    paper = PaperEngine()
    async with (
        service(redis.url, paper, shelf, tmp_path, name="one") as first,
        service(redis.url, PaperEngine(), shelf, tmp_path, name="two") as second,
    ):
        made = await make(first, lease=60.0)
        entry = first.instances.lives.entries[made.id]
        directory = InstanceDirectory(second.instances, second.tokens.authenticate)
        await directory.place(made.id)
        directory.touched(made.id)

        async def written() -> bool:
            kept = await first.instances.lives.records.get(made.id)
            return kept is not None and kept.revision > entry.kept.revision

        await until(written, "what the other server wrote")
        entry.lease_until = time.time() - 1.0  # as far as is known here
        first.instances.lives.changed.set()
        await until(lambda: (entry.lease_until or 0) > time.time() + 30, "what the other server knows")
        assert await status(first, made.id) == "Running"
        assert made.id in paper.sandboxes


async def test_what_another_server_extends_lives_on(redis: Server, shelf: PaperShelf, tmp_path: Path) -> None:
    redis.empty()
    paper = PaperEngine()
    async with (
        service(redis.url, paper, shelf, tmp_path, name="one") as first,
        service(redis.url, PaperEngine(), shelf, tmp_path, name="two") as second,
    ):
        made = await make(first, ttl=60)
        await second.instances.extend(ALICE, made.id, HOUR)
        assert await status(second, made.id) == "Running"
        await first.instances.reaper.sweep()
        assert first.instances.lives.entries[made.id].record.expires_at > time.time() + HOUR / 2
        await until(
            lambda: (paper.sandboxes[made.id].expires_at or 0) > time.time() + HOUR / 2, "what its engine is told"
        )


class StubbornEngine(PaperEngine):
    """A start that is to end goes on until all of so many are to."""

    def __init__(self, together: int) -> None:
        super().__init__()
        self.begun = 0
        self._ending = asyncio.Barrier(together)

    async def create(self, id: str, spec: SandboxSpec) -> Sandbox:
        self.begun += 1
        try:
            await asyncio.Event().wait()
        finally:
            await self._ending.wait()
        raise AssertionError("it does not come so far")


async def test_ends_of_another_server_do_not_wait_for_each_other(
    redis: Server, shelf: PaperShelf, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lives, "PATIENCE", 3600.0)
    redis.empty()
    stubborn = StubbornEngine(2)
    async with (
        service(redis.url, stubborn, shelf, tmp_path, name="one") as first,
        service(redis.url, PaperEngine(), shelf, tmp_path, name="two") as second,
    ):
        made = await first.instances.create(ALICE, InstanceRequest(env_name="env", count=2))
        await until(lambda: stubborn.begun == 2, "both starts")
        for each in made:
            await second.instances.delete(ALICE, each.id)
        async with asyncio.timeout(60):
            await first.instances.reaper.sweep()
        assert not first.instances.lives.entries


async def test_a_port_is_exposed_as_long_as_the_instance_lives(platform: Platform) -> None:
    made = await make(platform, ttl=600)
    with pytest.raises(Unsupported, match="ports"):
        await platform.instances.expose(ALICE, made.id, Expose(port=80))
    platform.instances.exposed_url = lambda name, port, until: f"http://{port}.{name}.localhost/{until:.0f}"
    exposed = await platform.instances.expose(ALICE, made.id, Expose(port=80))
    assert exposed.url.startswith(f"http://80.{made.id}.localhost/")
    assert exposed.expires_at == made.expires_at
    assert (await platform.instances.expose(ALICE, made.id, Expose(port=80, ttl="1m"))).expires_at < made.expires_at
    assert (await platform.instances.expose(ALICE, made.id, Expose(port=80, ttl="1d"))).expires_at == made.expires_at
    for port in (0, 65536):
        with pytest.raises(AEnvError, match="port"):
            await platform.instances.expose(ALICE, made.id, Expose(port=port))


async def test_verbs_of_later_are_not_there_yet(platform: Platform) -> None:
    made = await make(platform)
    with pytest.raises(Unsupported, match="fork"):
        await platform.instances.cannot(ALICE, made.id, "fork")
    assert (await platform.instances.list(ADMIN, limit=10, offset=0))[1] == 1


def test_a_record_knows_its_deadline() -> None:
    kept = Kept(
        InstanceRecord(
            id="a",
            server="s",
            owner="o",
            env=PaperShelf().on_paper("env"),
            status=State.RUNNING,
            created_at=0.0,
            updated_at=0.0,
            ttl=10.0,
            expires_at=10.0,
            lease=5.0,
            lease_until=5.0,
        ),
        1,
    )
    assert kept.record.deadline == 5.0
    assert msgspec.structs.replace(kept.record, lease_until=None).deadline == 10.0
