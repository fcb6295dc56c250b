"""Who used what: seconds, processor and calls, counted once whoever counts, and what is found of it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from aenv.api import metering
from aenv.api import usage as module
from aenv.api.clock import Clock
from aenv.api.gateway.places import Answered, Place
from aenv.api.metering import Meter
from aenv.api.records import InstanceRecord
from aenv.api.usage import DAY, HOUR, KIND, MOST, OTHERS, Ledger, Used
from aenv.api.watchers import Watchers
from aenv.engines import base
from aenv.engines.failing import PaperEngine
from aenv.errors import Forbidden, Invalid, NetworkError, NotFound
from aenv.models import State
from aenv.store import Change, Put, Store, open_store
from aenv.wire import Instance, InstanceRequest, Usage
from tests.api.ground import ADMIN, ALICE, BOB, FragileStore, PaperShelf, Platform, service, until
from tests.store.servers import Server

NEVER = 1e9
"""Seconds between two entries of a meter that is told when to write."""


class WorkingEngine(PaperEngine):
    """Sandboxes that have used what a test says."""

    name = "working"

    def __init__(self) -> None:
        super().__init__()
        self.cpu: dict[str, float] = {}
        self.asked = 0

    async def used(self, id: str) -> base.Used:
        self.asked += 1
        if id not in self.sandboxes:
            raise NotFound(f"there is no sandbox {id!r}")
        return base.Used(self.cpu.get(id, 0.0), 0)


class LossyStore(FragileStore):
    """A store whose answers to changes that add to numbers are lost: after they were made, or before."""

    def __init__(self, inner: Store) -> None:
        super().__init__(inner)
        self.lost = ""

    async def change(self, *changes: Change) -> list[int]:
        lost, self.lost = (self.lost, "") if len(changes) > 1 else ("", self.lost)
        if lost == "before":
            raise NetworkError("nobody answers")
        made = await super().change(*changes)
        if lost == "after":
            raise NetworkError("nobody answers")
        return made


@pytest.fixture
def shelf() -> PaperShelf:
    made = PaperShelf()
    made.on_paper("env")
    return made


@pytest.fixture
def engine() -> WorkingEngine:
    return WorkingEngine()


@pytest.fixture
async def platform(engine: WorkingEngine, shelf: PaperShelf, tmp_path: Path) -> AsyncIterator[Platform]:
    async with service(f"sqlite:{tmp_path / 'store.db'}", engine, shelf, tmp_path) as running:
        yield running


def metered(platform: Platform, store: Store | None = None) -> Meter:
    """A meter that writes when it is told to."""
    meter = Meter(store or platform.store, platform.instances.lives, every=NEVER)
    meter.start()
    return meter


async def make(platform: Platform, experiment: str = "", **more: Any) -> Instance:
    labels = {"experiment": experiment} if experiment else None
    [made] = await platform.instances.create(ALICE, InstanceRequest(env_name="env", labels=labels, **more), wait=30)
    assert made.status == "Running", made.reason
    return made


async def record_of(platform: Platform, id: str) -> InstanceRecord:
    kept = await platform.instances.lives.records.get(id)
    assert kept is not None
    return kept.record


async def lasted(platform: Platform, id: str) -> float:
    """Seconds for which an instance that has ended ran."""
    record = await record_of(platform, id)
    assert record.over
    return record.updated_at - record.started_at


async def rows(store: Store, caller: Any = ADMIN, **wanted: Any) -> list[Usage]:
    now = time.time()
    asked = {"since": now - DAY, "until": now + DAY, "limit": 1000, "offset": 0, **wanted}
    return (await Ledger(store).find(caller, **asked))[0]


async def total(store: Store, **wanted: Any) -> Usage:
    """All of it, also when an hour ended meanwhile."""
    added = Usage(hour="", owner="")
    for row in await rows(store, **wanted):
        added.instances += row.instances
        added.instance_seconds += row.instance_seconds
        added.cpu_seconds += row.cpu_seconds
        added.calls += row.calls
    return added


def carried(id: str, method: bytes = b"POST", path: bytes = b"/mcp", status: int = 200, **place: str) -> Answered:
    found = Place(**{"id": id, "url": "unix:/x", "owner": "alice", "token": "t", **place})  # type: ignore[arg-type]
    return Answered(found, "", method, path, status, 0.0, 0.0, 0.0, b"", b"", b"")


# Seconds


async def test_an_instance_is_charged_while_it_runs_and_to_its_end(platform: Platform) -> None:
    meter = metered(platform)
    made, other = await make(platform, "first"), await make(platform)
    started = (await record_of(platform, made.id)).started_at
    before = 0.0

    async def more() -> bool:
        await meter.write(last=True)
        found = await total(platform.store, experiment="first")
        assert found.instances == 1
        assert found.instance_seconds <= time.time() - started + 0.01
        return found.instance_seconds > before

    for _ in range(3):
        await until(more, "more seconds")
        before = (await total(platform.store, experiment="first")).instance_seconds
    await platform.instances.delete(ALICE, made.id)
    for _ in range(2):
        await meter.write(last=True)
    seconds = await lasted(platform, made.id)
    assert (await total(platform.store, experiment="first")).instance_seconds == pytest.approx(seconds, abs=0.01)
    await meter.close()
    assert {(row.owner, row.experiment) for row in await rows(platform.store)} == {("alice", "first"), ("alice", "")}
    assert (await platform.instances.get(ALICE, other.id)).status == "Running"


async def test_what_begins_and_ends_between_two_entries_is_charged(platform: Platform) -> None:
    meter = metered(platform)
    await meter.write(last=True)
    made = [await make(platform) for _ in range(3)]
    for each in made:
        await platform.instances.delete(ALICE, each.id)
    await meter.write(last=True)
    found = await total(platform.store)
    assert found.instances == 3
    assert found.instance_seconds == pytest.approx(sum([await lasted(platform, each.id) for each in made]), abs=0.01)
    await meter.close()


async def test_a_server_that_died_is_gone_on_from(platform: Platform) -> None:
    dead = metered(platform)
    first, second = await make(platform), await make(platform)
    await dead.write(last=True)
    assert dead._task is not None
    dead._task.cancel()
    platform.instances.lives.listeners.remove(dead.ended)
    await platform.instances.delete(ALICE, first.id)  # while nobody looks
    again = metered(platform)
    await again.write(last=True)
    await platform.instances.delete(ALICE, second.id)
    await again.close()
    found = await total(platform.store)
    assert found.instances == 2
    lives = [await lasted(platform, each.id) for each in (first, second)]
    assert found.instance_seconds == pytest.approx(sum(lives), abs=0.02)


async def test_servers_of_one_name_charge_each_second_once(
    redis: Server, engine: WorkingEngine, shelf: PaperShelf, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    redis.empty()
    monkeypatch.setattr(metering, "LATE", 0.0)
    async with (
        service(redis.url, engine, shelf, tmp_path) as first,
        service(redis.url, engine, shelf, tmp_path) as second,
    ):
        meters = [metered(first), metered(second)]
        made = [await make(one, "shared") for one in (first, second)]
        both = [platform.instances.lives.entries for platform in (first, second)]
        await until(lambda: all(each.id in known for each in made for known in both), "each to know both")
        for number in range(10):
            engine.cpu = {each.id: number + 1.0 for each in made}
            await asyncio.gather(*(meter.write(last=True) for meter in meters))
        for each in made:
            await first.instances.delete(ALICE, each.id)
        await until(lambda: not any(each.id in known for each in made for known in both), "each to know of the ends")
        await asyncio.gather(*(meter.close() for meter in meters))
        found = await total(first.store, experiment="shared")
        assert found.instances == 2
        lives = [await lasted(first, each.id) for each in made]
        assert found.instance_seconds == pytest.approx(sum(lives), abs=0.02)
        assert 0 < found.cpu_seconds <= 20.0


async def test_what_comes_and_goes_unseen_by_the_server_that_charges_is_charged(
    redis: Server, engine: WorkingEngine, shelf: PaperShelf, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    redis.empty()
    monkeypatch.setattr(metering, "LATE", 0.0)
    async with (
        service(redis.url, engine, shelf, tmp_path) as first,
        service(redis.url, engine, shelf, tmp_path) as second,
    ):
        meters = [metered(first), metered(second)]
        for meter in meters:
            await meter.write(last=True)
        async with second.instances.reaper._learning:
            made = [await make(first, "short") for _ in range(2)]
            engine.cpu = {each.id: 2.0 for each in made}
            for each, platform in zip(made, (first, second), strict=True):
                await platform.instances.delete(ALICE, each.id)
        await second.instances.reaper.follow()
        for meter in reversed(meters):
            await meter.close()
        await second.instances.reaper.follow()
        found = await total(first.store, experiment="short")
        assert (found.instances, found.cpu_seconds) == (2, 4.0)
        lives = [await lasted(first, each.id) for each in made]
        assert found.instance_seconds == pytest.approx(sum(lives), abs=0.02)


async def test_what_is_not_started_is_not_charged(platform: Platform) -> None:
    meter = metered(platform)
    record = InstanceRecord(
        id="x",
        server="server",
        owner="alice",
        env=(await make(platform)).env,
        status=State.FAILED,
        created_at=1.0,
        updated_at=2.0,
        ttl=1.0,
        expires_at=1.0,
    )
    meter.ended(record)
    await meter.close()
    assert (await total(platform.store)).instances == 1


async def test_clocks_that_are_set_charge_nothing_that_did_not_run(platform: Platform) -> None:
    shift = 0.0
    platform.instances.lives.clock = Clock(lambda seconds: None, wall=lambda: time.time() + shift)
    meter = metered(platform)
    await make(platform)
    await meter.write(last=True)
    shift = 1800.0
    await meter.write(last=True)
    shift = 0.0
    for _ in range(2):
        await meter.write(last=True)
    await meter.close()
    assert 0 < (await total(platform.store)).instance_seconds < 600


def test_a_time_is_cut_where_an_hour_ends() -> None:
    used = Used()
    assert not used
    used.span(HOUR * 10 - 100.0, HOUR * 12 + 50.0, "me", "x")
    used.span(HOUR * 12.0, HOUR * 12 - 1.0, "me", "x")
    assert {hour: numbers["instance_seconds"] for hour, _, _, numbers in used.rows()} == {
        9: 100,
        10: 3600,
        11: 3600,
        12: 50,
    }


# Processor


async def test_processor_time_is_charged_as_it_is_read(platform: Platform, engine: WorkingEngine) -> None:
    meter = metered(platform)
    made = await make(platform, "busy")
    for seconds in (1.5, 1.5, 4.25):
        engine.cpu[made.id] = seconds
        meter._charged_at = 0.0
        await meter._read_all()
        await meter.write(last=True)
        assert (await total(platform.store, experiment="busy")).cpu_seconds == seconds
    engine.cpu[made.id] = 5.0
    await platform.instances.delete(ALICE, made.id)  # the last reading is of this moment
    await meter.close()
    assert (await total(platform.store)).cpu_seconds == 5.0


async def test_processor_time_is_charged_once_by_servers_after_each_other(
    platform: Platform, engine: WorkingEngine
) -> None:
    made = await make(platform)
    for number in range(3):
        meter = metered(platform)
        engine.cpu[made.id] = number + 1.0
        await meter._read_all()
        await meter.close()
    assert (await total(platform.store)).cpu_seconds == 3.0
    one, other = metered(platform), metered(platform)
    engine.cpu[made.id] = 7.0
    for meter in (one, other):
        meter._marks = {made.id: 3000}  # as each of them knew it
        await meter._read_all()
    await asyncio.gather(one.close(), other.close())
    assert (await total(platform.store)).cpu_seconds == 7.0


async def test_an_engine_that_cannot_tell_is_not_asked_again(shelf: PaperShelf, tmp_path: Path) -> None:
    async with service(f"sqlite:{tmp_path / 'store.db'}", PaperEngine(), shelf, tmp_path) as platform:
        meter = metered(platform)
        await make(platform)
        await meter._read_all()
        assert not meter._tells
        await meter.close()
        assert (await total(platform.store)).cpu_seconds == 0


async def test_marks_of_what_is_long_gone_are_forgotten(platform: Platform, engine: WorkingEngine) -> None:
    meter = metered(platform)
    gone, stays = await make(platform), await make(platform)
    engine.cpu = {gone.id: 2.0, stays.id: 3.0}
    await meter._read_all()
    await meter.write(last=True)
    await platform.instances.delete(ALICE, gone.id)
    kept = await platform.instances.lives.records.get(gone.id)
    assert kept is not None
    await platform.instances.lives.records.remove(kept)
    await meter.write()
    assert await platform.store.counts(f"{KIND}/cpu/server") == {stays.id: {"ms": 3000.0}}
    await meter.close()
    assert (await total(platform.store)).cpu_seconds == 5.0


# Calls


@pytest.mark.parametrize(
    ("call", "count"),
    [
        (carried("x"), 1),
        (carried("x", path=b"/tools/echo"), 1),
        (carried("x", path=b"/task/reward?name=a"), 1),
        (carried("x", path=b"/functions/f"), 1),
        (carried("x", b"GET", b"/functions/f"), 1),
        (carried("x", status=500), 1),
        (carried("x", status=0), 1),
        (carried("x", b"GET"), 0),
        (carried("x", b"GET", b"/tools"), 0),
        (carried("x", path=b"/files"), 0),
        (carried("x", status=401), 0),
        (carried("x", status=403), 0),
        (carried("x", url="http://other:8081/env-instance/x"), 0),
    ],
)
async def test_what_is_a_call(platform: Platform, call: Answered, count: int) -> None:
    meter = metered(platform)
    Watchers(meter, meter).answered(call)
    await meter.close()
    assert (await total(platform.store, owner="alice")).calls == 2 * count


async def test_calls_are_counted_for_the_experiment_of_their_instance(platform: Platform) -> None:
    meter = metered(platform)
    one, other, ended = [await make(platform, name) for name in ("one", "", "ended")]
    for _ in range(3):
        meter.answered(carried(one.id))
    meter.answered(carried(other.id))
    meter.answered(carried(ended.id))
    await platform.instances.delete(ALICE, ended.id)
    await meter.write()
    meter.answered(carried(one.id))
    await meter.close()
    for experiment, calls in (("one", 4), ("", 1), ("ended", 1)):
        assert (await total(platform.store, experiment=experiment)).calls == calls


@pytest.mark.parametrize("lost", ["before", "after"])
async def test_calls_whose_entry_was_not_answered_are_counted_once(platform: Platform, lost: str) -> None:
    store = LossyStore(platform.store)
    meter = metered(platform, store)
    for _ in range(3):
        meter.answered(carried("x"))
        store.lost = lost
        await meter.write(last=True)
        meter.answered(carried("x"))
    await meter.write(last=True)
    await meter.close()
    assert (await total(platform.store)).calls == 6


async def test_what_a_store_does_not_take_is_written_later(platform: Platform) -> None:
    store = FragileStore(platform.store)
    meter = metered(platform, store)
    made = await make(platform)
    store.down = True
    meter.answered(carried(made.id))
    await meter.write(last=True)
    await platform.instances.delete(ALICE, made.id)
    store.down, store.full = False, True
    meter.answered(carried(made.id))
    await meter.write(last=True)
    assert await rows(platform.store) == []
    store.full = False
    await meter.close()
    found = await total(platform.store)
    assert (found.instances, found.calls) == (1, 2)
    assert found.instance_seconds == pytest.approx(await lasted(platform, made.id), abs=0.01)


async def test_a_meter_writes_by_itself(platform: Platform) -> None:
    meter = Meter(platform.store, platform.instances.lives, every=0.05)
    meter.start()
    made = await make(platform)
    meter.answered(carried(made.id))

    async def written() -> bool:
        found = await total(platform.store)
        return found.calls == 1 and found.instance_seconds > 0 and found.instances == 1

    await until(written, "an entry")
    await meter.close()


# What is found, and forgotten


async def fill(store: Store, *uses: tuple[float, str, str, float]) -> None:
    ledger, used = Ledger(store), Used()
    for at, owner, experiment, calls in uses:
        used.add(at, owner, experiment, "calls", calls)
    await store.change(*ledger.changes(used))


async def test_everybody_sees_their_own_and_an_admin_all(store: Store) -> None:
    now = time.time()
    strange = "ex/per:{i}ment 🎈"
    await fill(store, (now, "alice", strange, 1), (now, "alice", "", 2), (now, "bob", "", 3))
    assert [(row.owner, row.experiment, row.calls) for row in await rows(store)] == [
        ("alice", "", 2),
        ("alice", strange, 1),
        ("bob", "", 3),
    ]
    assert [row.calls for row in await rows(store, BOB)] == [3]
    assert [row.calls for row in await rows(store, ALICE, owner="alice")] == [2, 1]
    assert [row.calls for row in await rows(store, owner="bob")] == [3]
    assert [row.calls for row in await rows(store, experiment="")] == [2, 3]
    assert [row.calls for row in await rows(store, ALICE, experiment=strange)] == [1]
    with pytest.raises(Forbidden, match="'bob' are not yours"):
        await rows(store, ALICE, owner="bob")
    with pytest.raises(Invalid, match="not an owner's name"):
        await rows(store, owner="a/b")


async def test_hours_are_found_by_time_the_newest_first_in_pages(store: Store) -> None:
    noon = int(time.time() // DAY) * DAY + 12 * HOUR
    await fill(store, *((noon + hour * HOUR + 60.0, "alice", "", 100 + hour) for hour in range(-30, 30)))
    found = await rows(store, since=noon - 2 * HOUR + 1, until=noon + HOUR)
    assert [row.calls for row in found] == [100, 99, 98]
    assert [row.hour[11:16] for row in found] == ["12:00", "11:00", "10:00"]
    everything = {"since": noon - 2.0 * DAY, "until": noon + 2.0 * DAY}
    page, count = await Ledger(store).find(ALICE, **everything, limit=7, offset=5)
    assert count == 60
    assert [row.calls for row in page] == list(range(124, 117, -1))
    assert await Ledger(store).find(ALICE, **everything, limit=7, offset=60) == ([], 60)


@pytest.mark.parametrize(
    ("since", "until", "message"),
    [(10.0, 10.0, "is not before"), (20.0, 10.0, "is not before"), (0.0, 101.0 * DAY, "more than 100 days")],
)
async def test_times_that_cannot_be_asked_for(store: Store, since: float, until: float, message: str) -> None:
    with pytest.raises(Invalid, match=message):
        await rows(store, since=since, until=until)


async def test_experiments_without_end_are_one(store: Store) -> None:
    ledger, used, now = Ledger(store), Used(), float(int(time.time() // HOUR) * HOUR)
    for number in range(MOST + 10):
        used.add(now, "alice", f"{number:05}", "calls", 1)
    used.add(now, "bob", "his", "calls", 1)
    await store.change(*ledger.changes(used))
    counts = {row.experiment: row.calls for row in await rows(store, limit=2000)}
    assert len(counts) == MOST + 2
    assert (counts[OTHERS], counts["his"]) == (10, 1)
    used = Used()
    used.add(now + HOUR, "alice", "new", "calls", 1)
    await store.change(*ledger.changes(used))
    assert "new" in {row.experiment for row in await rows(store, limit=2000)}


async def test_what_is_too_old_is_forgotten_by_one_of_several(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_ROWS", 5)
    today = int(time.time() // DAY)
    now = float(today * DAY + HOUR)
    old, kept = (today - 403) * DAY, (today - 400) * DAY
    await Ledger(store).forget(now)
    await store.change(Put(KIND, "oldest", b"%d" % (today - 403)))
    await fill(store, *((old + hour * HOUR, "alice", "", 7.5) for hour in range(12)), (kept, "alice", "", 1))
    for _ in range(6):
        await asyncio.gather(*(Ledger(store).forget(now) for _ in range(3)))
    assert [row.calls for row in await rows(store, since=old - DAY, until=old + 10.0 * DAY)] == [1]
    oldest = await store.get(KIND, "oldest")
    assert oldest is not None
    assert int(oldest.value) == today - 400


async def test_it_is_kept_for_a_restart(tmp_path: Path) -> None:
    url = f"sqlite:{tmp_path / 'store.db'}"
    async with await open_store(url) as store:
        await fill(store, (time.time(), "alice", "x", 4))
    async with await open_store(url) as store:
        assert (await total(store)).calls == 4
