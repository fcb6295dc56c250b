"""Limits: who sets and sees them, which hold for whom, and what is counted under them."""

from __future__ import annotations

import asyncio
import json
import math
import os
import random
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec
import pytest

from aenv.api import queue, quotas
from aenv.api.charges import Charge, Limits
from aenv.api.clock import Clock
from aenv.api.quotas import Limit, Table
from aenv.api.records import Kept, Wanted
from aenv.auth.callers import Scope
from aenv.client.api import ApiClient
from aenv.engines.failing import PaperEngine
from aenv.errors import AEnvError, Forbidden, Invalid, NotFound, RateLimited
from aenv.models import State
from aenv.store import Add, Store, open_store
from aenv.wire import Instance, InstanceRequest, Quota, QuotaRequest
from tests.api.counting import counts, summed, used
from tests.api.ground import ADMIN, ALICE, BOB, FragileStore, PaperShelf, Platform, service, until

GI = 2**30


@pytest.fixture
def shelf() -> PaperShelf:
    made = PaperShelf()
    made.on_paper("env")
    made.on_paper("small", cpu="250m", memoryLimit="512Mi", memory="256Mi")
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


async def make(platform: Platform, env: str = "env", wait: float = 30, **more: Any) -> list[Instance]:
    return await platform.instances.create(ALICE, InstanceRequest(env_name=env, **more), wait=wait)


async def limit(platform: Platform, subject: str, **limits: Any) -> Quota:
    return await platform.instances.quotas.set(subject, QuotaRequest(**limits), 0.0)


# Which limits hold


def test_own_limits_go_before_those_for_each() -> None:
    def given(**limits: Any) -> Limit:
        return Limit(**limits, updated_at=0.0)

    table = Table(
        {
            "owner": given(instances=5, waiting=7),
            "owner:ann": given(cpu="1500m", memory="2Gi", creates_per_second=2.5),
            "experiment": given(instances=2),
            "experiment:ann/x": given(waiting=0),
        }
    )
    assert table.of("platform") == Limits(waiting=quotas.WAITING_HERE)
    assert table.of("owner:bob") == Limits(instances=5, waiting=7)
    assert table.of("owner:ann") == Limits(cpu=1500, memory=2 * GI, rate=2.5, waiting=quotas.WAITING_EACH)
    assert table.of("experiment:bob/y") == Limits(instances=2)
    assert table.of("experiment:ann/x") == Limits(waiting=0)
    assert table.of("experiment:ann/") == Limits(), "what has no experiment is limited by its owner"
    assert table.of("experiment:ann/y/") == Limits(instances=2), "a name may end like that"
    assert Table({}).of("owner:bob").waiting == quotas.WAITING_EACH
    assert not Table({}).of("owner:bob").any
    assert Table({}).of("experiment:a/b").waiting == math.inf


# Setting and seeing them


@pytest.mark.parametrize(
    ("subject", "wrong"),
    [
        ("", {"instances": 1}),
        ("owners", {"instances": 1}),
        ("owner:", {"instances": 1}),
        ("owner:a b", {"instances": 1}),
        ("experiment:ann", {"instances": 1}),
        ("experiment:ann/", {"instances": 1}),
        ("experiment:/x", {"instances": 1}),
        ("experiment:ann/" + "x" * 257, {"instances": 1}),
        ("platform:x", {"instances": 1}),
        ("platform", {"instances": -1}),
        ("platform", {"waiting": 10**10}),
        ("platform", {"creates_per_second": 0}),
        ("platform", {"creates_per_second": -1.5}),
        ("platform", {"creates_per_second": 5e-324}),
        ("platform", {"cpu": "many"}),
        ("platform", {"cpu": "-1"}),
        ("platform", {"memory": "1e999"}),
        ("platform", {"memory": "lots"}),
    ],
)
async def test_what_is_no_limit_is_refused(subject: str, wrong: dict[str, Any], tmp_path: Path) -> None:
    async with await open_store(f"sqlite:{tmp_path / 'store.db'}") as store:
        with pytest.raises(Invalid):
            await quotas.Quotas(store).set(subject, QuotaRequest(**wrong), 0.0)
        assert [record async for record in store.scan(quotas.RECORDS)] == []


