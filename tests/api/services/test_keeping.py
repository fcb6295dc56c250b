"""Services on a real store, with sandboxes that answer, die and sulk as they are told to."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from typing import Any

import pytest

from aenv.api.services import directory
from aenv.errors import Conflict, Invalid, NotFound
from aenv.models import State
from aenv.wire import QuotaRequest, ServiceChange, ServiceRequest
from tests.api.ground import ALICE, until
from tests.api.services.ground import PATIENCE, DoorEngine, House, gone, house, ready
from tests.store.servers import Server


async def test_a_life(here: House) -> None:
    made = await here.make(replicas=2, service_name="front", environment_variables={"A": "1"}, labels={"team": "x"})
    assert (made.status, made.replicas, made.available_replicas, made.name) == ("Running", 2, 2, "front")
    assert made.service_url == f"http://127.0.0.1:1/env-service/{made.id}"
    assert made.id.startswith("front-")
    assert made.owner_token
    assert made.agent_token
    first = here.engine.specs[here.engine.made[0]]
    assert (first.lasting, first.environment_variables, first.owner) == (True, {"A": "1"}, "alice")
    assert {spec.owner_token_sha256 for spec in here.engine.specs.values()} == {first.owner_token_sha256}
    assert (await here.instances.list(ALICE, limit=10, offset=0))[1] == 0  # replicas are no instances
    replica = await here.instances.get(ALICE, made.members[0].id)
    assert replica.service == made.id
    with pytest.raises(Conflict, match="is a replica of service"):
        await here.instances.extend(ALICE, replica.id, "1h")
    found = here.directory.known(made.id)
    assert found is not None
    assert sorted(place.id for place in found.ready) == ready(made)
    await here.services.delete(ALICE, made.id)
    assert here.engine.alive == []
    ended = await here.get(made.id)
    assert (ended.status, ended.reason, ended.service_url, ended.owner_token) == (
        "Terminated",
        "it was deleted",
        "",
        "",
    )
    await here.services.delete(ALICE, made.id)
    left = await here.directory.find(made.id)
    assert (left.ready, type(left.failure)) == ((), NotFound)
    with pytest.raises(Conflict, match="was deleted"):
        await here.put(made.id, replicas=1)


async def test_scaling_restarts_nobody(here: House) -> None:
    made = await here.make(replicas=1)
    [first] = ready(made)
    more = await here.put(made.id, replicas=3)
    assert (more.status, more.available_replicas, more.generation) == ("Running", 3, 2)
    assert first in ready(more)
    await here.put(made.id, replicas=1)
    less = await here.once(made.id, lambda found: len(found.members) == 1, "the end of two")
    assert ready(less) == [first]
    none = await here.put(made.id, replicas=0)
    assert (none.status, none.replicas) == ("Running", 0)
    await until(lambda: not here.engine.alive, "the end of all")
    found = await here.directory.find(made.id)
    assert found.failure is not None
    assert (found.failure.status, "scaled to 0" in found.failure.message) == (503, True)
    again = await here.put(made.id, replicas=1)
    assert again.available_replicas == 1


async def test_a_rolling_update_keeps_all_serving(here: House) -> None:
    made = await here.make(replicas=2)
    before = set(ready(made))
    fewest: list[int] = []

    async def watch() -> None:
        while True:
            found = here.directory.known(made.id)
            assert found is not None
            fewest.append(len(found.ready))
            await asyncio.sleep(0)

    watching = asyncio.create_task(watch())
    assert (await here.put(made.id, version="1.1.0", wait=0)).status == "Updating"
    updated = await here.once(made.id, lambda found: found.status == "Running", "the update")
    watching.cancel()
    assert min(fewest) == 2
    assert (updated.env.id, updated.available_replicas, updated.reason) == ("env@1.1.0", 2, "")
    assert not before & set(ready(updated))
    await until(lambda: sorted(here.engine.alive) == ready(updated), "the end of the old ones")
    changed = await here.put(made.id, environment_variables={"B": "2"})
    assert here.engine.specs[ready(changed)[0]].environment_variables["B"] == "2"
    same = await here.put(made.id, environment_variables={"B": "2"}, version="1.1.0", replicas=2)
    assert same.generation == changed.generation
    restarted = await here.services.restart(ALICE, made.id, wait=PATIENCE)
    assert not set(ready(changed)) & set(ready(restarted))


async def test_calls_in_flight_end_before_their_replica_does(here: House, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("aenv.api.services.keeper.SESSIONS", 600.0)
    made = await here.make()
    [old] = ready(made)
    here.engine.busy[old] = 1
    await here.put(made.id, version="1.1.0")
    found = await here.once(made.id, lambda found: len(found.members) == 2, "one that leaves")
    assert [member.reason for member in found.members if not member.ready] == ["it leaves"]
    leaving = here.directory.known(made.id)
    assert leaving is not None
    assert [place.id for place in leaving.leaving] == [old]
    assert old in here.engine.alive
    here.engine.busy[old] = 0
    await until(lambda: old not in here.engine.alive, "the end of the old one")


async def test_sessions_that_never_rest_end_before_their_replica_does(here: House) -> None:
    """No gateway passes their calls on any more, and then those that it has are waited for."""
    made = await here.make()
    [old] = ready(made)
    here.engine.busy[old] = 1
    await here.put(made.id, version="1.1.0")

    def takes_calls() -> bool:
        found = here.directory.known(made.id)
        assert found is not None
        return old in {place.id for place in (*found.ready, *found.leaving)}

    await until(lambda: not takes_calls(), "the end of its sessions")
    assert old in here.engine.alive
    here.engine.busy[old] = 0
    await until(lambda: old not in here.engine.alive, "the end of the old one")


async def test_who_leaves_and_dies_is_not_waited_for(here: House) -> None:
    made = await here.make()
    [old] = ready(made)
    here.engine.busy[old] = 1
    await here.put(made.id, version="1.1.0")
    await here.once(made.id, lambda found: len(found.members) == 2, "one that leaves")
    here.engine.kill(old)
    await here.once(made.id, lambda found: len(found.members) == 1, "the end of the old one")


@pytest.mark.parametrize("version", ["2.0.0", "2.1.0"])
async def test_an_update_that_never_becomes_ready_is_rolled_back(here: House, version: str) -> None:
    made = await here.make(replicas=2)
    before = ready(made)
    await here.put(made.id, version=version, wait=0)
    back = await here.once(made.id, lambda found: found.env.id == "env@1.0.0", "the way back")
    back = await here.once(made.id, lambda found: found.status == "Running", "the way back")
    assert ready(back) == before
    assert f"the update to env@{version} was rolled back" in back.reason
    why = "it is broken on purpose" if version == "2.0.0" else "it takes its time"
    assert why in back.reason
    assert back.generation == 3
    await until(lambda: sorted(here.engine.alive) == before, "the end of what failed")
    assert (await here.put(made.id, version="1.1.0")).status == "Running"


async def test_a_replica_that_dies_is_replaced(here: House) -> None:
    made = await here.make(replicas=2)
    killed, other = ready(made)
    here.engine.kill(killed)
    found = await here.directory.find(made.id)  # as the gateway does when it could not reach one
    assert [place.id for place in found.ready] == [other]
    again = await here.once(made.id, lambda found: found.available_replicas == 2, "another one")
    assert other in ready(again)
    assert [member.restarts for member in again.members if member.id != other] == [1]
    assert killed in here.engine.sandboxes, "what it printed is kept"
    await here.services.delete(ALICE, made.id)
    await until(lambda: not here.engine.sandboxes, "the end of what was kept")


async def test_what_is_unwell_gets_no_calls_and_is_started_again(here: House) -> None:
    made = await here.make(replicas=2)
    sick, other = ready(made)
    here.engine.sick.add(sick)
    await here.once(made.id, lambda found: ready(found) == [other] or found.available_replicas == 2, "it to be out")
    again = await here.once(
        made.id, lambda found: found.available_replicas == 2 and sick not in ready(found), "another one"
    )
    assert other in ready(again)
    record = (await here.instances.get(ALICE, sick)).reason
    assert "its health check fails: it is sick" in record


async def test_who_recovers_is_let_be(here: House, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("aenv.api.services.health.OVER", 10**6)
    made = await here.make()
    [only] = ready(made)
    here.engine.sick.add(only)
    failed = await here.once(made.id, lambda found: not found.available_replicas, "it to be out")
    assert "its health check fails" in failed.reason
    here.engine.sick.clear()
    well = await here.once(made.id, lambda found: found.available_replicas == 1, "it to be back")
    assert ready(well) == [only]


async def test_what_cannot_run_says_why_and_is_tried_again(here: House) -> None:
    made = await here.services.create(ALICE, _request("env@2.0.0"), wait=PATIENCE)
    assert made.status == "Failed"
    assert "it is broken on purpose" in made.reason
    await here.once(made.id, lambda found: found.members and found.members[0].restarts >= 3, "more tries")
    found = await here.directory.find(made.id)
    assert found.failure is not None
    assert (found.failure.status, "it is broken on purpose" in found.failure.message) == (503, True)
    mended = await here.put(made.id, version="1.0.0", wait=0)
    mended = await here.once(made.id, lambda found: found.status == "Running", "it to be mended")
    assert mended.available_replicas == 1


async def test_what_has_no_room_waits_and_says_so(here: House) -> None:
    quotas, now = here.instances.quotas, time.time()
    await quotas.set("owner:alice", QuotaRequest(instances=2), now)
    made = await here.make(replicas=3, wait=0)
    waits = await here.once(made.id, lambda found: found.available_replicas == 2 and found.reason, "two of three")
    assert waits.status == "Creating"
    assert "1 of 3 replicas is not ready: waits in the queue" in waits.reason
    await quotas.set("owner:alice", QuotaRequest(instances=3), now)
    done = await here.once(made.id, lambda found: found.status == "Running", "the third")
    assert set(ready(waits)) < set(ready(done))
    await quotas.set("owner:alice", QuotaRequest(instances=0), now)
    here.engine.kill(ready(done)[0])
    short = await here.once(made.id, lambda found: found.available_replicas == 2 and found.reason, "one to be missing")
    short = await here.once(made.id, lambda found: "may have" in found.reason, "the reason")
    assert short.status == "Running"
    await quotas.delete("owner:alice")
    await here.once(made.id, lambda found: found.available_replicas == 3, "room again")


async def test_two_operators_at_once(here: House) -> None:
    """What each asked for is there as a whole, or not at all."""
    made = await here.make()
    seen = made.generation
    changes = [ServiceChange(environment_variables={"WHO": name, name: "1"}) for name in "ab"]
    await asyncio.gather(*(here.services.change(ALICE, made.id, change) for change in changes))
    found = await here.once(made.id, lambda found: found.status == "Running", "both")
    who = found.environment_variables["WHO"]
    assert found.environment_variables == {"WHO": who, who: "1"}
    assert found.generation == seen + 2
    with pytest.raises(Conflict, match=f"is at generation {seen + 2}"):
        await here.put(made.id, replicas=2, generation=seen)
    assert (await here.put(made.id, replicas=2, generation=seen + 2)).replicas == 2


async def test_a_second_update_overtakes_the_first(here: House) -> None:
    made = await here.make(replicas=2)
    await here.put(made.id, version="2.1.0", wait=0)
    await until(lambda: len(here.engine.alive) == 3, "a new one")
    await here.put(made.id, version="1.1.0", wait=0)
    found = await here.once(made.id, lambda found: found.status == "Running", "the second")
    assert (found.env.id, found.reason) == ("env@1.1.0", "")
    await until(lambda: len(here.engine.alive) == 2, "the end of the others")


async def test_who_has_no_replicas_is_updated_at_once(here: House) -> None:
    made = await here.make()
    await here.put(made.id, replicas=0)
    updated = await here.put(made.id, version="1.1.0")
    assert (updated.status, updated.env.id) == ("Running", "env@1.1.0")
    again = await here.services.restart(ALICE, made.id, wait=PATIENCE)
    assert again.status == "Running"
    back = await here.put(made.id, replicas=1)
    assert [member.env for member in back.members if member.ready] == ["env@1.1.0"]


async def test_who_says_nonsense_of_its_calls_ends_all_the_same(here: House) -> None:
    made = await here.make()
    here.engine.busy = {ready(made)[0]: int("9" * 4000)}
    await here.services.delete(ALICE, made.id)
    assert here.engine.alive == []


async def test_a_service_has_one_keeper(here: House) -> None:
    """Also when it is found in the store just while it is made."""
    made = await here.make(replicas=0)
    kept = await here.services.keepers.records.get(made.id)
    assert kept is not None
    first = here.services.keepers.get(made.id)
    here.services.keepers.keep(kept, "token", ALICE)
    assert here.services.keepers.get(made.id) is first
    scaled = await here.put(made.id, replicas=2)
    assert sorted(here.engine.alive) == ready(scaled)


async def test_what_the_store_has_lost_is_written_again(
    redis: Server, redis_url: str, home: Path, engine: DoorEngine
) -> None:
    async with house(redis_url, engine, home) as here:
        made = await here.make(replicas=2)
        stored = await here.make("stored@1.0.0")
        redis.empty()

        async def found() -> bool:
            return not await gone(here.get(made.id)) and not await gone(here.get(stored.id))

        await until(found, "both services")
        more = await here.put(made.id, replicas=3)
        assert set(ready(made)) < set(ready(more))
        with pytest.raises(Conflict, match="is that of service"):
            await here.make("stored@1.0.0")
        for id in (made.id, stored.id):
            await here.services.delete(ALICE, id, storage=True)
        assert (engine.alive, engine.stored) == ([], {})


async def test_what_a_server_left_is_gone_on_with(tmp_path: Path, home: Path, engine: DoorEngine) -> None:
    url = f"sqlite:{tmp_path / 'store.db'}"
    async with house(url, engine, home) as first:
        made = await first.make(replicas=2)
        engine.busy = dict.fromkeys(ready(made), 1)  # nobody may leave yet
        await first.put(made.id, version="1.1.0", wait=0)
        half = await first.once(
            made.id, lambda found: any(one.reason == "it leaves" for one in found.members), "half of it"
        )
        [new] = [id for id in ready(half) if id not in engine.busy]
    assert len(engine.alive) == 3
    async with house(url, engine, home) as second:
        engine.busy = {}
        done = await second.once(made.id, lambda found: found.status == "Running", "the rest")
        assert (done.env.id, done.available_replicas) == ("env@1.1.0", 2)
        assert new in ready(done)  # what lived was let be
        await until(lambda: sorted(engine.alive) == ready(done), "the end of the old ones")
        assert len(engine.made) == 4


async def test_another_process_takes_over(redis_url: str, home: Path, engine: DoorEngine) -> None:
    """Two of one name: each knows what the other keeps, and goes on with it when that one is gone."""
    async with house(redis_url, engine, home) as second:
        async with house(redis_url, engine, home) as first:
            made = await first.make(replicas=2)
            found = await second.directory.find(made.id)
            assert sorted(place.id for place in found.ready) == ready(made)
            assert second.services.keepers.get(made.id) is None
            await second.put(made.id, replicas=3)
            more = await first.get(made.id)
            assert more.available_replicas == 3
            await until(lambda: second.instances.peers.others, "word of the first")
        await until(lambda: second.services.keepers.get(made.id), "the other one to take over", PATIENCE)
        assert sorted(engine.alive) == ready(more)
        killed, *others = ready(more)
        engine.kill(killed)
        again = await second.once(
            made.id, lambda found: found.available_replicas == 3 and killed not in ready(found), "another one"
        )
        assert set(others) < set(ready(again))
        await second.services.delete(ALICE, made.id)
        assert engine.alive == []


async def test_another_machine_takes_over(
    redis_url: str, home: Path, engine: DoorEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What it cannot reach it makes anew."""
    other = DoorEngine()
    try:
        async with house(redis_url, other, home, name="elsewhere") as second:
            async with house(redis_url, engine, home, name="here") as first:
                made = await first.make(replicas=2)
                await until(lambda: second.instances.peers.others, "word of the first")
            monkeypatch.setattr("aenv.api.services.keeping.SILENT", 0.5)
            done = await second.once(
                made.id, lambda found: len(set(ready(found)) - set(ready(made))) == 2, "new replicas"
            )
            assert sorted(other.alive) == ready(done)
            [record] = [await second.instances.get(ALICE, ready(made)[0])]
            assert (record.status, record.reason) == (State.FAILED, "its server is gone")
    finally:
        await other.close()


