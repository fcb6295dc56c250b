"""A release on a cluster: its objects applied, waited for, pruned and removed.

Every object carries the release's labels. What has others is somebody else's, and is never changed: that is looked at
before anything is. What is marked to be kept stays when the release goes, unless it is asked for.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

from aenv.deploy.chart import MANAGER, ORDER, Chart, Object, Release, Rendered
from aenv.engines.kubernetes.api import APPLY, Cluster
from aenv.errors import AEnvError, Conflict, Forbidden, NotFound, StartFailed, Unsupported

KEEP = "helm.sh/resource-policy"
_LABEL = "app.kubernetes.io/"
_HOME = "aenv/release-namespace"
_WORKLOADS = ("Deployment", "StatefulSet")
_GROUPS = (
    "v1",
    "apps/v1",
    "autoscaling/v2",
    "autoscaling/v2beta2",
    "autoscaling/v1",
    "policy/v1",
    "policy/v1beta1",
    "networking.k8s.io/v1",
    "rbac.authorization.k8s.io/v1",
    "monitoring.coreos.com/v1",
)
"""Where objects of the chart are, of whichever version."""
_PAUSE = 0.5
_SAID = 400
"""The most characters of a reason."""
_GOING = 180.0
"""Seconds in which what is removed must be gone."""


class Change(NamedTuple):
    """What happened to an object."""

    action: str
    """``made``, ``changed``, ``unchanged``, ``removed`` or ``kept``."""
    kind: str
    namespace: str
    name: str


class _Place(NamedTuple):
    """Where the objects of a kind are."""

    group: str
    plural: str
    namespaced: bool

    def path(self, namespace: str = "", name: str = "") -> str:
        root = f"/apis/{self.group}" if "/" in self.group else f"/api/{self.group}"
        middle = f"/namespaces/{namespace}" if self.namespaced and namespace else ""
        return f"{root}{middle}/{self.plural}" + (f"/{name}" if name else "")


class Site:
    """One release, as a cluster has it. With ``dry_run`` the cluster checks everything, and changes nothing."""

    def __init__(self, cluster: Cluster, release: Release, *, dry_run: bool = False) -> None:
        self._cluster = cluster
        self.release = release
        self._query = {"dryRun": "All"} if dry_run else {}
        self._places: dict[str, dict[str, _Place]] = {}
        self._there: dict[str, bool] = {}
        """Whether a namespace is, where nothing is changed."""

    async def look(self) -> None:
        """See which version the cluster has, what it offers, and whether the release is there already."""
        version = await self._cluster.ask("GET", "/version")
        numbers = [int(re.sub(r"\D", "", str(version.get(part, ""))) or 0) for part in ("major", "minor")]
        groups = (await self._cluster.ask("GET", "/apis")).get("groups", ())
        apis = {"v1", *(row["groupVersion"] for group in groups for row in group["versions"])}
        path = f"/api/v1/namespaces/{self.release.namespace}/secrets"
        try:
            found = await self._cluster.ask("GET", path, query={"labelSelector": self._selector, "limit": "1"})
        except NotFound:
            found = {}
        self.release = Release(
            name=self.release.name,
            namespace=self.release.namespace,
            version=(numbers[0], numbers[1]),
            apis=frozenset(apis),
            more_apis=self.release.more_apis,
            upgrade=bool(found.get("items")),
        )

    async def render(self, chart: Chart, values: Mapping[str, Any]) -> Rendered:
        """The objects, with whatever the templates want to keep of those that are there."""
        known: dict[tuple[str, ...], Any] = {}
        while True:
            asked: set[tuple[str, ...]] = set()

            def lookup(*what: str, asked: set[tuple[str, ...]] = asked) -> Any:
                asked.add(what)
                return known.get(what) or {}

            rendered = chart.render(values, self.release, lookup)
            if asked <= set(known):
                return rendered
            for group, kind, namespace, name in asked:
                known[group, kind, namespace, name] = await self._get(await self._place(group, kind), namespace, name)

    async def apply(self, objects: Sequence[Object]) -> AsyncIterator[Change]:
        """Make all of them so, in their order. Nothing is changed when one of them is not ours to change."""
        found = []
        for one in objects:
            place = await self._place(one.content["apiVersion"], one.kind)
            there = await self._get(place, _namespace(one.content), one.name)
            self._check_ours(one, there)
            found.append((one, place, there))
        await self._make_home()
        for one, place, before in found:
            made = Change("made", one.kind, _namespace(one.content), one.name)
            after = await self._applied(one, place)
            if before is None:
                yield made
            else:
                same = _essence(before) == _essence(after)
                yield made._replace(action="unchanged" if same else "changed")

    async def prune(self, objects: Sequence[Object]) -> AsyncIterator[Change]:
        """Remove what the release had and has no more."""
        wanted = {(one.kind, _namespace(one.content), one.name) for one in objects}
        namespaces = {_namespace(one.content) for one in objects}
        async for kind, place, found in self._ours(namespaces):
            if (kind, _namespace(found), found["metadata"]["name"]) not in wanted:
                yield await self._remove(kind, place, found, everything=False)

    async def delete(self, namespaces: set[str], *, everything: bool = False) -> AsyncIterator[Change]:
        """Remove the release; with ``everything`` also what is marked to be kept, and the volumes of Redis."""
        ours = [row async for row in self._ours(namespaces)]
        ours.reverse()
        for part in ("Deployment", "StatefulSet", ""):  # servers first: they still have something to say to Redis
            rows = [row for row in ours if row[0] == part or (not part and row[0] not in _WORKLOADS)]
            for kind, place, found in rows:
                yield await self._remove(kind, place, found, everything=everything)
            for kind, _, found in rows:
                if kind in _WORKLOADS:
                    await self._no_pods(found)
        if everything:
            place = await self._place("v1", "PersistentVolumeClaim")
            path = place.path(self.release.namespace)
            query = {"labelSelector": f"{_LABEL}name=aenvironment,{_LABEL}instance={self.release.name}"}
            for found in (await self._cluster.ask("GET", path, query=query)).get("items") or ():
                yield await self._remove("PersistentVolumeClaim", place, found, everything=True)

    async def wait(self, objects: Sequence[Object], timeout: float, say: Callable[[str], None]) -> None:
        """Wait until every server is up, and tell what they wait for whenever that changes."""
        workloads = [one for one in objects if one.kind in _WORKLOADS]
        told = ""
        try:
            async with asyncio.timeout(timeout):
                while left := [why for one in workloads if (why := await self._unready(one))]:
                    if (now := "; ".join(left)) != told:
                        told = now
                        say(f"waiting: {now}")
                    await asyncio.sleep(_PAUSE)
        except TimeoutError:
            raise StartFailed(
                f"not everything was ready within {timeout:g} s: {told}",
                hint="mend it and deploy again: what is there already is kept",
            ) from None

    # Parts

    @property
    def _selector(self) -> str:
        return (
            f"{_LABEL}name=aenvironment,{_LABEL}instance={self.release.name},{_LABEL}managed-by={MANAGER},"
            f"{_HOME}={self.release.namespace}"
        )

    async def _place(self, group: str, kind: str) -> _Place:
        if group not in self._places:
            path = f"/apis/{group}" if "/" in group else f"/api/{group}"
            try:
                rows = (await self._cluster.ask("GET", path)).get("resources") or ()
            except NotFound:
                rows = ()
            self._places[group] = {
                row["kind"]: _Place(group, row["name"], row["namespaced"]) for row in rows if "/" not in row["name"]
            }
        if kind not in self._places[group]:
            raise Unsupported(
                f"this cluster knows no {kind} of {group}",
                hint="install what brings it, or set the values that ask for it otherwise",
            )
        return self._places[group][kind]

    async def _get(self, place: _Place, namespace: str, name: str) -> dict[str, Any] | None:
        try:
            found: dict[str, Any] = await self._cluster.ask("GET", place.path(namespace, name))
        except NotFound:
            return None
        return found

    def _check_ours(self, one: Object, there: Mapping[str, Any] | None) -> None:
        if there is None:
            return
        labels = there["metadata"].get("labels") or {}
        wanted = {f"{_LABEL}instance": self.release.name, f"{_LABEL}managed-by": MANAGER}
        wanted[_HOME] = self.release.namespace
        if all(labels.get(key) == value for key, value in wanted.items()):
            return
        hint = "choose another --release or --namespace"
        if labels.get(f"{_LABEL}managed-by") == "Helm":
            hint = "Helm looks after it: go on with 'helm upgrade'"
        elif one.kind == "Namespace":
            hint = "--set sandboxes.createNamespace=false leaves the namespace to you"
        raise Conflict(f"{one.kind} {one.name} is there already, and is none of this release's", hint=hint)

    async def _applied(self, one: Object, place: _Place) -> dict[str, Any]:
        namespace, content = _namespace(one.content), one.content
        query = {"fieldManager": MANAGER, "force": "true", **self._query}
        if self._query and namespace and await self._lacks(namespace):
            # It would have been made by then; any other one does for a check.
            namespace = "default"
            content = {**content, "metadata": {**content["metadata"], "namespace": namespace}}
        try:
            after: dict[str, Any] = await self._cluster.ask(
                "PATCH", place.path(namespace, one.name), body=content, query=query, content_type=APPLY
            )
        except AEnvError as exc:
            raise type(exc)(f"{one.kind} {one.name}: {exc.message}", hint=exc.hint) from exc
        return after

    async def _lacks(self, namespace: str) -> bool:
        if namespace not in self._there:
            place = await self._place("v1", "Namespace")
            self._there[namespace] = await self._get(place, "", namespace) is not None
        return not self._there[namespace]

    async def _make_home(self) -> None:
        """The release's own namespace; it is not the release's to remove."""
        name = self.release.namespace
        # The policy of sandboxes knows the platform by this label, which servers before 1.21 do not set themselves.
        about = {"name": name, "labels": {"kubernetes.io/metadata.name": name}}
        body = {"apiVersion": "v1", "kind": "Namespace", "metadata": about}
        try:
            await self._cluster.ask("GET", f"/api/v1/namespaces/{name}")
        except NotFound:
            await self._cluster.ask("POST", "/api/v1/namespaces", body=body, query=self._query)
        except Forbidden:  # who has rights in one namespace only cannot look at it
            return

    async def _ours(self, namespaces: set[str]) -> AsyncIterator[tuple[str, _Place, dict[str, Any]]]:
        """The release's objects in the order of their making: everywhere, or where we may look."""
        kinds: dict[str, _Place] = {}
        for group in _GROUPS:
            for kind in (*ORDER, "ServiceMonitor"):
                if kind not in kinds:
                    try:
                        kinds[kind] = await self._place(group, kind)
                    except Unsupported:
                        continue
        query = {"labelSelector": self._selector}
        for kind in sorted(kinds, key=lambda kind: ORDER.index(kind) if kind in ORDER else len(ORDER)):
            place = kinds[kind]
            try:
                pages = [await self._cluster.ask("GET", place.path(), query=query)]
            except Forbidden:
                if not place.namespaced:
                    continue
                pages = []
                for namespace in sorted(namespaces | {self.release.namespace}):
                    pages.append(await self._cluster.ask("GET", place.path(namespace), query=query))
            for page in pages:
                for found in page.get("items") or ():
                    yield kind, place, found

    async def _remove(self, kind: str, place: _Place, found: Mapping[str, Any], *, everything: bool) -> Change:
        meta = found["metadata"]
        change = Change("removed", kind, meta.get("namespace", ""), meta["name"])
        if not everything and (meta.get("annotations") or {}).get(KEEP) == "keep":
            return change._replace(action="kept")
        path = place.path(change.namespace, change.name)
        with suppress(NotFound):  # it went with something else
            await self._cluster.ask("DELETE", path, query={"propagationPolicy": "Background", **self._query})
        return change

    async def _no_pods(self, workload: Mapping[str, Any]) -> None:
        """Wait until the pods of a workload that was removed are gone."""
        if self._query:
            return
        try:
            async with asyncio.timeout(_GOING):
                while await self._pods(workload):  # noqa: ASYNC110 - a cluster is asked
                    await asyncio.sleep(_PAUSE)
        except TimeoutError:
            name = workload["metadata"]["name"]
            raise StartFailed(f"pods of {name} are still there after {_GOING:g} s", hint="try again") from None

    async def _pods(self, workload: Mapping[str, Any]) -> list[dict[str, Any]]:
        labels = ",".join(f"{key}={value}" for key, value in workload["spec"]["selector"]["matchLabels"].items())
        path = f"/api/v1/namespaces/{_namespace(workload)}/pods"
        return list((await self._cluster.ask("GET", path, query={"labelSelector": labels})).get("items") or ())

    async def _unready(self, one: Object) -> str:
        """What a workload waits for; empty when it is as it should be."""
        namespace = _namespace(one.content)
        found = await self._get(await self._place("apps/v1", one.kind), namespace, one.name)
        if found is None:
            raise StartFailed(f"{one.kind} {one.name} was removed by somebody else", hint="deploy again")
        status, wanted = found.get("status") or {}, found["spec"].get("replicas", 1)
        seen = status.get("observedGeneration", 0) >= found["metadata"]["generation"]
        ready = min(status.get("readyReplicas") or 0, status.get("updatedReplicas") or 0)
        if seen and ready >= wanted and (status.get("replicas") or 0) == wanted:
            return ""
        reasons = sorted({reason for pod in await self._pods(found) if (reason := await self._reason(pod))})
        return f"{one.name} has {ready} of {wanted}" + (f" ({', '.join(reasons)})" if reasons else "")

    async def _reason(self, pod: Mapping[str, Any]) -> str:
        """Why a pod is not up: what the cluster says, or what the server in it said last."""
        status, meta = pod.get("status") or {}, pod["metadata"]
        if "deletionTimestamp" in meta:
            return ""
        for container in status.get("containerStatuses") or ():
            ended = (container.get("lastState") or {}).get("terminated") or {}
            if ended and not container.get("ready"):
                query = {"container": container["name"], "previous": "true", "tailLines": "5"}
                path = f"/api/v1/namespaces/{meta['namespace']}/pods/{meta['name']}/log"
                said = ended.get("reason", "")
                with suppress(AEnvError):  # nobody has it any more
                    said = (
                        _last_words((await self._cluster.fetch("GET", path, query=query)).decode(errors="replace"))
                        or said
                    )
                return f"{container['name']} ended with {ended.get('exitCode')}: {said}"
            waiting = (container.get("state") or {}).get("waiting") or {}
            if waiting.get("reason") not in (None, "ContainerCreating", "PodInitializing"):
                return f"{waiting['reason']}: {waiting.get('message', '')}".rstrip(": ")[:_SAID]
        for condition in status.get("conditions") or ():
            if condition.get("reason") == "Unschedulable":
                return f"unschedulable: {condition.get('message', '')}"[:_SAID]
        return ""


def _namespace(content: Mapping[str, Any]) -> str:
    return str(content["metadata"].get("namespace", ""))


def _essence(content: Mapping[str, Any]) -> dict[str, Any]:
    """An object without what changes by itself."""
    meta = {key: value for key, value in content["metadata"].items() if key in ("labels", "annotations", "generation")}
    if content["kind"] in ("Deployment",):  # its controller notes something there
        meta["annotations"] = {
            key: value
            for key, value in (meta.get("annotations") or {}).items()
            if not key.startswith("deployment.kubernetes.io/")
        }
    body = {key: value for key, value in content.items() if key not in ("metadata", "status")}
    return {"metadata": meta, **body}


def _last_words(log: str) -> str:
    """The line that says why a server ended: its last error, or its last line."""
    lines = [line for line in log.strip().splitlines() if not line.startswith("unable to retrieve container logs")]
    errors = [line for line in lines if "error" in line.lower()]
    return (errors or lines or [""])[-1][-_SAID:]
