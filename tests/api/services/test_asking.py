"""What may be asked of services, and by whom; and what becomes of their storage."""

from __future__ import annotations

from typing import Any

import pytest

from aenv.auth.callers import Caller, Scope
from aenv.errors import AEnvError, Conflict, Forbidden, Invalid, NotFound, TooLarge
from aenv.models import Second
from aenv.wire import ServiceChange, ServiceRequest
from tests.api.ground import ADMIN, ALICE, BOB, until
from tests.api.services.ground import PATIENCE, House, ready


def request(env: str = "env@1.0.0", **fields: Any) -> ServiceRequest:
    return ServiceRequest(env_name=env, **fields)


@pytest.mark.parametrize(
    ("fields", "kind", "said"),
    [
        ({"replicas": -1}, Invalid, "replicas -1 is not between 0 and 100"),
        ({"replicas": 101}, Invalid, "replicas 101"),
        ({"port": 0}, Invalid, "port 0"),
        ({"port": 70000}, Invalid, "port 70000"),
        ({"service_name": "a b"}, Invalid, "service_name 'a b'"),
        ({"environment_variables": {"a b": "x"}}, Invalid, "'a b' is not a variable's name"),
        ({"environment_variables": {"A": "x" * 200_000}}, TooLarge, "environment_variables have"),
        ({"labels": {"aenv/x": "y"}}, Invalid, "not a label's name"),
        ({"pvc_name": "a/b", "storage_size": "1Mi"}, Invalid, "pvc_name 'a/b'"),
        ({"pvc_name": "drawer"}, Invalid, "storage 'drawer' needs a size"),
        ({"enable_storage": True}, Invalid, "storage 'env' needs a size"),
        ({"storage_size": "much"}, Invalid, "storage_size must be a size"),
        ({"storage_size": "99999999999E"}, Invalid, "too much"),
        ({"storage_size": "1"}, Invalid, "too little"),
        ({"storage_size": "1Mi", "replicas": 2}, Invalid, "one replica at most"),
        ({"storage_size": "1Mi", "mount_path": "data"}, Invalid, "mount_path 'data'"),
        ({"storage_size": "1Mi", "mount_path": "/a/../etc"}, Invalid, "mount_path"),
        ({"storage_size": "1Mi", "mount_path": "/"}, Invalid, "where the sandbox itself lives"),
        ({"storage_size": "1Mi", "mount_path": "//proc/x"}, Invalid, "where the sandbox itself lives"),
        ({"storage_size": "1Mi", "enable_storage": False}, Invalid, "not enabled"),
        ({"cpu_limit": "lots"}, Invalid, "cpu_limit must be a number of cores"),
        ({"cpu_request": "2", "cpu_limit": "1"}, Invalid, "cpu_request 2 is over cpu_limit 1"),
        ({"memory_request": "2Gi", "memory_limit": "1Gi"}, Invalid, "memory_request 2Gi is over"),
        ({"owner": "bob"}, Forbidden, "bob"),
    ],
)
async def test_what_is_refused(here: House, fields: dict[str, Any], kind: type[AEnvError], said: str) -> None:
    with pytest.raises(kind) as caught:
        await here.services.create(ALICE, request(**fields))
    assert said in caught.value.message
    assert (await here.services.list(ALICE, limit=10, offset=0))[1] == 0


async def test_replicas_have_the_second_container_of_their_environment(here: House) -> None:
    made = await here.make("dual@1.0.0")
    assert made.available_replicas == 1
    assert here.engine.specs[here.engine.made[-1]].second == Second(image="reg.example.com/judge:1")
    with pytest.raises(Invalid, match="the second container has no image"):
        await here.services.create(ALICE, request("dual@2.0.0"))
    with pytest.raises(Invalid, match="the second container has no image"):
        await here.services.change(ALICE, made.id, ServiceChange(version="2.0.0"))


async def test_what_is_given_and_what_the_environment_says(here: House) -> None:
    three = await here.make("three")
    assert (three.replicas, three.port, three.available_replicas) == (3, 9000, 3)
    one = await here.make("three", replicas=1, port=8000, cpu_request="500m", cpu_limit="1", memory_request="64Mi")
    assert (one.replicas, one.port, one.resources) == (1, 8000, {"cpu": "1", "memory": "64Mi"})
    assert here.engine.specs[ready(one)[0]].resources["memory"] == "64Mi"


@pytest.mark.parametrize(
    ("fields", "kind", "said"),
    [
        ({"replicas": 1000}, Invalid, "replicas 1000"),
        ({"version": "9.9.9"}, NotFound, "env@9.9.9"),
        ({"version": "new"}, Invalid, "'new'"),
        ({"image": "registry.example.org/env:1.1.0"}, Invalid, "the door engine runs packages of the hub, no images"),
        ({"image": "env:1.1.0"}, Invalid, "no images"),
        ({"image": "env@sha256:00ff"}, Invalid, "no images"),
        ({"image": "other@1.0.0"}, Invalid, "another environment than env"),
        ({"image": "1.1.0", "version": "1.0.0"}, Invalid, "differ"),
        ({"environment_variables": {"1": "x"}}, Invalid, "'1' is not a variable's name"),
        ({"generation": 7}, Conflict, "at generation 1"),
    ],
)
async def test_changes_that_are_refused(here: House, fields: dict[str, Any], kind: type[AEnvError], said: str) -> None:
    made = await here.make()
    with pytest.raises(kind) as caught:
        await here.services.change(ALICE, made.id, ServiceChange(**fields))
    assert said in f"{caught.value.message} {caught.value.hint}"
    assert (await here.get(made.id)).generation == 1