async def test_over_http(platform: Platform) -> None:
    alice = await platform.api("alice")
    admin = ApiClient(platform.url, (await platform.api("root", Scope.ADMIN)).token, retries=0)
    mine = ApiClient(platform.url, alice.token, retries=0)
    made = await admin.set_quota("experiment:alice/a b/c:ä", QuotaRequest(instances=3, memory="64Gi"))
    assert (made.subject, made.instances, made.memory, made.cpu) == ("experiment:alice/a b/c:ä", 3, "64Gi", None)
    await admin.set_quota("owner", QuotaRequest(instances=100))
    await admin.set_quota("owner:bob", QuotaRequest(instances=1))
    await make(platform, "small", count=2, labels={"experiment": "a b/c:ä"})
    found, total = await mine.quotas()
    by_subject = {each.subject: each for each in found}
    assert list(by_subject) == ["experiment:alice/a b/c:ä", "owner", "owner:alice", "platform"]
    assert total == 4
    assert by_subject["owner:alice"].used == {"instances": 2, "cpu": 0.5, "memory": GI}
    assert (by_subject["owner:alice"].instances, by_subject["owner:alice"].updated_at) == (100, "")
    assert by_subject["owner:alice"].waiting == quotas.WAITING_EACH
    assert by_subject["experiment:alice/a b/c:ä"].used["instances"] == 2
    assert by_subject["platform"].used["instances"] == 2
    assert "owner:bob" in {each.subject for each in (await admin.quotas())[0]}
    assert [each.subject for each in (await admin.quotas(limit=2, offset=1))[0]] == ["owner", "owner:alice"]
    with pytest.raises(Forbidden):
        await mine.set_quota("owner:alice", QuotaRequest(instances=3))
    with pytest.raises(Forbidden):
        await mine.delete_quota("owner:alice")
    with pytest.raises(Invalid, match="nothing that has limits"):
        await admin.set_quota("nobody", QuotaRequest(instances=3))
    await admin.delete_quota("owner:bob")
    with pytest.raises(NotFound, match="owner:bob has no limits"):
        await admin.delete_quota("owner:bob")
    assert (await alice.ask("PUT", "/quota", {"instances": 1})).status in (403, 422)


async def test_by_command(alone: Platform, tmp_path: Path) -> None:
    token = (await alone.api("root", Scope.ADMIN)).token
    environ = {**os.environ, "AENV_HOME": str(tmp_path / "user"), "AENV_API_KEY": token}

    async def aenv(*arguments: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "aenv", "quota", *arguments, "--system-url", alone.url]
        return await asyncio.to_thread(
            subprocess.run, command, env=environ, capture_output=True, text=True, timeout=60, check=False
        )

    limits = ("--instances", "100", "--cpu", "32", "--memory", "64Gi", "--rate", "20")
    done, none = await asyncio.gather(aenv("set", "owner:alice", *limits), aenv("set", "owner:alice"))
    assert (done.returncode, done.stderr) == (0, "set owner:alice\n")
    assert none.returncode == 1
    assert "no limit is given" in none.stderr
    table, listed = await asyncio.gather(aenv("list"), aenv("list", "-o", "json"))
    assert "0 of 100" in table.stdout
    found = {each["subject"]: each for each in json.loads(listed.stdout)["items"]}
    assert (found["owner:alice"]["creates_per_second"], found["owner:alice"]["cpu"]) == (20, "32")
    done = await aenv("delete", "owner:alice", "-o", "json")
    assert json.loads(done.stdout) == {"subject": "owner:alice", "deleted": True}


async def test_there_are_only_so_many(platform: Platform, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quotas, "MOST", 2)
    await limit(platform, "owner:a", instances=1)
    await limit(platform, "owner:b", instances=1)
    with pytest.raises(AEnvError, match="which is the most"):
        await limit(platform, "owner:c", instances=1)
    await limit(platform, "owner:b", instances=2)


# Counting


async def test_what_lives_is_counted_by_what_it_may_take(platform: Platform) -> None:
    [whole] = await make(platform, labels={"experiment": "x"})
    [small] = await make(platform, "small", resources={"cpu": "2"})
    kept = await platform.instances.lives.records.get(whole.id)
    assert kept is not None
    assert kept.record.charge == Charge(1000, 2 * GI)
    found = await counts(platform.store)
    assert found == {
        "platform": {"instances": 2, "cpu": 3000, "memory": 2.5 * GI},
        "owner:alice": {"instances": 2, "cpu": 3000, "memory": 2.5 * GI},
        "experiment:alice/x": {"instances": 1, "cpu": 1000, "memory": 2 * GI},
        "experiment:alice/": {"instances": 1, "cpu": 2000, "memory": GI / 2},
    }
    assert found == await summed(platform.store)
    for each in (whole, small):
        await platform.instances.delete(ALICE, each.id)
        await platform.instances.delete(ALICE, each.id)
    assert await counts(platform.store) == {}


