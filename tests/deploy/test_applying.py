"""A release on a real API server: made, changed, pruned and removed, and nothing that is somebody else's."""

from __future__ import annotations

import asyncio
import itertools
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from aenv import http
from aenv.deploy.applying import Change, Site
from aenv.deploy.chart import Release, chart
from aenv.engines.kubernetes.api import MERGE, Cluster
from aenv.errors import Conflict, NotFound, StartFailed, Unsupported
from tests.cluster.api import ApiServer
from tests.cluster.conftest import api_server
from tests.deploy.support import SETS, write

__all__ = ["api_server"]

_numbers = itertools.count()
MONITOR = {
    "apiVersion": "apiextensions.k8s.io/v1",
    "kind": "CustomResourceDefinition",
    "metadata": {"name": "servicemonitors.monitoring.coreos.com"},
    "spec": {
        "group": "monitoring.coreos.com",
        "names": {"kind": "ServiceMonitor", "plural": "servicemonitors", "singular": "servicemonitor"},
        "scope": "Namespaced",
        "versions": [
            {
                "name": "v1",
                "served": True,
                "storage": True,
                "schema": {"openAPIV3Schema": {"type": "object", "x-kubernetes-preserve-unknown-fields": True}},
            }
        ],
    },
}


class Ground:
    """A release of its own on the server."""

    def __init__(self, server: ApiServer, folder: Path) -> None:
        self.folder = folder
        self.kubeconfig = str(server.kubeconfig)
        self.namespace = f"site-{next(_numbers)}"

    async def site(self, *, dry_run: bool = False, name: str = "aenv") -> Site:
        cluster = await Cluster.find(self.kubeconfig)
        site = Site(cluster, Release(name=name, namespace=self.namespace), dry_run=dry_run)
        await site.look()
        return site

    async def deploy(self, values: dict[str, Any], **options: Any) -> list[Change]:
        site = await self.site(**options)
        rendered = await site.render(chart(), chart().effective([write(values, self.folder)]))
        changes = [change async for change in site.apply(rendered.objects)]
        return changes + [change async for change in site.prune(rendered.objects)]

    async def ask(self, method: str, path: str, **more: Any) -> Any:
        return await (await Cluster.find(self.kubeconfig)).ask(method, path, **more)

    async def objects(self) -> dict[str, Any]:
        """What of a release is in the two namespaces, by kind and name."""
        found = {}
        for namespace, (group, plural) in itertools.product(
            (self.namespace, f"{self.namespace}-sandboxes"),
            (
                ("api/v1", "services"),
                ("api/v1", "secrets"),
                ("api/v1", "persistentvolumeclaims"),
                ("apis/apps/v1", "deployments"),
                ("apis/apps/v1", "statefulsets"),
                ("apis/rbac.authorization.k8s.io/v1", "roles"),
                ("apis/networking.k8s.io/v1", "networkpolicies"),
            ),
        ):
            page = await self.ask("GET", f"/{group}/namespaces/{namespace}/{plural}")
            found |= {f"{plural}/{row['metadata']['name']}": row for row in page["items"]}
        return found


@pytest.fixture
def ground(api_server: ApiServer, tmp_path: Path) -> Ground:
    return Ground(api_server, tmp_path)


@pytest.fixture(autouse=True)
def closed() -> Iterator[None]:
    yield
    asyncio.run(http.close())


def _actions(changes: list[Change]) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for change in changes:
        found.setdefault(change.action, []).append(f"{change.kind} {change.name}")
    return found


