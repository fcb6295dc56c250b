"""Which of several engines on one cluster does what only one has to do: a lease that is renewed, or taken over.

Whether the one who has it is gone is judged by our own clock: as long as its word changes, it is there, whatever times
it writes.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from contextlib import suppress
from datetime import UTC, datetime
from time import monotonic
from typing import Any

from aenv.engines.kubernetes.api import Cluster
from aenv.engines.kubernetes.manifests import short
from aenv.errors import AEnvError, Conflict, Forbidden, NotFound

log = logging.getLogger("aenv.engine")
RENEW = 5.0
"""Seconds between two words of the one who leads."""
LASTS = 15.0
"""Seconds after which one that was silent leads no more."""
_FAREWELL = 2.0


class Leader:
    """This engine's part in it."""

    def __init__(self, cluster: Cluster, namespace: str, state: str) -> None:
        self._cluster = cluster
        self._path = f"/apis/coordination.k8s.io/v1/namespaces/{namespace}/leases"
        self._name = f"aenv-{short(state)}"
        self._namespace = namespace
        self.me = secrets.token_hex(8)
        self._until = 0.0
        self._seen: tuple[str, float] = ("", 0.0)
        """What the lease said last, and since when."""
        self._task: asyncio.Task[None] | None = None
        self._alone = False

    @property
    def leads(self) -> bool:
        """Whether this engine is the one."""
        return self._alone or monotonic() < self._until

    async def open(self) -> None:
        await self._try()
        self._task = asyncio.create_task(self._renew())

    async def close(self) -> None:
        """Let another one lead at once."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        if self.leads and not self._alone:
            self._until = 0.0
            with suppress(AEnvError, TimeoutError):
                async with asyncio.timeout(_FAREWELL):
                    found = await self._cluster.ask("GET", f"{self._path}/{self._name}")
                    if found["spec"].get("holderIdentity") == self.me:
                        await self._write(found, "")

    async def _renew(self) -> None:
        while True:
            await asyncio.sleep(RENEW)
            await self._try()

    async def _try(self) -> None:
        try:
            async with asyncio.timeout(LASTS):
                await self._look()
        except Forbidden as exc:
            if not self._alone:
                log.warning("this account may not hold a lease; several engines would do the same work: %s", exc)
            self._alone = True
        except (AEnvError, TimeoutError) as exc:
            log.warning("the lease of %s could not be looked at: %s", self._name, exc or "it took too long")
        except Exception:  # an answer that nobody understands
            log.exception("the lease of %s could not be looked at", self._name)
        else:
            self._alone = False

    async def _look(self) -> None:
        begun = monotonic()
        try:
            found = await self._cluster.ask("GET", f"{self._path}/{self._name}", timeout=LASTS)
        except NotFound:
            body = {"apiVersion": "coordination.k8s.io/v1", "kind": "Lease", "metadata": {"name": self._name}}
            with suppress(Conflict):
                await self._cluster.ask("POST", self._path, body={**body, "spec": self._spec(self.me)}, timeout=LASTS)
                self._until = begun + LASTS
            return
        holder, word = found["spec"].get("holderIdentity") or "", found["metadata"]["resourceVersion"]
        if self._seen[0] != word:
            self._seen = (word, monotonic())
        if holder in ("", self.me) or monotonic() - self._seen[1] > LASTS:
            with suppress(Conflict):
                await self._write(found, self.me)
                self._until = begun + LASTS

    async def _write(self, found: dict[str, Any], holder: str) -> None:
        body = {**found, "spec": self._spec(holder)}
        made = await self._cluster.ask("PUT", f"{self._path}/{self._name}", body=body, timeout=LASTS)
        self._seen = (made["metadata"]["resourceVersion"], monotonic())

    def _spec(self, holder: str) -> dict[str, Any]:
        now = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
        return {"holderIdentity": holder, "leaseDurationSeconds": int(LASTS), "renewTime": now}