async def test_what_waits_for_a_service(here: House, monkeypatch: pytest.MonkeyPatch) -> None:
    made = await here.make(wait=0)
    found = await here.directory.find(made.id)
    assert len(found.ready) == 1
    with pytest.raises(NotFound):
        await here.directory.find("nobody")
    assert here.directory.known("nobody") is None
    monkeypatch.setattr(directory, "PATIENCE", 0.1)
    slow = await here.services.create(ALICE, _request("env@1.0.0", environment_variables={"MOOD": "never"}))
    stuck = await here.directory.find(slow.id)
    assert stuck.ready == ()
    assert stuck.failure is not None
    assert stuck.failure.status == 503


async def test_what_replicas_print(here: House, monkeypatch: pytest.MonkeyPatch) -> None:
    """By name; followed, also of those that come later, until the service ends."""
    monkeypatch.setattr("aenv.api.services.printed._LOOK", 0.05)
    made = await here.make(replicas=2)
    here.engine.printed = {id: f"one\ntwo of {id}\n".encode() for id in ready(made)}
    lines = [line async for line in await here.services.logs(ALICE, made.id, tail=1)]
    assert sorted(lines) == sorted(f"{id} | two of {id}\n".encode() for id in ready(made))
    with pytest.raises(Invalid, match="tail -1"):
        await here.services.logs(ALICE, made.id, tail=-1)
    heard: list[bytes] = []

    async def follow() -> None:
        async for line in await here.services.logs(ALICE, made.id, tail=0, follow=True):
            heard.append(line)  # noqa: PERF401

    following = asyncio.create_task(follow())
    more = await here.put(made.id, replicas=3)
    [new] = set(ready(more)) - set(ready(made))
    here.engine.printed[new] = b"three\n"
    await until(lambda: heard == [f"{new} | three\n".encode()], "what the new one prints")
    await here.services.delete(ALICE, made.id)
    async with asyncio.timeout(PATIENCE):
        await following
    left = await here.services.logs(ALICE, made.id, follow=True)
    assert [line async for line in left] == []


def _request(env: str, **fields: Any) -> ServiceRequest:
    return ServiceRequest(env_name=env, **fields)