async def test_an_image_is_a_version_here(here: House) -> None:
    made = await here.make()
    assert (await here.put(made.id, image="env@1.1.0")).env.id == "env@1.1.0"
    assert (await here.put(made.id, image="1.0.0")).env.id == "env@1.0.0"
    assert (await here.put(made.id, version="~1.1")).env.id == "env@1.1.0"


async def test_what_is_others_is_not_there(here: House) -> None:
    made = await here.make()
    for asking in (
        here.services.get(BOB, made.id),
        here.services.change(BOB, made.id, ServiceChange(replicas=2)),
        here.services.restart(BOB, made.id),
        here.services.delete(BOB, made.id),
        here.services.logs(BOB, made.id),
    ):
        with pytest.raises(NotFound, match=f"there is no service '{made.id}'"):
            await asking
    assert (await here.services.list(BOB, limit=10, offset=0)) == ([], 0)
    found, total = await here.services.list(ADMIN, env="env@1.0.0", limit=10, offset=0)
    assert ([one.id for one in found], total) == ([made.id], 1)
    assert (await here.services.list(ALICE, env="three", limit=10, offset=0))[1] == 0
    with pytest.raises(Invalid, match="is not one version"):
        await here.services.list(ALICE, env="env@^1", limit=10, offset=0)
    reader = Caller("alice", frozenset((Scope.READ,)))
    assert (await here.services.get(reader, made.id)).owner_token == ""
    await here.services.delete(ADMIN, made.id)
    assert (await here.services.list(ALICE, limit=10, offset=0))[1] == 0
    assert (await here.services.list(ALICE, ended=True, limit=10, offset=0))[1] == 1


async def test_an_owner_has_not_any_number_of_services(here: House, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("aenv.api.services.owners.MOST", 2)
    made = [await here.make(replicas=0) for _ in range(2)]
    with pytest.raises(Conflict, match="alice has 2 services; 2 is the most"):
        await here.make(replicas=0)
    await here.services.create(BOB, request(replicas=0))
    await here.services.delete(ALICE, made[0].id)
    await here.make(replicas=0)


async def test_one_key_one_service(here: House) -> None:
    first = await here.services.create(ALICE, request(), key="k", wait=PATIENCE)
    again = await here.services.create(ALICE, request(), key="k", wait=PATIENCE)
    assert again.id == first.id
    assert len(here.engine.made) == 1
    with pytest.raises(Invalid, match="used for another request"):
        await here.services.create(ALICE, request(replicas=2), key="k")
    assert (await here.services.create(BOB, request(), key="k")).id != first.id


async def test_storage_outlives_its_service(here: House) -> None:
    made = await here.make("stored@1.0.0")
    assert (made.pvc_name, made.storage_size, made.mount_path) == ("drawer", "1Mi", "/home/admin/data")
    [volume] = here.engine.specs[ready(made)[0]].volumes
    assert (volume.owner, volume.name, volume.mount, volume.size) == ("alice", "drawer", "/home/admin/data", 1 << 20)
    with pytest.raises(Conflict, match=f"is that of service {made.id}"):
        await here.make("stored@1.0.0")
    with pytest.raises(Invalid, match="one replica at most"):
        await here.put(made.id, replicas=2)
    await here.services.delete(ALICE, made.id)
    assert ("alice", "drawer") in here.engine.stored
    with pytest.raises(Conflict, match="has 1Mi, which cannot be changed to 2Mi"):
        await here.make("stored@1.0.0", storage_size="2Mi")
    again = await here.make(pvc_name="drawer")  # its size is known
    assert again.storage_size == "1Mi"
    with pytest.raises(Conflict, match=f"is that of service {again.id} now"):
        await here.services.delete(ALICE, made.id, storage=True)
    theirs = await here.services.create(BOB, request("stored@1.0.0", storage_size="3Mi"), wait=PATIENCE)
    assert theirs.storage_size == "3Mi"
    await here.services.delete(ALICE, again.id, storage=True)
    assert list(here.engine.stored) == [("bob", "drawer")]
    fresh = await here.make("stored@1.0.0", storage_size="2Mi")
    await here.services.delete(ALICE, fresh.id)
    found = await here.make("stored@1.0.0")  # which would make 1Mi, were there none
    assert found.storage_size == "2Mi"
    await here.services.delete(ALICE, found.id)
    await here.services.delete(ALICE, fresh.id, storage=True)  # thought of later
    assert list(here.engine.stored) == [("bob", "drawer")]


async def test_an_update_with_storage_has_one_at_a_time(here: House) -> None:
    made = await here.make("stored@1.0.0")
    updated = await here.put(made.id, environment_variables={"A": "1"})
    assert (updated.status, updated.available_replicas) == ("Running", 1)
    assert ready(updated) != ready(made)
    back = await here.put(made.id, version="2.0.0", wait=0)
    back = await here.once(
        made.id, lambda found: found.status == "Running" and found.env.id == "stored@1.0.0", "the way back"
    )
    assert "rolled back" in back.reason
    assert back.environment_variables == {"A": "1"}
    here.engine.kill(ready(back)[0])
    again = await here.once(
        made.id, lambda found: found.available_replicas == 1 and ready(found) != ready(back), "another one"
    )
    assert here.engine.stored["alice", "drawer"] == ready(again)[0]


async def test_deleting_while_it_starts(here: House) -> None:
    made = await here.make(wait=0, environment_variables={"MOOD": "never"})
    await until(lambda: here.engine.alive, "a start")
    await here.services.delete(ALICE, made.id)
    assert here.engine.alive == []
    assert (await here.get(made.id)).status == "Terminated"
