"""A full platform: what has no room waits, with its place, and is admitted in turn, by whichever server is there."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from aenv.api import queue
from aenv.auth.callers import Caller
from aenv.client.api import ApiClient
from aenv.engines.failing import PaperEngine
from aenv.engines.process.engine import ProcessEngine
from aenv.errors import Invalid, RateLimited
from aenv.models import State
from aenv.store import Store, open_store
from aenv.wire import Instance, InstanceRequest, QuotaRequest
from tests.api.counting import counts, summed, used
from tests.api.ground import (
    ADMIN,
    ALICE,
    BOB,
    FragileStore,
    GatedEngine,
    PaperShelf,
    Platform,
    Shelf,
    service,
    short_home,
    until,
)
from tests.store.servers import Server
from tests.support import ROOT


@pytest.fixture
def shelf() -> PaperShelf:
    made = PaperShelf()
    made.on_paper("env")
    return made


@pytest.fixture
async def platform(store: Store, shelf: PaperShelf, tmp_path: Path) -> AsyncIterator[Platform]:
    async with service(store, PaperEngine(), shelf, tmp_path) as running:
        yield running


@pytest.fixture
async def alone(shelf: PaperShelf, tmp_path: Path) -> AsyncIterator[Platform]:
    """Where it makes no difference which store there is."""
    async with service(f"sqlite:{tmp_path / 'store.db'}", PaperEngine(), shelf, tmp_path) as running:
        yield running


async def make(platform: Platform, caller: Caller = ALICE, *, wait: float = 0.0, **more: Any) -> list[Instance]:
    return await platform.instances.create(caller, InstanceRequest(env_name="env", **more), wait=wait)


async def one(platform: Platform, caller: Caller = ALICE, **more: Any) -> Instance:
    return (await make(platform, caller, **more))[0]


async def limit(platform: Platform, subject: str = "platform", **limits: Any) -> None:
    await platform.instances.quotas.set(subject, QuotaRequest(**limits), 0.0)


async def get(platform: Platform, made: Instance, wait: float = 0.0) -> Instance:
    return await platform.instances.get(ADMIN, made.id, wait=wait)


async def waits(platform: Platform, *made: Instance) -> bool:
    """Whether all of these wait in the queue."""
    found = [await platform.instances.lives.records.get(each.id) for each in made]
    return all(kept is not None and kept.record.queued is not None and not kept.record.over for kept in found)


async def agrees(store: Store) -> None:
    async def same() -> bool:
        return await counts(store) == await summed(store)

    await until(same, "numbers that are the sum of the records")


# Waiting


async def test_what_has_no_room_waits_for_its_turn(platform: Platform) -> None:
    await limit(platform, instances=2)
    first, second = await one(platform, wait=30), await one(platform, wait=30)
    third, fourth = await one(platform, labels={"experiment": "x"}), await one(platform, wait=0.1)
    assert (third.status, third.position, third.estimate) == ("Pending", 1, None)
    assert third.reason == "waits in the queue: 1st" or third.reason.startswith("waits in the queue: 1st (platform may")
    assert third.owner_token
    seen = await get(platform, fourth)
    assert (seen.status, seen.position) == ("Pending", 2)
    assert seen.reason == "waits in the queue: 2nd (platform may have 2 instances)"
    listed, _ = await platform.instances.list(ALICE, status=["pending"], limit=10, offset=0)
    assert sorted(each.position or 0 for each in listed) == [1, 2]
    assert await used(platform.store) == (2, 2)
    await platform.instances.delete(ALICE, first.id)
    ran = await get(platform, third, wait=30)
    assert (ran.status, ran.position, ran.reason) == ("Running", None, "")
    assert ran.phases["queue"] > 0
    assert await used(platform.store) == (2, 1)
    await platform.instances.delete(ALICE, second.id)
    assert (await get(platform, fourth, wait=30)).status == "Running"
    assert await used(platform.store) == (2, 0)
    await agrees(platform.store)


async def test_an_answer_may_wait_for_all_of_that(platform: Platform) -> None:
    await limit(platform, instances=1)
    first = await one(platform, wait=30)
    waiting = asyncio.create_task(one(platform, wait=60, lease=1.0))
    await until(lambda: len(platform.instances.lives.queue) == 1, "its place in the queue")
    left = await one(platform, lease=2.0)

    async def over() -> bool:
        return (await get(platform, left)).status == "Terminated"

    await until(over, "the end of one that nobody waits for")
    assert not waiting.done(), "its client is there as long as it waits for the answer"
    await platform.instances.delete(ALICE, first.id)
    assert (await waiting).status == "Running"


async def test_it_is_estimated_how_long_it_takes(alone: Platform) -> None:
    await limit(alone, instances=1)
    made = [await one(alone) for _ in range(5)]
    for each in made[:3]:
        assert (await get(alone, each, wait=30)).status == "Running"
        await alone.instances.delete(ALICE, each.id)
    assert (await get(alone, made[3], wait=30)).status == "Running"
    seen = await get(alone, made[4])
    assert (seen.position, seen.estimate is not None) == (1, True)
    assert "waits in the queue: 1st, about " in seen.reason


async def test_a_batch_is_admitted_together(platform: Platform) -> None:
    await limit(platform, instances=4)
    small = [await one(platform, wait=30) for _ in range(3)]
    batch = await make(platform, count=3)
    late = await one(platform)
    assert await waits(platform, *batch, late), "who comes later does not overtake, although there is room for one"
    assert {each.position for each in batch} == {1}
    await platform.instances.delete(ALICE, small[0].id)
    assert await waits(platform, *batch, late)
    await platform.instances.delete(ALICE, batch[0].id)
    for each in batch[1:]:
        assert (await get(platform, each, wait=30)).status == "Running"
    assert await waits(platform, late), "all places are taken"
    await agrees(platform.store)


@pytest.mark.parametrize(
    ("subject", "limits", "request_", "told"),
    [
        ("platform", {"instances": 2}, {"count": 3}, "3 instances .* platform may have 2 instances"),
        ("owner:alice", {"cpu": "1500m"}, {"resources": {"cpu": "2"}}, "2 cpu .* owner:alice may have 1.5 cpu"),
        ("owner", {"memory": "3Gi"}, {"count": 2}, "4Gi of memory .* owner:alice may have 3Gi"),
        ("experiment:alice/x", {"instances": 0}, {"labels": {"experiment": "x"}}, "experiment:alice/x may have 0"),
    ],
)
async def test_what_is_over_a_limit_alone_is_refused(
    alone: Platform, subject: str, limits: dict[str, Any], request_: dict[str, Any], told: str
) -> None:
    await limit(alone, subject, **limits)
    with pytest.raises(Invalid, match=told):
        await make(alone, **request_)
    assert await counts(alone.store) == {}
    assert [kept async for kept in alone.instances.lives.records.scan()] == []


async def test_a_full_queue_says_when_to_come_back(platform: Platform) -> None:
    await limit(platform, instances=1)
    await limit(platform, "owner:alice", waiting=2)
    alice = await platform.api("alice")
    answers = [await alice.create("env", wait=0) for _ in range(4)]
    assert [answer.status for answer in answers] == [200, 200, 200, 429]
    assert int(answers[3].headers[b"retry-after"]) >= 1
    assert answers[3].json["error"] == "rate_limited"
    assert "the queue of owner:alice is full: 2 may wait" in answers[3].json["message"]
    with pytest.raises(RateLimited) as caught:
        await ApiClient(platform.url, alice.token, retries=0).create(InstanceRequest(env_name="env"))
    assert caught.value.retry_after is not None
    assert (await one(platform, BOB)).position == 1, "another owner may wait, and has nothing yet"
    records = [kept async for kept in platform.instances.lives.records.scan()]
    assert len(records) == 4, "what was refused is not written down"
    await agrees(platform.store)


async def test_a_client_comes_back_by_itself(
    alone: Platform, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "aenv.web")
    monkeypatch.setattr("aenv.api.standing._LATER", 1.0)
    await limit(alone, instances=1, waiting=0)
    first = await one(alone, wait=30)
    api = ApiClient(alone.url, (await alone.api("alice")).token, retries=20)
    asking = asyncio.create_task(api.create(InstanceRequest(env_name="env"), wait=30))
    await until(lambda: " 429" in caplog.text, "a refusal")
    await alone.instances.delete(ALICE, first.id)
    assert (await asking).status == "Running"


async def test_large_requests_one_after_another_keep_nobody_out(
    alone: Platform, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Room is kept for what needs more than there is for a while, and not for the next such one right after that."""
    await limit(alone, instances=4)
    await make(alone, count=2, wait=30)
    large = [*await make(alone, BOB, count=3), *await make(alone, BOB, count=3)]
    small = await one(alone)
    await until(lambda: alone.instances.lives.queue._held_at is not None, "room that is kept")
    assert await waits(alone, *large, small)
    monkeypatch.setattr(queue, "HOLD", 1.0)
    assert (await get(alone, small, wait=60)).status == "Running"
    assert await waits(alone, *large)