async def test_it_is_given_back_once_whoever_ends_it(platform: Platform) -> None:
    """Two servers' worth of ends for the same instance, and one of a server that is gone."""
    [made] = await make(platform)
    lives = platform.instances.lives
    kept = await lives.records.get(made.id)
    assert kept is not None
    over = lives.over(State.TERMINATED, "elsewhere")(kept.record)
    assert over is not None
    await lives.records.save(kept, over)
    await platform.instances.delete(ALICE, made.id)
    await platform.instances.reaper.sweep()
    assert await counts(platform.store) == {}
    [made] = await make(platform)
    entry = lives.entries[made.id]
    await asyncio.gather(*(lives.end(entry, State.TERMINATED, "at once") for _ in range(5)))
    assert await counts(platform.store) == {}


async def test_a_start_that_fails_gives_back(store: Store, shelf: PaperShelf, tmp_path: Path) -> None:
    class Failing(PaperEngine):
        async def create(self, id: str, spec: Any) -> Any:
            raise AEnvError("no")

    async with service(store, Failing(), shelf, tmp_path) as platform:
        made = await make(platform, count=3)
        assert {each.status for each in made} == {"Failed"}
        assert await counts(store) == {}


async def test_an_end_that_the_store_did_not_take_is_given_back_later(shelf: PaperShelf, tmp_path: Path) -> None:
    async with await open_store(f"sqlite:{tmp_path / 'store.db'}") as inner:
        store = FragileStore(inner)
        async with service(store, PaperEngine(), shelf, tmp_path) as platform:
            made = await make(platform, count=3)
            lives = platform.instances.lives
            changed = await lives.records.get(made[0].id)
            assert changed is not None
            store.full = True
            for each in made[:2]:
                await platform.instances.delete(ALICE, each.id)
                assert (await platform.instances.get(ALICE, each.id)).status == "Terminated"
            store.full = False
            assert await used(store) == (3, 0)
            # Another server has changed one of them meanwhile.
            await lives.records.save(changed, msgspec.structs.replace(changed.record, reason="changed"))
            await platform.instances.reaper.write()
            assert await used(store) == (1, 0)
            assert await counts(store) == await summed(store)
            assert not lives.unwritten


async def test_a_record_that_the_store_lost_is_counted_anew(platform: Platform) -> None:
    """It lost the numbers as well: both are of one moment."""
    [made] = await make(platform)
    lives = platform.instances.lives
    kept = await lives.records.get(made.id)
    assert kept is not None
    over = msgspec.structs.replace(kept.record, status=State.TERMINATED)
    await lives.records.remove(await lives.records.save(kept, over))  # its record and its numbers are gone
    assert await counts(platform.store) == {}
    await platform.instances.reaper.sweep()
    assert await used(platform.store) == (1, 0)
    assert await counts(platform.store) == await summed(platform.store)


async def test_records_of_before_are_not_counted(platform: Platform) -> None:
    [made] = await make(platform)
    lives = platform.instances.lives
    entry = lives.entries[made.id]
    entry.kept = await lives.records.save(entry.kept, msgspec.structs.replace(entry.kept.record, charge=None))
    assert await counts(platform.store) == {}
    await platform.instances.delete(ALICE, made.id)
    assert await counts(platform.store) == {}


@pytest.mark.parametrize("seed", range(3))
async def test_whatever_happens_the_numbers_are_the_sum_of_the_records(platform: Platform, seed: int) -> None:
    chance = random.Random(seed)
    await limit(platform, "platform", instances=6)
    await limit(platform, "owner:bob", instances=3, waiting=5)
    ids: list[str] = []

    async def create() -> None:
        caller = chance.choice([ALICE, BOB])
        request = InstanceRequest(
            env_name=chance.choice(["env", "small"]),
            count=chance.choice([None, 2, 3]),
            labels={"experiment": chance.choice("xy")},
        )
        with suppress(RateLimited):
            ids.extend(each.id for each in await platform.instances.create(caller, request))

    async def delete() -> None:
        if ids:
            await platform.instances.delete(ADMIN, chance.choice(ids))

    for _ in range(12):
        await asyncio.gather(*(chance.choice([create, create, delete])() for _ in range(6)))
        assert (await counts(platform.store))["platform"].get("instances", 0) <= 6

    async def settled() -> bool:
        return await counts(platform.store) == await summed(platform.store)

    await until(settled, "agreement")
    await asyncio.gather(*(platform.instances.delete(ADMIN, id) for id in ids))
    await until(settled, "agreement")
    assert await counts(platform.store) == {}


