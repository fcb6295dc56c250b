"""The API service's client: instances, and what can be done to one from outside."""

from __future__ import annotations

import codecs
import secrets
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from typing import Any

from aenv.control import Service, segment
from aenv.errors import Conflict
from aenv.models import ExecResult
from aenv.wire import (
    PAGE,
    Exec,
    Expose,
    Exposed,
    Extend,
    Instance,
    InstanceRequest,
    Quota,
    QuotaRequest,
    Renewed,
    Reset,
    Top,
    Usage,
)

LONGEST_LINE = 1024 * 1024
Instances = list[Instance]
Calls = list[dict[str, Any]]
Quotas = list[Quota]
Rows = list[Usage]


class ApiClient(Service):
    """What an API service offers to one caller."""

    async def create(
        self,
        request: InstanceRequest,
        *,
        wait: float = 0.0,
        key: str | None = None,
        timeout: float | None = None,
        retries: int | None = None,
    ) -> Instance:
        """Ask for an instance; answered when it runs or has failed, or after ``wait`` seconds.

        Asking again with the same ``key`` gives the same instance.
        """
        return await self.ask(
            *("POST", "/env-instance"),
            body=request,
            type=Instance,
            headers={"Idempotency-Key": key or secrets.token_urlsafe(18), **prefer(wait)},
            timeout=self._longer(wait) if timeout is None else timeout,
            retries=retries,
        )

    async def create_many(self, request: InstanceRequest, *, wait: float = 0.0, key: str | None = None) -> Instances:
        """Ask for ``request.count`` instances at once."""
        return await self.ask(
            *("POST", "/env-instance"),
            body=request,
            type=Instances,
            headers={"Idempotency-Key": key or secrets.token_urlsafe(18), **prefer(wait)},
            timeout=self._longer(wait),
        )

    async def get(self, id: str, *, wait: float = 0.0, retries: int | None = None) -> Instance:
        """An instance; one that is starting is answered when it runs or has failed, or after ``wait`` seconds."""
        return await self.ask(
            "GET", _path(id), type=Instance, headers=prefer(wait), timeout=self._longer(wait), retries=retries
        )

    async def list(
        self,
        env: str = "*",
        owner: str | None = None,
        labels: Mapping[str, str] | None = None,
        *,
        status: Sequence[str] = (),
        limit: int = PAGE,
        offset: int = 0,
    ) -> tuple[Instances, int]:
        """A page of instances, and how many there are."""
        query = {
            "owner": owner,
            "status": list(status),
            "label": [f"{name}={value}" for name, value in (labels or {}).items()],
            "limit": limit,
            "offset": offset,
        }
        return await self.page(f"{_path(env)}/list", type=Instance, query=query)

    async def delete(self, id: str) -> None:
        """End an instance. One that has ended already is fine."""
        await self.ask("DELETE", _path(id), type=Any)

    async def extend(self, id: str, ttl: str | float) -> Renewed:
        """Let it live so long from now."""
        return await self.ask("POST", f"{_path(id)}/extend", body=Extend(ttl), type=Renewed, repeatable=True)

    async def renew(self, id: str, *, retries: int | None = None) -> Renewed:
        """Say that its client is still there."""
        return await self.ask("POST", f"{_path(id)}/renew", type=Renewed, repeatable=True, retries=retries)

    async def reset(self, id: str, seed: int | None = None, arguments: Mapping[str, Any] | None = None) -> Any:
        """Put it back to its beginning; what the author's reset returns."""
        return await self.ask("POST", f"{_path(id)}/reset", body=Reset(seed, dict(arguments or {})), type=Any)

    async def exec(self, id: str, command: Exec) -> ExecResult:
        """Run a command inside."""
        return await self.ask(
            "POST", f"{_path(id)}/exec", body=command, type=ExecResult, timeout=self._longer(command.timeout)
        )

    async def logs(self, id: str, tail: int | None = None, follow: bool = False) -> AsyncGenerator[str, None]:
        """What it printed, by line; with ``follow`` also what it prints from then on, until it ends."""
        async with aclosing(printed(self, f"{_path(id)}/logs", tail, follow)) as lines:
            async for line in lines:
                yield line

    async def history(self, id: str, last: int | None = None) -> Calls:
        """The calls that ended lately in it, newest last."""
        return await self.ask("GET", f"{_path(id)}/history", query={"last": last}, type=Calls)

    async def upload(self, id: str, path: str, data: bytes) -> None:
        """Write a file in it."""
        await self.ask("PUT", f"{_path(id)}/files", query={"path": path}, body=data, type=Any)

    async def download(self, id: str, path: str) -> bytes:
        """The content of a file in it."""
        found = await self.fetch(f"{_path(id)}/files", query={"path": path})
        if not found.headers.get(b"content-type", b"").startswith(b"application/octet-stream"):
            raise Conflict(f"{path} is a directory", hint="download its files one by one")
        return found.body

    async def expose(self, id: str, request: Expose) -> Exposed:
        """A URL, open to whoever has it, of a port inside."""
        return await self.ask("POST", f"{_path(id)}/expose", body=request, type=Exposed, repeatable=True)

    async def usage(
        self,
        since: str,
        until: str = "",
        *,
        owner: str | None = None,
        experiment: str | None = None,
        limit: int = PAGE,
        offset: int = 0,
    ) -> tuple[Rows, int]:
        """A page of what was used, by hour, owner and experiment, the newest hour first, and how many rows there are.

        Times are ISO 8601, or say how long ago: ``24h``.
        """
        query = {
            "since": since,
            "until": until or None,
            "owner": owner,
            "experiment": experiment,
            "limit": limit,
            "offset": offset,
        }
        return await self.page("/usage", type=Usage, query=query)

    async def top(self, *, owner: str | None = None, most: int = 50) -> Top:
        """What instances do at the moment, the most called first."""
        return await self.ask("GET", "/top", query={"owner": owner, "most": most}, type=Top)

    async def quotas(self, *, limit: int = PAGE, offset: int = 0) -> tuple[Quotas, int]:
        """A page of limits, with what is in use under them, and how many there are."""
        return await self.page("/quota", type=Quota, query={"limit": limit, "offset": offset})

    async def set_quota(self, subject: str, request: QuotaRequest) -> Quota:
        """Limit a subject: it replaces the limits that it has."""
        return await self.ask("PUT", "/quota", query={"subject": subject}, body=request, type=Quota)

    async def delete_quota(self, subject: str) -> None:
        """Take a subject's own limits away."""
        await self.ask("DELETE", "/quota", query={"subject": subject}, type=Any)

    def _longer(self, wait: float) -> float:
        return self.timeout + max(wait, 0.0)


def _path(id: str) -> str:
    return f"/env-instance/{segment(id)}"


def prefer(wait: float) -> dict[str, str]:
    """The header that asks for an answer when it is done, or after so many seconds."""
    return {"Prefer": f"wait={int(wait)}"} if wait >= 1 else {}


async def printed(service: Service, path: str, tail: int | None, follow: bool) -> AsyncGenerator[str, None]:
    """What was printed, by line, as it comes."""
    query = {"tail": tail, "follow": follow or None}
    decode = codecs.getincrementaldecoder("utf-8")("replace").decode
    rest = ""
    patience = None if follow else service.timeout
    async with service.stream("GET", path, query=query, patience=patience) as pieces:
        async for piece in pieces:
            *lines, rest = (rest + decode(piece)).split("\n")
            for line in lines:
                yield line
            if len(rest) > LONGEST_LINE:
                yield rest
                rest = ""
    if rest := rest + decode(b"", True):
        yield rest
