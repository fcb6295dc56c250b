"""Storage that outlives sandboxes: claims of the cluster, each of which one sandbox has at a time."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any

from aenv.engines.kubernetes.api import MERGE, Cluster
from aenv.engines.kubernetes.manifests import APP, HOLDER, STATE, VOLUME, Site, claim, claim_name, claimed
from aenv.errors import Conflict, NotFound
from aenv.models import Volume
from aenv.project.fields import quantity

_WORD = "aenv/holder-word"
"""An annotation that changes each time that the holder is written."""
_GONE = 60.0
"""Seconds in which a claim that was deleted must be gone."""


class Volumes:
    """The claims of one engine's sandboxes."""

    def __init__(self, cluster: Cluster, site: Site, lives: Callable[[str], Awaitable[bool]]) -> None:
        """``lives`` says whether there is something of the sandbox of that id."""
        self._cluster, self._site, self._exists = cluster, site, lives
        self._path = f"/api/v1/namespaces/{site.namespace}/persistentvolumeclaims"
        self._beginning: set[str] = set()
        """Sandboxes of this process that have volumes, and nothing else yet."""

    @asynccontextmanager
    async def taken(self, wanted: Sequence[Volume], id: str) -> AsyncIterator[None]:
        """Give volumes to a sandbox, which is made in the block; those that there are none of are made. ``Conflict``
        when another one has one.

        Others, who see nothing of the sandbox until then, may take them meanwhile. So its name is written once more
        at the end: then it has them, and whoever looked before that comes too late; or another one was faster."""
        self._beginning.add(id)
        try:
            for one in wanted:
                await self._take(one, id)
            yield
            for one in wanted:
                await self._take(one, id, again=True)
        finally:
            self._beginning.discard(id)

    async def _take(self, one: Volume, id: str, *, again: bool = False) -> None:
        place = f"{self._path}/{claim_name(self._site.state, one.owner, one.name)}"
        while True:
            try:
                found = await self._cluster.ask("GET", place)
            except NotFound:
                body = claim(one, self._site)
                body["metadata"]["annotations"][HOLDER] = id
                try:
                    await self._cluster.ask("POST", self._path, body=body)
                    return
                except Conflict:
                    continue  # somebody else was faster
            holder = _holder(found)
            if holder == id and not again:
                return
            if holder not in ("", id) and (again or await self._lives(holder)):
                raise Conflict(
                    f"the volume {one.name!r} is another sandbox's, {holder}",
                    hint="delete that one, or wait for its end",
                )
            if found["metadata"].get("deletionTimestamp"):
                raise Conflict(f"the volume {one.name!r} is being deleted", hint="try again in a moment")
            try:
                await self._hold(place, found, id)
                return
            except Conflict:
                continue

    async def _lives(self, id: str) -> bool:
        return id in self._beginning or await self._exists(id)

    async def _hold(self, place: str, found: dict[str, Any], id: str | None) -> None:
        """Write down who has it, on what was seen of it."""
        version = found["metadata"]["resourceVersion"]
        word = secrets.token_hex(8) if id else None  # so that it is another version, whoever had it before
        body = {"metadata": {"resourceVersion": version, "annotations": {HOLDER: id, _WORD: word}}}
        await self._cluster.ask("PATCH", place, body=body, content_type=MERGE)

    async def leave(self, volumes: Sequence[tuple[str, str]], id: str) -> None:
        """Take them back from a sandbox of which nothing is left."""
        for owner, name in volumes:
            place = f"{self._path}/{claim_name(self._site.state, owner, name)}"
            try:
                found = await self._cluster.ask("GET", place)
                if _holder(found) == id:
                    await self._hold(place, found, None)
            except (NotFound, Conflict):
                continue

    async def of(self, owner: str) -> dict[str, int]:
        """An owner's volumes, with what each may hold: how full they are, a cluster does not say."""
        selector = f"{APP}={VOLUME},{STATE}={self._site.state}"
        found = await self._cluster.ask("GET", self._path, query={"labelSelector": selector})
        sizes: dict[str, int] = {}
        for row in found.get("items") or ():
            told = claimed(row)
            if told is not None and told[0] == owner and not row["metadata"].get("deletionTimestamp"):
                sizes[told[1]] = int(quantity(row["spec"]["resources"]["requests"]["storage"]))
        return sizes

    async def delete(self, owner: str, name: str) -> None:
        """Forget one with all that it holds."""
        place = f"{self._path}/{claim_name(self._site.state, owner, name)}"
        try:
            found = await self._cluster.ask("GET", place)
            holder = _holder(found)
            if holder and await self._lives(holder):
                raise Conflict(f"the volume {name!r} is a sandbox's, {holder}", hint="delete that one first")
            await self._cluster.ask("DELETE", place)
            pause = 0.05
            async with asyncio.timeout(_GONE):
                while True:
                    await self._cluster.ask("GET", place)
                    await asyncio.sleep(pause)
                    pause = min(pause * 1.5, 2.0)
        except NotFound:
            return
        except TimeoutError:
            raise Conflict(f"the volume {name!r} is still being removed", hint="a pod may have it yet") from None


def _holder(found: dict[str, Any]) -> str:
    return str((found["metadata"].get("annotations") or {}).get(HOLDER) or "")