@pytest.mark.parametrize("name", SETS)
async def test_the_server_accepts_every_object(name: str, ground: Ground) -> None:
    await ground.ask("PATCH", f"/apis/apiextensions.k8s.io/v1/customresourcedefinitions/{MONITOR['metadata']['name']}",
                     body=MONITOR, query={"fieldManager": "test", "force": "true"},
                     content_type="application/apply-patch+yaml")  # fmt: skip
    if name == "existing":
        await ground.ask("POST", "/api/v1/namespaces", body=_named("Namespace", "elsewhere"))
    values = SETS[name]
    if name == "external":
        values = {**values, "sandboxes": {**values["sandboxes"], "namespace": ground.namespace}}
    async with asyncio.timeout(120):
        while name == "full":  # it takes a moment until a new kind is served
            try:
                await ground.ask("GET", "/apis/monitoring.coreos.com/v1")
                break
            except NotFound:
                await asyncio.sleep(0.05)
    first = _actions(await ground.deploy(values, dry_run=True))
    assert set(first) == {"made"}
    with pytest.raises(NotFound):  # it was checked, and not made
        await ground.ask("GET", f"/api/v1/namespaces/{ground.namespace}")
    assert _actions(await ground.deploy(values)) == first
    again = _actions(await ground.deploy(values))
    assert set(again) == {"unchanged"}
    assert sorted(again["unchanged"]) == sorted(first["made"])


def _named(kind: str, name: str, **labels: str) -> dict[str, Any]:
    return {"apiVersion": "v1", "kind": kind, "metadata": {"name": name, "labels": labels}}


async def test_secrets_stay_over_upgrades_and_what_is_no_longer_asked_for_goes(ground: Ground) -> None:
    await ground.deploy({"controller": {"enabled": True}})
    before = await ground.objects()
    assert "deployments/aenv-controller" in before
    changes = _actions(await ground.deploy({"api": {"replicas": 3}, "hub": {"packages": {"s3": "s3://bucket/x"}}}))
    after = await ground.objects()
    for name in ("secrets/aenv-redis", "secrets/aenv-first-token"):
        assert after[name]["data"] == before[name]["data"]
    assert after["deployments/aenv-api"]["spec"]["replicas"] == 3
    assert "deployments/aenv-controller" not in after
    assert "Service aenv-controller" in changes["removed"]
    # What holds data is never removed by a change.
    assert changes["kept"] == ["Secret aenv-controller", "PersistentVolumeClaim aenv-packages"]
    assert "persistentvolumeclaims/aenv-packages" in after


async def test_a_dry_run_of_a_change_changes_nothing(ground: Ground) -> None:
    await ground.deploy({"controller": {"enabled": True}})
    before = await ground.objects()
    changes = _actions(await ground.deploy({"api": {"replicas": 7}}, dry_run=True))
    assert "Deployment aenv-api" in changes["changed"]
    assert "Deployment aenv-controller" in changes["removed"]
    assert await ground.objects() == before


async def test_removing_keeps_data_unless_asked(ground: Ground) -> None:
    await ground.deploy({})
    await ground.ask(
        "POST",
        f"/api/v1/namespaces/{ground.namespace}/configmaps",
        body=_named("ConfigMap", "mine", **{"app.kubernetes.io/instance": "aenv"}),
    )
    kept = {"secrets/aenv-redis", "secrets/aenv-first-token", "persistentvolumeclaims/aenv-packages"}
    site = await ground.site()
    changes = _actions([change async for change in site.delete(set())])
    assert set(await ground.objects()) == kept
    assert f"Namespace {ground.namespace}-sandboxes" in changes["kept"]
    # Servers go before Redis does.
    servers = [name.split()[1] for name in changes["removed"] if name.startswith(("Deployment", "StatefulSet"))]
    assert servers == ["aenv-hub", "aenv-api", "aenv-redis"]
    assert _actions(await ground.deploy({}))["unchanged"] == [
        f"Namespace {ground.namespace}-sandboxes",
        "Secret aenv-first-token",
        "Secret aenv-redis",
        "PersistentVolumeClaim aenv-packages",
    ]
    await ground.ask("GET", f"/api/v1/namespaces/{ground.namespace}/configmaps/mine")


async def test_what_is_somebody_elses_is_never_touched(ground: Ground) -> None:
    await ground.deploy({"fullnameOverride": "other"}, name="first")
    before = await ground.objects()
    with pytest.raises(Conflict, match="is there already, and is none of this release's"):
        await ground.deploy({"fullnameOverride": "other"}, name="second")
    assert await ground.objects() == before
    site = await ground.site(name="second")
    assert [change async for change in site.delete({ground.namespace})] == []
    assert await ground.objects() == before


