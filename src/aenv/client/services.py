"""The client of services, and a service as a sandbox that ``Environment`` can use."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

from aenv.client.api import prefer, printed
from aenv.control import Service as Plane
from aenv.control import segment
from aenv.errors import Invalid, NetworkError, SandboxLost, StartFailed
from aenv.models import VERSION, EnvRef, Sandbox, SandboxSpec
from aenv.wire import PAGE, Service, ServiceChange, ServiceRequest

SLICE = 20.0
"""Seconds that one question waits for a service to be ready; then it is asked again."""
ENDING = 90.0
"""Seconds that the end of a service may take, with what it has in flight."""
_POLL = 0.2


class ServicesClient(Plane):
    """What a platform offers to one caller about services."""

    async def create(self, request: ServiceRequest, *, wait: float = 0.0, key: str | None = None) -> Service:
        """Ask for a service; answered when its replicas run or have failed, or after ``wait`` seconds.

        Asking again with the same ``key`` gives the same service.
        """
        return await self.ask(
            *("POST", "/env-service"),
            body=request,
            type=Service,
            headers={"Idempotency-Key": key or secrets.token_urlsafe(18), **prefer(wait)},
            timeout=self.timeout + wait,
        )

    async def get(self, id: str, *, wait: float = 0.0, retries: int | None = None) -> Service:
        """A service; one that is being made or changed is answered when that is done, or after ``wait`` seconds."""
        return await self.ask(
            "GET", _path(id), type=Service, headers=prefer(wait), timeout=self.timeout + wait, retries=retries
        )

    async def list(
        self,
        env: str = "*",
        owner: str | None = None,
        *,
        ended: bool = False,
        limit: int = PAGE,
        offset: int = 0,
    ) -> tuple[list[Service], int]:
        """A page of services, and how many there are."""
        query = {"owner": owner, "ended": ended or None, "limit": limit, "offset": offset}
        return await self.page(f"{_path(env)}/list", type=Service, query=query)

    async def update(self, id: str, change: ServiceChange, *, wait: float = 0.0) -> Service:
        """Have it otherwise."""
        return await self.ask(
            "PUT", _path(id), body=change, type=Service, headers=prefer(wait), timeout=self.timeout + wait
        )

    async def restart(self, id: str, *, wait: float = 0.0) -> Service:
        """Put new replicas in the place of all, one by one."""
        return await self.ask(
            "POST", f"{_path(id)}/restart", type=Service, headers=prefer(wait), timeout=self.timeout + wait
        )

    async def delete(self, id: str, *, storage: bool = False) -> None:
        """End a service, and with ``storage`` what it stored. One that has ended already is fine."""
        query = {"deleteStorage": storage or None}
        await self.ask("DELETE", _path(id), query=query, type=Any, timeout=max(self.timeout, ENDING))

    async def logs(self, id: str, tail: int | None = None, follow: bool = False) -> AsyncGenerator[str, None]:
        """What its replicas printed, by line, each with the replica's name; with ``follow`` until the service ends."""
        async with aclosing(printed(self, f"{_path(id)}/logs", tail, follow)) as lines:
            async for line in lines:
                yield line

    # A service as a sandbox

    async def sandbox(self, id: str, spec: SandboxSpec, key: str | None) -> Sandbox:
        """A service once it takes calls. It is taken as it is; when ``spec`` names an environment, it must be that."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + spec.startup_timeout
        found = await self.get(id)
        _check(found, spec.env)
        while not found.available_replicas:
            if found.status == "Terminated":
                raise SandboxLost(f"service {id} is Terminated: {found.reason or 'it was deleted'}")
            if found.status == "Failed" or not found.replicas:
                raise StartFailed(
                    f"service {id} takes no calls: {found.reason or found.status}",
                    hint=None if found.replicas else f"aenv service update {id} --replicas 1",
                )
            left = deadline - loop.time()
            if left <= 0:
                raise StartFailed(
                    f"service {id} takes no calls after {spec.startup_timeout:g} s: it is {found.status}"
                    f"{': ' + found.reason if found.reason else ''}"
                )
            await asyncio.sleep(min(_POLL, left))
            found = await self.get(id, wait=min(SLICE, left))
        if not found.service_url:
            raise NetworkError(f"{self.url} did not say where service {id} is")
        return Sandbox(
            url=found.service_url,
            public_url=found.service_url,
            id=found.id,
            token=found.owner_token or key,
            attached=True,
            shared=True,
            env=found.env.id,
            owner=found.owner,
            labels=found.labels,
        )

    async def reason(self, id: str) -> str:
        """Why a service is no more; empty while it is there."""
        found = await self.get(id, retries=0)
        return found.reason or "it was deleted" if found.status == "Terminated" else ""


def _check(found: Service, wanted: EnvRef) -> None:
    if not wanted.name:
        return
    is_exact = wanted.version is not None and VERSION.fullmatch(wanted.version) is not None
    if wanted.name != found.env.name or (is_exact and wanted.version != found.env.version):
        raise Invalid(f"service {found.id} is of {found.env.id}, not of {wanted}", hint="leave the name out")


def _path(id: str) -> str:
    return f"/env-service/{segment(id)}"
