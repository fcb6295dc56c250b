"""A platform on real Docker, as its user has it: from a new project and its image to instances, services and pools."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections.abc import Awaitable, Callable, Iterator
from contextlib import suppress
from typing import Any, TypeVar

import pytest

from aenv import http
from aenv.engines.docker.containers import ENGINE, ID, KIND, SANDBOX
from aenv.engines.docker.daemon import Daemon
from aenv.engines.docker.volumes import missing
from aenv.errors import NotFound
from tests import daemons
from tests.platform.support import DESK, Platform, eventually, new_home
from tests.platform.test_end_to_end import SDK
from tests.platform.test_services import Traffic, call, once, put, ready, tell

pytestmark = pytest.mark.xdist_group("docker-platform")

T = TypeVar("T")
MORE = '''

@register_tool
def who(ctx: Context) -> dict[str, Any]:
    """Who serves."""
    return {"id": ctx.instance_id, "edition": EDITION}


@register_tool
def write(text: str) -> None:
    """Write into the book."""
    with open("/home/admin/data/book", "a") as book:
        book.write(text)


@register_tool
def read() -> str:
    """Read the book."""
    return Path("/home/admin/data/book").read_text()
'''
STORAGE = ("--enable-storage", "--storage-name", "book", "--storage-size", "1Mi")


class Site:
    """A platform on a daemon, and what its user has built there."""

    def __init__(self, served: Platform, address: str, base_image: str) -> None:
        self.served, self.address, self.base_image = served, address, base_image
        self.images: list[str] = []
        self.killed: list[str] = []

    def ask(self, work: Callable[[Daemon], Awaitable[T]]) -> T:
        """What the daemon answers."""

        async def asked() -> T:
            try:
                return await work(Daemon(self.address))
            finally:
                await http.close()

        return asyncio.run(asked())

    @property
    def label(self) -> str:
        """Of all that the platform's engine has."""
        (place,) = (self.served.home / "docker").glob("platform-*")
        return f"{ENGINE}={place.name}"

    def containers(self) -> dict[str, dict[str, Any]]:
        """Those that run, by their sandbox."""
        query = {"filters": {"label": [self.label, f"{KIND}={SANDBOX}"]}}
        rows = self.ask(lambda daemon: daemon.ask("GET", "/containers/json", query=query))
        return {row["Labels"][ID]: row for row in rows}

    def left(self) -> list[str]:
        """Containers and volumes of the platform, whatever they do."""

        async def look(daemon: Daemon) -> list[str]:
            query = {"all": "1", "filters": {"label": [self.label]}}
            names = [row["Names"][0] for row in await daemon.ask("GET", "/containers/json", query=query)]
            volumes = (await daemon.ask("GET", "/volumes", query=query))["Volumes"]
            return [*names, *(row["Name"] for row in volumes or ())]

        return self.ask(look)

    def kill(self, id: str) -> None:
        """End the container of a sandbox, as somebody who knows nothing of us does."""
        container = self.containers()[id]["Id"]
        self.killed.append(id)
        self.ask(lambda daemon: daemon.ask("POST", f"/containers/{container}/kill"))

    def publish(self, version: str, **deploy: Any) -> str:
        """The next version of the project: written, built and pushed. What is built on is there already."""
        root = self.served.home / "desk"
        if not root.exists():
            self.served.aenv("init", "desk")
            (root / "Dockerfile").write_text(
                (root / "Dockerfile").read_text() + f"LABEL site={self.served.home.name}\n"
            )
        source = (DESK / "src" / "custom_env.py").read_text()
        (root / "src" / "custom_env.py").write_text(f"{source}{MORE}\nEDITION = {version!r}\n")
        config = json.loads((root / "config.json").read_text())
        changes = {"version": version, "deployConfig": {"environmentVariables": {"COLOUR": "oak"}, **deploy}}
        (root / "config.json").write_text(json.dumps(config | changes))
        name = f"aenv-platform-{self.served.home.name.lower().replace('_', '-')}"
        built = self.served.aenv(*("build", "-w", str(root), "--base-image", self.base_image, "-n", name, "-o", "json"))
        self.images.append(json.loads(built.stdout)["reference"])
        self.served.aenv("push", str(root))
        self.served.ask("POST", f"/env/desk/{version}/release").data  # noqa: B018
        return f"desk@{version}"

    async def forget(self, daemon: Daemon) -> None:
        """Remove what is left of a test that failed, and the images."""
        query = {"all": "1", "force": "1", "v": "1", "filters": {"label": [self.label]}}
        for row in await daemon.ask("GET", "/containers/json", query=query):
            with suppress(NotFound):
                await daemon.ask("DELETE", f"/containers/{row['Id']}", query=query)
        for row in (await daemon.ask("GET", "/volumes", query=query))["Volumes"] or ():
            with suppress(NotFound):
                await daemon.ask("DELETE", f"/volumes/{row['Name']}")
        for image in self.images:
            with suppress(NotFound):
                await daemon.ask("DELETE", f"/images/{image}", query={"force": "1"})