@pytest.mark.parametrize(("manager", "hint"), [("Helm", "helm upgrade"), ("", "--release or --namespace")])
async def test_what_helm_or_a_person_made_is_not_taken_over(manager: str, hint: str, ground: Ground) -> None:
    await ground.ask("POST", "/api/v1/namespaces", body=_named("Namespace", ground.namespace))
    made = _named("ServiceAccount", "aenv-engine", **{"app.kubernetes.io/managed-by": manager})
    await ground.ask("POST", f"/api/v1/namespaces/{ground.namespace}/serviceaccounts", body=made)
    with pytest.raises(Conflict, match="ServiceAccount aenv-engine is there already") as caught:
        await ground.deploy({})
    assert hint in (caught.value.hint or "")
    assert await ground.ask("GET", f"/apis/apps/v1/namespaces/{ground.namespace}/deployments") is not None
    with pytest.raises(NotFound):  # nothing was begun
        await ground.ask("GET", f"/api/v1/namespaces/{ground.namespace}-sandboxes")


async def test_two_releases_of_one_name_do_not_see_each_other(ground: Ground, api_server: ApiServer) -> None:
    other = Ground(api_server, ground.folder)
    await ground.deploy({})
    await other.deploy({})
    before = await other.objects()
    site = await ground.site()
    assert [change async for change in site.delete(set(), everything=True)]
    assert await other.objects() == before


async def test_a_kind_that_the_cluster_lacks_is_named(ground: Ground) -> None:
    site = await ground.site()
    with pytest.raises(Unsupported, match="this cluster knows no Thing of example.org/v1"):
        await site._place("example.org/v1", "Thing")


async def test_waiting_says_what_for(ground: Ground) -> None:
    """No pod ever runs on a server alone."""
    await ground.deploy({})
    site = await ground.site()
    rendered = await site.render(chart(), chart().effective())
    told: list[str] = []
    with pytest.raises(StartFailed, match="aenv-api has 0 of 2"):
        await site.wait(rendered.objects, 1.5, told.append)
    assert told == ["waiting: aenv-api has 0 of 2; aenv-hub has 0 of 1; aenv-redis has 0 of 1"]
    for kind, name, number in (("deployments", "api", 2), ("deployments", "hub", 1), ("statefulsets", "redis", 1)):
        path = f"/apis/apps/v1/namespaces/{ground.namespace}/{kind}/aenv-{name}/status"
        counts = dict.fromkeys(("replicas", "readyReplicas", "updatedReplicas", "observedGeneration"), number)
        await ground.ask("PATCH", path, body={"status": counts}, content_type=MERGE)
    await site.wait(rendered.objects, 30, told.append)


def test_the_command_does_all_of_it(ground: Ground) -> None:
    def aenv(*words: str) -> tuple[int, Any, str]:
        command = [sys.executable, "-m", "aenv", "deploy", "--kubeconfig", ground.kubeconfig, "-n", ground.namespace]
        done = subprocess.run([*command, "-o", "json", *words], capture_output=True, text=True, check=False)
        return done.returncode, json.loads(done.stdout or "null"), done.stderr

    code, data, err = aenv("--no-wait")
    assert (code, {row["action"] for row in data["objects"]}) == (0, {"made"}), err
    assert f"kubectl -n {ground.namespace} get secret aenv-first-token" in err
    code, data, err = aenv("--timeout", "1s")
    assert (code, data) == (1, None)
    assert "not everything was ready within 1 s: aenv-api has 0 of 2" in err
    code, data, err = aenv("--delete", "--with-data", "--dry-run")
    assert (code, data["dry_run"]) == (0, True)
    code, data, err = aenv("--delete")
    assert {row["action"] for row in data["objects"]} == {"removed", "kept"}