async def test_a_server_that_is_gone_gives_back(store: Store, shelf: PaperShelf, tmp_path: Path) -> None:
    """Its instances, and what waited there, are ended by another one when their time is long over."""
    async with service(store, PaperEngine(), shelf, tmp_path, name="gone") as platform:
        await limit(platform, "platform", instances=1)
        await make(platform, wait=0, count=1, ttl=60)
        await asyncio.gather(*(make(platform, wait=0, ttl=60) for _ in range(2)))
        assert await used(store) == (1, 2)
    async with service(store, PaperEngine(), shelf, tmp_path, name="other") as platform:
        reaper = platform.instances.reaper
        records = [kept async for kept in platform.instances.lives.records.scan()]
        for kept in records:
            assert isinstance(kept, Kept)
            await reaper._inherited(kept, kept.record.expires_at + 1)
        assert await counts(store) == {}
        reasons = {kept.record.reason async for kept in platform.instances.lives.records.scan()}
        assert any("waited in the queue" in reason for reason in reasons), reasons


async def test_a_write_that_was_made_and_not_heard_of_is_gone_on_with(platform: Platform) -> None:
    """As after a store that was away: else it would count for ever."""
    [made] = await make(platform)
    lives = platform.instances.lives
    entry = lives.entries[made.id]
    old = msgspec.structs.replace(
        entry.kept.record, status=State.PENDING, by=lives.peers.me.boot, updated_at=0.0, wanted=Wanted()
    )
    await lives.records.save(entry.kept, old)
    del lives.entries[made.id]
    await platform.instances.reaper.sweep()

    async def runs() -> bool:
        return (await platform.instances.get(ALICE, made.id)).status == "Running"

    await until(runs, "its start")
    assert await counts(platform.store) == await summed(platform.store)


async def test_the_only_server_counts_anew_when_it_starts(
    shelf: PaperShelf, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """As after a server of an older version, which counts nothing."""
    paper = PaperEngine()
    async with await open_store(f"sqlite:{tmp_path / 'store.db'}") as store:
        async with service(store, paper, shelf, tmp_path) as platform:
            await make(platform, count=2, labels={"experiment": "x"})
        right = await counts(store)
        await store.change(
            Add("use", "platform", {"instances": 3, "at": 5.0}),
            Add("use", "owner:alice", {"memory": -1}),
            Add("use", "owner:eve", {"waiting": 1}),
        )
        async with service(store, paper, shelf, tmp_path) as platform:
            assert await counts(store) == right == await summed(store)
            assert "counted anew: owner:alice, owner:eve, platform" in caplog.text


@pytest.mark.parametrize("subject", ["owner:alice", "owner"])
async def test_a_rate_that_is_raised_lets_in_at_once(platform: Platform, subject: str) -> None:
    await limit(platform, subject, creates_per_second=0.001)
    await make(platform)
    [late] = await make(platform, wait=0)
    assert late.status == "Pending"
    await limit(platform, subject, creates_per_second=100)
    assert (await platform.instances.get(ALICE, late.id, wait=30)).status == "Running"


async def test_clocks_of_rates_are_forgotten(platform: Platform) -> None:
    await limit(platform, "experiment", creates_per_second=5)
    [made] = await make(platform, labels={"experiment": "x"})
    await platform.instances.delete(ALICE, made.id)
    assert "at" in (await platform.store.counts("use"))["experiment:alice/x"]
    lives = platform.instances.lives
    await lives.queue.tidy()
    assert "experiment:alice/x" in await platform.store.counts("use")
    lives.queue._clock = Clock(lambda _: None, wall=lambda: time.time() + 2 * queue.IDLE)
    await lives.queue.tidy()
    assert await platform.store.counts("use") == {}
