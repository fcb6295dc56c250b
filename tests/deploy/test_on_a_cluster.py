"""A platform on a real cluster, as its operator deploys it and as its user has it, from outside of the network of pods.

The tests are one story, and share its platform: what is left in the end is counted.
"""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from aenv.engines.kubernetes.manifests import STATE
from tests import cluster as clusters
from tests.cluster.components import NODE_ADDRESS
from tests.cluster.conftest import breakable, busybox_image, cluster, dockerd, ground, inside, node_registry
from tests.deploy import site as sites
from tests.deploy.site import Site
from tests.engines.docker.test_platform import MORE, STORAGE
from tests.engines.docker.test_second_exec import dual_project
from tests.platform.load import COUNTED, Counted, Traffic, counted
from tests.platform.support import DESK, eventually
from tests.platform.test_end_to_end import SDK
from tests.platform.test_services import call, once, ready

__all__ = ["breakable", "busybox_image", "cluster", "dockerd", "ground", "inside", "node_registry"]

pytestmark = pytest.mark.xdist_group("kubernetes")

RATE = 30
"""Calls a second: the machine runs the cluster, too."""


@pytest.fixture(scope="module")
def site(breakable: clusters.Local, inside: clusters.Cluster, node_registry: str, dockerd: str) -> Iterator[Site]:
    """The platform: two API services, a hub and a Redis."""
    if os.environ.get("AENV_TEST_DOCKER_HOST"):
        pytest.skip("AENV_TEST_DOCKER_HOST names a daemon that does not know the registry of this run")
    with clusters.outside():  # images are made of packages from elsewhere
        images = sites.images(dockerd, node_registry)
    with sites.site(breakable, images) as found:
        yield found


@pytest.fixture(scope="module")
def desk(site: Site, tmp_path_factory: pytest.TempPathFactory) -> str:
    root = shutil.copytree(DESK, tmp_path_factory.mktemp("projects") / "desk")
    source = root / "src" / "custom_env.py"
    source.write_text(f"{source.read_text()}{MORE}\nEDITION = '1.2.0'\n")
    return site.push(root)