async def test_room_is_kept_for_one_large_request_after_another(
    alone: Platform, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(queue, "HOLD", 0.5)
    await limit(alone, instances=2)
    await one(alone, wait=30)
    waiting, seen = alone.instances.lives.queue, set()
    await make(alone, BOB, count=2)
    await make(alone, ADMIN, count=2)

    def both() -> bool:
        seen.add(waiting._holder)
        return len(seen - {""}) == 2

    await until(both, "a turn of each")


async def test_a_rate_is_kept_and_what_is_over_it_waits(platform: Platform) -> None:
    await limit(platform, "owner:alice", creates_per_second=2)
    made = [await one(platform) for _ in range(5)]
    behind = [each for each in made if await waits(platform, each)]
    assert behind, "two in a second, and one second's worth at once"
    assert "owner:alice may have 2 creates in a second" in (await get(platform, behind[-1])).reason
    assert (await one(platform, BOB, wait=30)).status == "Running"
    for each in made:
        assert (await get(platform, each, wait=60)).status == "Running"
    await agrees(platform.store)


# How waiting ends


async def test_what_waits_can_be_deleted_and_is_over_in_time(platform: Platform) -> None:
    await limit(platform, instances=1)
    await one(platform, wait=30)
    deleted, left, late = (
        await one(platform),
        await one(platform, lease=1.0),
        await one(platform, ttl=1, startup_timeout=1),
    )
    assert await used(platform.store) == (1, 3)
    await platform.instances.delete(ALICE, deleted.id)
    assert (await get(platform, deleted)).reason == "it was deleted"

    async def over() -> bool:
        return await used(platform.store) == (1, 0)

    async def told(which: Instance, words: str) -> bool:
        found = await get(platform, which)
        return found.status == "Terminated" and words in found.reason

    await until(over, "the end of both")
    await until(lambda: told(left, "was not heard of for 1 s"), "the reason of the one that nobody asked for")
    await until(lambda: told(late, "waited in the queue"), "the reason of the one that waited too long")
    await until(lambda: len(platform.instances.lives.queue) == 0, "an empty queue")
    await agrees(platform.store)


async def test_its_time_to_live_begins_with_its_admission(alone: Platform) -> None:
    await limit(alone, instances=1)
    first, second = await one(alone, wait=30), await one(alone, ttl=1, startup_timeout=60)
    lives = alone.instances.lives
    before = lives.entries[second.id].record
    assert before.queued is not None
    assert before.expires_at == pytest.approx(before.queued + 60)
    await alone.instances.delete(ALICE, first.id)
    ended = await get(alone, second, wait=30)
    record = await lives.records.get(second.id)
    assert ended.status in ("Running", "Terminated")
    assert record is not None
    assert record.record.queued is None
    assert record.record.expires_at < before.expires_at - 30


async def test_an_end_while_it_is_being_admitted_gives_everything_back(alone: Platform) -> None:
    await limit(alone, instances=1)
    for _ in range(10):
        first, second = await one(alone, wait=30), await one(alone)
        await asyncio.gather(
            alone.instances.delete(ALICE, first.id),
            *(alone.instances.delete(ALICE, second.id) for _ in range(2)),
        )
        assert await counts(alone.store) == {}


async def test_a_limit_that_is_lowered_ends_nothing(platform: Platform) -> None:
    made = [await one(platform, wait=30) for _ in range(3)]
    await limit(platform, "owner:alice", instances=1)
    late = await one(platform)
    assert await waits(platform, late)
    for each in made[:2]:
        await platform.instances.delete(ALICE, each.id)
        assert await waits(platform, late)
    assert (await get(platform, made[2])).status == "Running"
    await platform.instances.delete(ALICE, made[2].id)
    assert (await get(platform, late, wait=30)).status == "Running"
    again = await one(platform)
    assert await waits(platform, again)
    await limit(platform, "owner:alice", instances=5)
    assert (await get(platform, again, wait=30)).status == "Running"
    batch = await make(platform, count=4)
    await limit(platform, "owner:alice", instances=3)
    assert await waits(platform, *batch)
    assert (await one(platform, wait=30)).status == "Running", "what can never be admitted holds nobody back"
    await agrees(platform.store)


async def test_a_store_that_is_away_loses_nobody(
    shelf: PaperShelf, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with await open_store(f"sqlite:{tmp_path / 'store.db'}") as inner:
        store = FragileStore(inner)
        async with service(store, PaperEngine(), shelf, tmp_path) as platform:
            await limit(platform, instances=1)
            first, second = await one(platform, wait=30), await one(platform)
            store.down = True
            await platform.instances.delete(ALICE, first.id)
            await until(lambda: "who is next in the queue cannot be seen" in caplog.text, "a look in vain")
            store.down = False
            await platform.instances.reaper.write()
            assert (await get(platform, second, wait=30)).status == "Running"
            await agrees(inner)


# Servers


async def test_what_waits_outlives_its_server(store: Store, shelf: PaperShelf, tmp_path: Path) -> None:
    paper = PaperEngine()
    async with service(store, paper, shelf, tmp_path) as platform:
        await limit(platform, instances=3)
        first = await make(platform, count=3, wait=30)
        batch = await make(platform, count=2)
        last = await one(platform)
        assert await used(store) == (3, 3)
    async with service(store, paper, shelf, tmp_path) as platform:
        await until(lambda: len(platform.instances.lives.queue) == 3, "those who wait")
        assert (await get(platform, last)).position == 2
        await platform.instances.delete(ALICE, first[0].id)
        assert await waits(platform, *batch, last), "a batch is whole after that, too"
        await platform.instances.delete(ALICE, first[1].id)
        for each in batch:
            assert (await get(platform, each, wait=30)).status == "Running"
        await platform.instances.delete(ALICE, first[2].id)
        assert (await get(platform, last, wait=30)).status == "Running"
        await agrees(store)


async def test_a_server_that_is_killed_leaves_the_numbers_right(url: str, shelf: PaperShelf, tmp_path: Path) -> None:
    program = [sys.executable, "-m", "tests.api.crowded", url, str(tmp_path)]
    process = await asyncio.create_subprocess_exec(
        *program, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, limit=2**20
    )
    assert process.stdout is not None
    try:
        async with asyncio.timeout(60):
            for _ in range(3):
                assert await process.stdout.readline() == b"crowded\n"
    finally:
        process.kill()
        await process.communicate()
    async with await open_store(url) as store:
        found = await counts(store)
        assert found == await summed(store)
        assert 0 < found["platform"]["instances"] <= 10
        assert found["platform"]["waiting"] > 0
        async with service(store, PaperEngine(), shelf, tmp_path) as platform:
            records = [kept.record async for kept in platform.instances.lives.records.scan()]
            for record in records:
                await platform.instances.delete(ADMIN, record.id)
            await agrees(store)
            assert await counts(store) == {}


async def test_two_servers_share_a_queue_fairly(
    redis: Server, shelf: PaperShelf, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One has many who wait since long ago, the other a few who have nothing yet."""
    monkeypatch.setattr(queue, "HEARD", 20.0)
    monkeypatch.setattr(queue, "YIELD", 20.0)
    redis.empty()
    async with (
        service(redis.url, PaperEngine(), shelf, tmp_path, name="one") as first,
        service(redis.url, PaperEngine(), shelf, tmp_path, name="two") as second,
    ):
        await limit(first, instances=4)
        many = [await one(first) for _ in range(12)]
        few = [await one(second, BOB) for _ in range(4)]
        assert await used(first.store) == (4, 12)

        async def heard() -> bool:
            return sum([b'"bob"' in note.value async for note in first.store.scan("queue")]) == 1

        await until(heard, "word of who waits there")
        alive = many[:4]
        order: list[str] = []
        rest = {each.id for each in (*many[4:], *few)}

        async def admitted() -> list[str]:
            records = [kept.record async for kept in first.instances.lives.records.scan()]
            return [record.id for record in records if record.id in rest and record.queued is None]

        running = [each.id for each in alive]
        while rest:
            await first.instances.delete(ADMIN, running.pop(0))
            new = await until(admitted, "the next")
            assert len(new) == 1
            order += new
            running += new
            rest -= set(new)
        owners = ["bob" if id in {each.id for each in few} else "alice" for id in order]
        assert owners[:2] == ["bob", "bob"], owners
        assert sorted(owners[:6]).count("bob") >= 3, owners
        await agrees(first.store)


async def test_a_dead_server_holds_nobody_back(redis: Server, shelf: PaperShelf, tmp_path: Path) -> None:
    redis.empty()
    async with (
        service(redis.url, PaperEngine(), shelf, tmp_path, name="one") as first,
        service(redis.url, PaperEngine(), shelf, tmp_path, name="two") as second,
    ):
        await limit(first, instances=1)
        there = await one(first, wait=30)
        dead, alive = await one(second, BOB), await one(first)
        await until(lambda: len(second.instances.lives.queue) == 1, "who waits there")
        task = second.instances.lives.queue._task
        assert task is not None
        task.cancel()  # as if it were gone
        await first.instances.delete(ALICE, there.id)
        assert (await get(first, alive, wait=30)).status == "Running"
        assert await waits(first, dead)


async def test_starts_that_are_under_way_are_counted(store: Store, shelf: PaperShelf, tmp_path: Path) -> None:
    engine = GatedEngine()
    async with service(store, engine, shelf, tmp_path) as platform:
        await limit(platform, instances=2)
        made = await asyncio.gather(*(one(platform) for _ in range(6)))
        await until(lambda: len(engine.asked) == 2, "two starts")
        assert await used(store) == (2, 4)
        engine.gate.set()
        for _ in range(6):
            ran = [each for each in made if (await get(platform, each)).status == State.RUNNING]
            for each in ran or made[:1]:
                await platform.instances.delete(ADMIN, each.id)
        assert engine.most <= 2


# Bursts


async def burst(platform: Platform, capacity: int, sizes: dict[str, int]) -> tuple[list[str], int]:
    """Experiments that ask for all of theirs at once; in which order they ran, and how many at a time. Each ends when
    those before it have, and all room is taken again: so who is next is decided for one after another."""
    await limit(platform, instances=capacity)
    total = sum(sizes.values())
    waiting = platform.instances.lives.queue
    admitted: list[str] = []
    alive = most = ended = 0

    def is_full() -> bool:
        """Whether all are there, and as many of them run as may."""
        return alive == min(capacity, total - ended) and alive + len(waiting) == total - ended

    async def rollout(experiment: str) -> None:
        nonlocal alive, most, ended
        made = await one(platform, labels={"experiment": experiment}, wait=120)
        assert made.status == "Running", made.reason
        before = len(admitted)
        admitted.append(experiment)
        alive += 1
        most = max(most, alive)
        await until(lambda: ended == before and is_full(), "its turn to end", 120)
        alive -= 1
        await platform.instances.delete(ALICE, made.id)
        ended += 1

    async with asyncio.timeout(120):
        await asyncio.gather(*(rollout(name) for name, size in sizes.items() for _ in range(size)))
    return admitted, most


def take_turns(admitted: list[str]) -> bool:
    """Whether x and y had the same, of any four in a row."""
    return all(admitted[n : n + 4].count("x") == 2 for n in range(len(admitted) - 3))


async def test_two_experiments_that_burst_both_finish(platform: Platform) -> None:
    admitted, most = await burst(platform, 4, {"x": 40, "y": 20})
    assert (admitted.count("x"), admitted.count("y"), most) == (40, 20, 4)
    # As long as both waited they took turns, although x came first with all of its.
    assert admitted[:4] == ["x"] * 4
    assert take_turns(admitted[4 : 4 + 2 * 18]), admitted
    assert await counts(platform.store) == {}


async def test_who_asks_for_one_after_another_is_not_always_next(platform: Platform) -> None:
    """Nothing of bob's waits between two of his; those who waited all the time are not behind him for that."""
    await limit(platform, instances=3)
    running = [(await one(platform, wait=30)).id for _ in range(3)]
    waiting = {(await one(platform)).id: "x" for _ in range(12)}
    waiting[(await one(platform, BOB)).id] = "y"
    admitted: list[str] = []

    async def new() -> list[str]:
        records = [kept.record async for kept in platform.instances.lives.records.scan()]
        return [record.id for record in records if record.id in waiting and record.queued is None]

    for _ in range(16):
        await platform.instances.delete(ADMIN, running.pop(0))
        [id] = await until(new, "the next")
        running.append(id)
        admitted.append(waiting.pop(id))
        if "y" not in waiting.values():
            waiting[(await one(platform, BOB)).id] = "y"
    assert 0 < admitted.count("y") <= admitted.count("x"), admitted


@pytest.mark.skipif(sys.platform != "linux", reason="the process engine needs Linux")
async def test_two_experiments_that_burst_with_real_instances(monkeypatch: pytest.MonkeyPatch) -> None:
    home = short_home()
    monkeypatch.setenv("AENV_HOME", str(home))
    shelf = Shelf()
    shelf.publish(home, "env")
    engine = ProcessEngine(state="platform")
    try:
        async with service(f"sqlite:{home / 'store.db'}", engine, shelf, home) as platform:
            admitted, most = await burst(platform, 3, {"x": 16, "y": 12})
            assert (admitted.count("x"), admitted.count("y"), most) == (16, 12, 3)
            assert admitted[:3] == ["x"] * 3
            assert take_turns(admitted[3 : 3 + 2 * 12]), admitted
            assert await counts(platform.store) == {}
    finally:
        await engine.end()
