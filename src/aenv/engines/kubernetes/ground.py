"""A cluster as one engine uses it: its pods, and what is asked of the cluster for each."""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import logging
from collections import OrderedDict
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from time import monotonic
from typing import Any, NamedTuple

from aenv import config
from aenv.cleanup import finish
from aenv.engines.kubernetes import manifests, pods
from aenv.engines.kubernetes.api import APPLY, FIELD_MANAGER, MERGE, Cluster
from aenv.engines.kubernetes.cache import PAGE, Cache
from aenv.engines.kubernetes.lease import Leader
from aenv.engines.kubernetes.log import Log
from aenv.engines.kubernetes.manifests import APP, BESIDE, ENDED, EXPIRES, MAIN, PORTER, SANDBOX, STATE, Facts, Site
from aenv.engines.kubernetes.pods import Pod
from aenv.engines.kubernetes.volumes import Volumes
from aenv.engines.printed import last_words
from aenv.engines.projects import packed
from aenv.errors import AEnvError, NotFound
from aenv.models import SandboxSpec
from aenv.project.stamp import stamp

log = logging.getLogger("aenv.engine")
_PACKAGES = 8
"""Archives of projects that are kept for the next sandbox."""
_GONE = 180.0
"""Seconds in which a pod that was deleted must be gone."""
_ASK_AGAIN = 10.0
"""Seconds after which the cluster itself is asked whether it is, in case nobody told."""
_LINES = 20


class Traffic(NamedTuple):
    """What went between an engine and the API server of its cluster."""

    asked: int = 0
    """Requests."""
    heard: int = 0
    """Changes of pods that the server told of by itself."""
    heard_bytes: int = 0