@pytest.fixture(scope="module")
def site(dockerd: str) -> Iterator[Site]:
    """A platform with a project. Tests leave each other's instances alone."""
    base_image = os.environ.get("AENV_TEST_BASE_IMAGE") or daemons.base_image(dockerd)
    variables = {"AENV_DOCKER_HOST": dockerd, "AENV_BASE_IMAGE": base_image, "AENV_GRACE": "30"}
    with new_home() as home:
        served = Platform(home, "--engine", "docker", variables=variables)
        found = Site(served, dockerd, base_image)
        try:
            served.start()
            yield found
        finally:
            served.end()
            found.ask(found.forget)


@pytest.fixture
def served(site: Site) -> Platform:
    """The platform, which runs whatever an earlier test did to it."""
    if not site.served.alive:
        site.served.start()
    return site.served


@pytest.fixture(scope="module")
def desk(site: Site) -> str:
    return site.publish("1.2.0")


def gone(site: Site, id: str) -> None:
    """Wait until nothing of a sandbox is left."""
    eventually(f"{id} to be gone", lambda: not [name for name in site.left() if name.endswith(id)])


def test_from_a_new_project_to_an_instance(site: Site, served: Platform, desk: str) -> None:
    made = json.loads(served.aenv("instance", "create", desk, "--keep-alive", "-o", "json").stdout)
    row = site.containers()[made["id"]]
    built = json.loads((served.home / "desk" / "config.json").read_text())["artifacts"][-1]
    assert row["ImageID"] == built["id"]
    assert served.call(made["id"], "POST", "/tools/put", {"thing": "pen"}).data == 1
    served.aenv("instance", "delete", made["id"], "--yes")
    gone(site, made["id"])


def test_everything_that_an_environment_offers_works_by_the_sdk(site: Site, served: Platform, desk: str) -> None:
    with served.program(SDK) as program:
        found = json.loads(program.line())
        about = found["about"]
        assert (about["colour"], about["size"], about["seed"]) == ("oak", "large", 7)
        assert about["arguments"] == ["--legs", "4"]
        assert (found["put"], found["wrong"], found["reward"]) == ({"result": 1}, True, 0.75)
        assert (found["function"], found["functions"]) == ({"things": 1}, "count")
        assert found["health"]["status"] == "success"
        assert (found["reset"], found["exec"], bytes(found["download"])) == ({"seed": 11}, 3, b"\x00hey")
        logs = f"/env-instance/{about['id']}/logs?tail=1"
        assert eventually("what it printed", lambda: served.ask("GET", logs).body) == b"put pen\n"
        program.go_on()
        assert program.end() == 0
    gone(site, about["id"])


def test_time_that_is_over_ends_a_container(site: Site, served: Platform, desk: str) -> None:
    made = served.create(desk, ttl="1h")
    assert made["id"] in site.containers()
    served.ask("POST", f"/env-instance/{made['id']}/extend", {"ttl": 1}).data  # noqa: B018
    gone(site, made["id"])
    ended = served.ask("GET", f"/env-instance/{made['id']}").data
    assert ended["status"] == "Terminated"
    assert "over" in ended["reason"]


@pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGKILL])
def test_a_server_that_is_started_again_finds_its_instances(
    site: Site, served: Platform, desk: str, how: signal.Signals
) -> None:
    made = served.create(desk)
    before = site.containers()[made["id"]]["Id"]
    assert served.call(made["id"], "POST", "/tools/put", {"thing": "pen"}).data == 1
    served.signal(how)
    served.wait()
    assert site.containers()[made["id"]]["Id"] == before
    served.start()
    assert served.call(made["id"], "POST", "/tools/look", {}).data == ["pen"]
    assert site.containers()[made["id"]]["Id"] == before
    assert served.ask("DELETE", f"/env-instance/{made['id']}").status == 200
    gone(site, made["id"])