@pytest.fixture(scope="module")
def versions(site: Site, tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Two of a project that tells the counter of every call."""
    return [_pushed(site, tmp_path_factory.mktemp("counted"), version) for version in ("1.0.0", "1.1.0")]


def _pushed(site: Site, folder: Path, version: str) -> str:
    root = shutil.copytree(COUNTED, folder / "counted", ignore=shutil.ignore_patterns("__pycache__"))
    (root / "src" / "edition.py").write_text(f"EDITION = {version!r}\n")
    config = json.loads((root / "config.json").read_text())
    (root / "config.json").write_text(json.dumps(config | {"version": version}))
    return site.push(root)


@pytest.fixture(scope="module")
def counter(inside: clusters.Cluster) -> Iterator[Counted]:
    with counted(NODE_ADDRESS) as found:
        yield found


def _gone(site: Site, id: str) -> None:
    eventually(f"{id} to be gone", lambda: site.gone(id), clusters.PATIENCE)


def _service(site: Site, ref: str, counter: Counted, *options: str) -> dict[str, Any]:
    variable = ("-e", f"COUNTER={NODE_ADDRESS}:{counter.port}")
    found: dict[str, Any] = json.loads(site.aenv("service", "create", ref, *variable, *options, "-o", "json").stdout)
    return found


def test_tokens_are_on(site: Site) -> None:
    assert site.ask("GET", "/env-instance/list", token=None).status == 401
    assert site.ask("GET", "/env/", token=None).status == 401
    key = site.token_in("aenv-hub-key")
    assert site.ask("GET", "/env/", token=key).status == 200
    assert site.ask("DELETE", "/env/mini-terminal/1.0.0", token=key).status == 403


def test_the_policy_of_sandboxes_finds_the_platform(site: Site) -> None:
    [policy] = [
        row for row in site.cluster.get(site.sandboxes, "networkpolicies")["items"] if row["spec"].get("ingress")
    ]
    [peer] = policy["spec"]["ingress"][0]["from"]
    wanted = peer["namespaceSelector"]["matchLabels"]
    assert wanted.items() <= site.cluster.get("default", "namespace", site.namespace)["metadata"]["labels"].items()


def test_a_project_is_pushed_and_an_instance_made(site: Site, desk: str) -> None:
    made = json.loads(site.aenv("instance", "create", desk, "--keep-alive", "-o", "json").stdout)
    [pod] = [pod for pod in site.pods() if pod["metadata"]["name"] == made["id"]]
    assert pod["spec"]["containers"][0]["resources"]["requests"]["cpu"] == "10m"  # the template of the site
    assert site.call(made["id"], "POST", "/tools/put", {"thing": "pen"}).data == 1
    site.aenv("instance", "delete", made["id"], "--yes")
    _gone(site, made["id"])


def test_everything_that_an_environment_offers_works_by_the_sdk(site: Site, desk: str) -> None:
    _use_by_the_sdk(site)


def _use_by_the_sdk(site: Site) -> None:
    with site.program(SDK) as program:
        found = json.loads(program.line())
        about = found["about"]
        assert (about["colour"], about["size"], about["seed"]) == ("oak", "large", 7)
        assert (found["put"], found["wrong"], found["reward"]) == ({"result": 1}, True, 0.75)
        assert (found["function"], found["health"]["status"]) == ({"things": 1}, "success")
        assert (found["reset"], found["exec"], bytes(found["download"])) == ({"seed": 11}, 3, b"\x00hey")
        program.go_on()
        assert program.end() == 0
    _gone(site, about["id"])


def test_time_that_is_over_ends_a_pod(site: Site, desk: str) -> None:
    made = site.create(desk, ttl="1h")
    assert not site.gone(made["id"])
    site.ask("POST", f"/env-instance/{made['id']}/extend", {"ttl": 1}).data  # noqa: B018
    _gone(site, made["id"])
    ended = site.ask("GET", f"/env-instance/{made['id']}").data
    assert ended["status"] == "Terminated"
    assert "over" in ended["reason"]


async def test_a_service_is_scaled_and_updated_under_traffic(site: Site, versions: list[str], counter: Counted) -> None:
    first, following = versions
    made = await asyncio.to_thread(_service, site, first, counter, "--replicas", "3")
    id = made["id"]
    assert (made["status"], made["available_replicas"]) == ("Running", 3)
    assert set(ready(made)) <= {pod["metadata"]["name"] for pod in site.pods()}
    async with Traffic(site, id, counter, rate=RATE) as traffic:
        await asyncio.to_thread(site.aenv, "service", "update", id, "--replicas", "5")
        scaled = site.ask("GET", f"/env-service/{id}").data
        assert (set(ready(made)) < set(ready(scaled)), len(ready(scaled))) == (True, 5)
        await asyncio.to_thread(site.aenv, "service", "update", id, "--image", following)
        updated = await asyncio.to_thread(_settled, site, id, 5)
        assert not set(ready(updated)) & set(ready(scaled))
        now = time.monotonic()
        await traffic.more(60)
    traffic.all_well()
    after = [call for call in traffic.calls.values() if call.began > now]
    assert {call.answer["edition"] for call in after} == {"1.1.0"}
    site.aenv("service", "delete", id, "--yes")
    for replica in {*ready(made), *ready(scaled)}:
        _gone(site, replica)


def _settled(site: Site, id: str, replicas: int) -> dict[str, Any]:
    """A service of which so many replicas are left, and nothing is under way."""

    def look() -> dict[str, Any] | None:
        found: dict[str, Any] = site.ask("GET", f"/env-service/{id}").data
        is_so = found["status"] == "Running" and len(ready(found)) == len(found["members"]) == replicas
        return found if is_so else None

    return eventually(f"{replicas} replicas", look, clusters.PATIENCE)


def test_storage_survives_pods(site: Site, desk: str) -> None:
    service = json.loads(site.aenv("service", "create", desk, *STORAGE, "-o", "json").stdout)
    id = service["id"]
    call(site, id, "write", text="one ")
    [first] = ready(service)
    site.delete_pod(site.sandboxes, first)
    once(site, id, "another replica", lambda found: ready(found) and ready(found) != [first])
    assert call(site, id, "read") == "one "
    call(site, id, "write", text="two")
    site.aenv("service", "delete", id, "--yes")
    assert len(site.left("persistentvolumeclaims")) == 1
    second = json.loads(site.aenv("service", "create", desk, *STORAGE, "-o", "json").stdout)
    assert call(site, second["id"], "read") == "one two"
    site.ask("DELETE", f"/env-service/{second['id']}?deleteStorage=true").data  # noqa: B018


def test_a_second_container_of_an_image_that_knows_nothing_of_us(
    site: Site, busybox_image: str, tmp_path: Path
) -> None:
    made = site.create(site.push(dual_project(tmp_path)), datasource=busybox_image)

    def shell(line: str) -> Any:
        return site.call(made["id"], "POST", "/tools/shell", {"line": line}).data

    assert shell("echo kept > /kept; cat /kept; which python; true") == "kept\n"
    [pod] = [pod for pod in site.pods() if pod["metadata"]["name"] == made["id"]]
    assert [one["name"] for one in pod["spec"]["containers"]] == ["main", "second"]
    site.ask("DELETE", f"/env-instance/{made['id']}").data  # noqa: B018
    _gone(site, made["id"])


async def test_api_services_are_killed_and_replaced_under_load(
    site: Site, breakable: clusters.Local, desk: str, versions: list[str], counter: Counted
) -> None:
    instance = await asyncio.to_thread(site.create, desk)
    assert site.call(instance["id"], "POST", "/tools/put", {"thing": "pen"}).data == 1
    service = await asyncio.to_thread(_service, site, versions[0], counter, "--replicas", "2")
    killed, _ = (pod["metadata"]["name"] for pod in site.pods("api"))
    async with Traffic(site, service["id"], counter, rate=RATE) as traffic:
        await asyncio.to_thread(breakable.kill_containers, site.namespace, killed)
        dead = time.monotonic()
        await traffic.more(100)
        await asyncio.to_thread(_is_back, site, killed)
    traffic.lost(dead)
    assert site.call(instance["id"], "POST", "/tools/look", {}).data == ["pen"]
    async with Traffic(site, service["id"], counter, rate=RATE) as traffic:
        await asyncio.to_thread(_replace_servers, site)
        await traffic.more(60)
    traffic.all_well()
    assert site.call(instance["id"], "POST", "/tools/look", {}).data == ["pen"]
    again = site.ask("GET", f"/env-service/{service['id']}").data
    assert ready(again) == ready(service)
    await asyncio.to_thread(_replace_replica, site, service)
    site.ask("DELETE", f"/env-instance/{instance['id']}").data  # noqa: B018
    site.aenv("service", "delete", service["id"], "--yes")
    await asyncio.to_thread(eventually, "no pods", lambda: not site.left("pods"), clusters.PATIENCE)


def _is_back(site: Site, name: str) -> None:
    """Wait for a server that was killed."""

    def look() -> bool:
        [pod] = [pod for pod in site.pods("api") if pod["metadata"]["name"] == name]
        [status] = pod["status"]["containerStatuses"]
        return bool(status["restartCount"] and status["ready"])

    eventually("the server to be back", look, clusters.PATIENCE)


def _replace_servers(site: Site) -> None:
    """One after the other, as an upgrade does. Back when those of before have ended."""
    before = {pod["metadata"]["name"] for pod in site.pods("api")}
    for words in (("restart",), ("status", f"--timeout={clusters.PATIENCE:g}s")):
        site.cluster.kubectl("rollout", words[0], "deployment/aenv-api", "--namespace", site.namespace, *words[1:])
    eventually(
        "the end of the servers of before",
        lambda: not before & {pod["metadata"]["name"] for pod in site.pods("api")},
        clusters.PATIENCE,
    )


def _replace_replica(site: Site, service: dict[str, Any]) -> None:
    """End a replica. The servers, who were not asked for the service themselves, read its package by their own key,
    though it is not for everybody."""
    site.ask("PUT", "/env/counted/policy", {"public": False}).data  # noqa: B018
    lost, other = ready(service)
    site.delete_pod(site.sandboxes, lost)
    now = once(site, service["id"], "another replica", lambda found: len(set(ready(found)) - {lost}) == 2)
    assert other in ready(now)
    told = site.cluster.kubectl("logs", "deployment/aenv-hub", "--namespace", site.namespace).splitlines()
    assert [line for line in told if '"owner":"(api)"' in line and "/package 200" in line]


def test_controllers_make_sandboxes_for_servers_that_may_ask_the_cluster_for_nothing(site: Site, desk: str) -> None:
    site.deploy("--set", "controller.enabled=true", "--set", "api.replicas=1")
    accounts = {"hub": {"aenv-server"}, "api": {"aenv-server"}, "controller": {"aenv-engine"}}
    eventually("the end of the servers of before", lambda: _accounts(site) == accounts, clusters.PATIENCE)
    made = json.loads(site.aenv("instance", "create", desk, "--keep-alive", "-o", "json").stdout)
    [pod] = [pod for pod in site.pods() if pod["metadata"]["name"] == made["id"]]
    assert pod["metadata"]["labels"][STATE].startswith("controller-")
    assert site.call(made["id"], "POST", "/tools/put", {"thing": "pen"}).data == 1
    site.aenv("instance", "delete", made["id"], "--yes")
    _gone(site, made["id"])
    _use_by_the_sdk(site)


def _accounts(site: Site) -> dict[str, set[str]]:
    """As whom the servers ask the cluster, by their kind."""
    parts = ("hub", "api", "controller")
    return {part: {pod["spec"]["serviceAccountName"] for pod in site.pods(part)} for part in parts}


def test_nothing_is_left(site: Site) -> None:
    """Whatever the tests before this one did."""
    for row in site.ask("GET", "/env-service/list").data:
        site.ask("DELETE", f"/env-service/{row['id']}?deleteStorage=true").data  # noqa: B018
    for row in site.ask("GET", "/env-instance/list?status=Running&limit=100").data:
        assert site.ask("DELETE", f"/env-instance/{row['id']}").status == 200
    eventually(
        "no pods and no volumes",
        lambda: site.left("pods", "services", "persistentvolumeclaims") == [],
        clusters.PATIENCE,
    )
    # Those are of the platform, and none of an instance: one for all who clear up, of the API services and then of the
    # controllers, and one for each network of the hub, which reads projects without any, and of the API services.
    leases, policies = site.left("leases"), site.left("networkpolicies")
    kinds = sorted(name.rpartition("-")[2] for name in policies)
    assert (len(leases), kinds) == (2, ["full", "none"]), (leases, policies)


def test_a_deployment_that_is_removed_leaves_what_is_kept_or_nothing(site: Site) -> None:
    site.deploy("--delete")
    kept = {"persistentvolumeclaim/aenv-packages", "persistentvolumeclaim/data-aenv-redis-0"}
    kept |= {f"secret/aenv-{name}" for name in ("controller", "first-token", "redis")}
    assert set(site.cluster.left(site.namespace)) == kept
    site.deploy("--delete", "--with-data")
    assert site.cluster.left(site.namespace) == []
    namespace = f"namespace/{site.sandboxes}"
    eventually(
        "the namespace of sandboxes to be gone",
        lambda: namespace not in site.cluster.kubectl("get", "namespaces", "--output", "name").split(),
        clusters.PATIENCE,
    )