class Ground:
    """What an engine holds while it is open."""

    def __init__(self, cluster: Cluster, site: Site, key: bytes, tell: Callable[[str], None], *, lasting: bool) -> None:
        self.cluster, self.site = cluster, site
        self._key = key
        self._pods = f"/api/v1/namespaces/{site.namespace}/pods"
        self.cache = Cache(cluster, self._pods, f"{APP}={SANDBOX},{STATE}={site.state}", tell)
        self.volumes = Volumes(cluster, site, self._exists)
        self.leader = Leader(cluster, site.namespace, site.state) if lasting else None
        self._packages: OrderedDict[tuple[str, str, str], bytes] = OrderedDict()
        self._packing = asyncio.Lock()
        self._policies: set[str] = set()
        self.bare: set[tuple[str, str]] = set()
        """Images and projects that are not imported before there is an instance, since that must not be so early."""

    async def open(self) -> None:
        await self.cache.open()
        if self.leader is not None:
            await self.leader.open()

    async def close(self) -> None:
        if self.leader is not None:
            await self.leader.close()
        await self.cache.close()

    @property
    def leads(self) -> bool:
        return self.leader is None or self.leader.leads

    @property
    def traffic(self) -> Traffic:
        return Traffic(self.cluster.asked, self.cache.heard, self.cache.heard_bytes)

    def key(self, id: str) -> str:
        """The token that the engine itself comes with to a sandbox."""
        return hmac.new(self._key, f"engine {id}".encode(), hashlib.sha256).hexdigest()

    def socket(self, id: str) -> Path:
        """Where a tunnel to a sandbox begins."""
        return config.home() / "kubernetes" / manifests.short(self.site.state) / f"{manifests.short(id)}.sock"

    # Pods

    async def make(self, spec: SandboxSpec, known: Facts) -> None:
        """Have a pod made. ``Conflict`` when there is one of that name, ``Full`` when a quota leaves no room. Who
        cancels it knows afterwards whether there is a pod: nothing is under way."""
        body = manifests.pod(spec, known, self.site, hashlib.sha256(self.key(known.id).encode()).hexdigest())
        await finish(self._ask_for(body))

    async def _ask_for(self, body: dict[str, Any]) -> None:
        self.cache.note(pods.decode(await self.cluster.fetch("POST", self._pods, body)))

    async def _exists(self, id: str) -> bool:
        """Whether there is a pod of that name, also one that was not heard of yet."""
        if self.cache.get(id) is not None:
            return True
        try:
            return (await self.look(id)).state == self.site.state
        except NotFound:
            return False

    async def look(self, id: str) -> Pod:
        """A pod as the cluster knows it now, of whomever."""
        return pods.decode(await self.cluster.fetch("GET", f"{self._pods}/{id}"))

    async def remove(self, id: str) -> None:
        """End a pod. Back when the cluster does not know it any more; one that is none of ours stays."""
        if self.cache.get(id) is None:
            try:
                pod = await self.look(id)
            except NotFound:
                return
            if pod.state != self.site.state or pods.facts_of(pod) is None:
                return
        try:
            await self.cluster.ask("DELETE", f"{self._pods}/{id}")
            asked = monotonic()
            while (entry := self.cache.get(id)) is not None:
                # Where nothing runs any more, a node takes ten seconds to say so in its own way; until then its name
                # is taken, and quotas count it. A node that says nothing at all is gone, or stuck: when it is back it
                # ends what nobody knows any more.
                is_empty = entry.pod.is_empty(self.cluster.now(), began=entry.began)
                if is_empty or monotonic() - asked > _GONE:
                    if not is_empty:
                        log.warning("%s has not ended after %g s, and is forgotten: look at its node", id, _GONE)
                    await self.cluster.ask("DELETE", f"{self._pods}/{id}", query={"gracePeriodSeconds": "0"})
                    self._is_gone(id)
                elif not await self.cache.changed(id, _ASK_AGAIN):
                    await self._ask_again(id)
        except NotFound:
            self._is_gone(id)

    async def _ask_again(self, id: str) -> None:
        """See whether a pod is there of which nothing was heard for a while."""
        try:
            self.cache.note(await self.look(id))
        except NotFound:
            self._is_gone(id)

    def _is_gone(self, id: str) -> None:
        if (entry := self.cache.get(id)) is not None:
            self.cache.forget(id, entry.pod.metadata.uid)

    async def stop(self, id: str, reason: str) -> None:
        """Have all containers of a pod end, and keep it, with the reason."""
        notes = {ENDED: reason[:2000]} if reason else {}
        await self._change(id, {"metadata": {"annotations": notes}, "spec": {"activeDeadlineSeconds": 1}})

    async def set_expiry(self, id: str, moment: float) -> None:
        await self._change(id, {"metadata": {"annotations": {EXPIRES: manifests.expiry(moment)}}})

    async def _change(self, id: str, body: dict[str, Any]) -> None:
        answer = await self.cluster.fetch("PATCH", f"{self._pods}/{id}", body, None, MERGE)
        self.cache.note(pods.decode(answer))

    async def words(self, id: str, pod: Pod) -> str:
        """What was printed last in the container that ended it."""
        name = next((one for one in (PORTER, BESIDE, MAIN) if (end := pod.end_of(one)) and end.exit_code), MAIN)
        with suppress(AEnvError):
            return last_words(await self.log(id, name).last(_LINES))
        return ""

    def log(self, id: str, container: str = MAIN) -> Log:
        return Log(self.cluster, self.site.namespace, id, container)

    async def others(self) -> list[Pod]:
        """Sandboxes of engines that end with their process, whether or not they did."""
        query = {"labelSelector": f"{APP}={SANDBOX},{STATE}!={self.site.state}", "limit": str(PAGE)}
        others: list[Pod] = []
        while True:
            found = pods.decode_list(await self.cluster.fetch("GET", self._pods, query=query))
            others += [pod for pod in found.items if pod.state.startswith("0")]
            if not found.metadata.continue_:
                return others
            query["continue"] = found.metadata.continue_

    async def delete_other(self, pod: Pod) -> None:
        with suppress(NotFound):
            await self.cluster.ask("DELETE", f"{self._pods}/{pod.name}")

    # What a pod needs

    async def package(self, root: str, edition: str) -> bytes:
        """The archive of a project as it is now."""
        async with self._packing:
            key = root, edition, await asyncio.to_thread(stamp, Path(root))
            if key not in self._packages:
                self._packages[key] = await asyncio.to_thread(packed, Path(root), self.site.base_image)
                while len(self._packages) > _PACKAGES:
                    self._packages.popitem(last=False)
            self._packages.move_to_end(key)
            return self._packages[key]

    async def have_network(self, wanted: object) -> None:
        """See to it that what keeps sandboxes to such a network is there."""
        policy = manifests.network_policy(wanted, self.site)
        name = policy["metadata"]["name"]
        if name in self._policies:
            return
        path = f"/apis/networking.k8s.io/v1/namespaces/{self.site.namespace}/networkpolicies/{name}"
        query = {"fieldManager": FIELD_MANAGER, "force": "true"}
        await self.cluster.ask("PATCH", path, body=policy, query=query, content_type=APPLY)
        self._policies.add(name)