def test_a_service_is_scaled_and_updated_under_traffic(site: Site, served: Platform, desk: str) -> None:
    made = json.loads(served.aenv("service", "create", desk, "--replicas", "3", "-o", "json").stdout)
    id = made["id"]
    assert (made["status"], made["available_replicas"]) == ("Running", 3)
    assert set(ready(made)) <= site.containers().keys()
    assert {call(served, id, "who")["id"] for _ in range(12)} == set(ready(made))
    following = site.publish("1.3.0")
    with Traffic(served, id) as traffic:
        served.aenv("service", "update", id, "--replicas", "2")
        two = once(served, id, "two to be left", lambda found: len(ready(found)) == 2)
        served.aenv("service", "update", id, "--image", following)
        traffic.more(10)
    assert traffic.failed == []
    assert call(served, id, "who")["edition"] == "1.3.0"
    for replica in ready(made):
        gone(site, replica)
    site.kill(ready(once(served, id, "two others", lambda found: len(ready(found)) == 2))[0])
    again = once(served, id, "another", lambda found: any(one["restarts"] and one["ready"] for one in found["members"]))
    assert not set(ready(again)) & set(ready(two))
    served.aenv("service", "delete", id, "--yes")
    for replica in ready(again):
        gone(site, replica)


@pytest.mark.skipif(bool(missing()), reason=missing() or "-")
def test_storage_survives_containers(site: Site, served: Platform, desk: str) -> None:
    service = json.loads(served.aenv("service", "create", desk, *STORAGE, "-o", "json").stdout)
    id = service["id"]
    call(served, id, "write", text="one ")
    (first,) = ready(service)
    site.kill(first)
    again = once(served, id, "another replica", lambda found: ready(found) and ready(found) != [first])
    assert call(served, id, "read") == "one "
    call(served, id, "write", text="two")
    updated = put(served, id, environment_variables={"SIZE": "large"})
    assert ready(updated) != ready(again)
    assert call(served, id, "read") == "one two"
    assert tell(served, id, "about").data["size"] == "large"
    served.ask("DELETE", f"/env-service/{id}").data  # noqa: B018
    second = json.loads(served.aenv("service", "create", desk, *STORAGE, "-o", "json").stdout)
    assert call(served, second["id"], "read") == "one two"
    served.ask("DELETE", f"/env-service/{second['id']}?deleteStorage=true").data  # noqa: B018


def test_warm_containers_are_claimed_while_they_are_fresh_and_well(site: Site, served: Platform) -> None:
    pooled = site.publish("1.4.0", pool={"min": 2, "max": 2})
    first = served.create(pooled)

    def waiting() -> set[str]:
        """Warm containers that are ready."""
        (pool,) = served.ask("GET", "/pool").data
        others = site.containers().keys() - taken
        return others if pool["ready"] == 2 and len(others) == 2 else set()

    taken = set(site.containers()) & {first["id"], *_instances(served)}
    warm = eventually("two that wait", waiting)
    second = served.create(pooled, environment_variables={"SIZE": "small"})
    assert second["id"] in warm
    taken.add(second["id"])
    assert served.call(second["id"], "POST", "/tools/about", {}).data["size"] == "small"
    warm = eventually("another that waits", waiting)
    (dead, _) = sorted(warm)
    site.kill(dead)
    for _ in range(2):
        third = served.create(pooled)
        taken.add(third["id"])
        assert third["id"] in site.containers()
        assert served.call(third["id"], "POST", "/tools/put", {"thing": "pen"}).data == 1  # nobody used it before
    for id in (first["id"], second["id"]):
        assert served.ask("DELETE", f"/env-instance/{id}").status == 200
        gone(site, id)  # what was used is not put back


def _instances(served: Platform) -> list[str]:
    return [row["id"] for row in served.ask("GET", "/env-instance/list?status=Running&limit=100").data]


def test_nothing_is_left(site: Site, served: Platform, desk: str) -> None:
    """Whatever the tests before this one did: a container and its door for each that is warm, and for each that was
    killed and is kept for a while with what it printed, and nothing else."""
    for row in served.ask("GET", "/env-service/list").data:
        served.ask("DELETE", f"/env-service/{row['id']}?deleteStorage=true").data  # noqa: B018
    for id in _instances(served):
        assert served.ask("DELETE", f"/env-instance/{id}").status == 200

    def only_warm() -> bool:
        warm = sum(pool["min"] for pool in served.ask("GET", "/pool").data)
        left = site.left()
        containers = [name for name in left if name.startswith("/")]
        doors = [name for name in left if name.startswith("aenv-door-")]
        fresh = [name for name in containers if not name.endswith(tuple(site.killed))]
        return len(fresh) == warm and len(doors) == len(containers) == len(left) / 2

    eventually("nothing but what is warm or was killed", only_warm)
