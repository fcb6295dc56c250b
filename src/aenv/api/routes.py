"""The API service over HTTP: the handlers, and the table of routes at the bottom."""

from __future__ import annotations

import re
from typing import Annotated, Any

from aenv.api.instances import LONGEST_WAIT, Instances
from aenv.api.peers import HOP
from aenv.auth.callers import Scope
from aenv.errors import Invalid
from aenv.models import ExecResult
from aenv.web.routes import Call, Header, Paged, Query, Route, Streamed, Upload
from aenv.wire import PAGE, Exec, Expose, Exposed, Extend, Fork, Instance, InstanceRequest, Renewed, Reset

MOST_FILE = 64 * 1024 * 1024
"""Bytes of a file that is written into an instance."""
_WAIT = re.compile(r"(?<![^\s,;])wait\s*=\s*\"?([^\s,;\"]*)", re.IGNORECASE | re.ASCII)
_SECONDS = re.compile(r"\d{1,9}(?:\.\d{1,9})?", re.ASCII)

Prefer = Annotated[
    str, Header("Prefer", f"wait=N: answer when it runs or has failed, or after N seconds, {LONGEST_WAIT:g} at most")
]
Bytes = Annotated[Streamed, "application/octet-stream"]
Lines = Annotated[Streamed, "text/plain; charset=utf-8"]


class Handlers:
    """What each route does, with the words that its caller knows."""

    def __init__(self, instances: Instances) -> None:
        self._instances = instances

    async def create(
        self,
        call: Call,
        body: InstanceRequest,
        prefer: Prefer = "",
        key: Annotated[
            str | None, Header("Idempotency-Key", "asked again under the same key, the same instance is answered")
        ] = None,
    ) -> Instance | list[Instance]:
        """Make an instance, or, with count, several, which are answered as a list.

        Those that cannot start are answered as Failed, with the reason.
        """
        made = await self._instances.create(
            call.caller, body, token=call.token, key=key, wait=preferred_wait(call, prefer), local=call.peer_is_local
        )
        call.target = ", ".join(each.id for each in made[:4])
        return made[0] if body.count is None else made

    async def get(self, call: Call, id: str, prefer: Prefer = "") -> Instance:
        """An instance. Its tokens are shown to who may run instances."""
        return await self._instances.get(call.caller, id, wait=preferred_wait(call, prefer), local=call.peer_is_local)

    async def list_all(
        self,
        call: Call,
        owner: Annotated[str, Query(about="whose they are; an admin sees everybody's")] = "",
        status: Annotated[list[str] | None, Query(about="Running, Failed, ...; any of these")] = None,
        label: Annotated[list[str] | None, Query(about="name=value; all of these")] = None,
        limit: int = PAGE,
        offset: int = 0,
    ) -> Paged[Instance]:
        """Instances, the newest first. What has ended is listed for an hour."""
        return await self.list_of(call, "*", owner, status, label, limit, offset)

    async def list_of(
        self,
        call: Call,
        name: str,
        owner: Annotated[str, Query(about="whose they are; an admin sees everybody's")] = "",
        status: Annotated[list[str] | None, Query(about="Running, Failed, ...; any of these")] = None,
        label: Annotated[list[str] | None, Query(about="name=value; all of these")] = None,
        limit: int = PAGE,
        offset: int = 0,
    ) -> Paged[Instance]:
        """Instances of an environment: by name, name@version, or * for all; the newest first."""
        found, total = await self._instances.list(
            call.caller,
            env=name,
            owner=owner or None,
            labels=label or (),
            status=status or (),
            limit=limit,
            offset=offset,
            local=call.peer_is_local,
        )
        return Paged(found, total)

    async def delete(self, call: Call, id: str) -> bool:
        """End an instance. One that has ended already is fine."""
        await self._instances.delete(call.caller, id)
        return True

    async def extend(self, call: Call, id: str, body: Extend) -> Renewed:
        """Let an instance live so long from now on."""
        return await self._instances.extend(call.caller, id, body.ttl)

    async def renew(self, call: Call, id: str) -> Renewed:
        """Say that an instance's client is still there: its lease begins anew."""
        return await self._instances.renew(call.caller, id)

    async def reset(self, call: Call, id: str, body: Reset | None = None) -> Any:
        """Put an instance back to its beginning, as its author's reset does; what that returns."""
        return await self._instances.inside.reset(call.caller, id, body or Reset())

    async def exec(self, call: Call, id: str, body: Exec) -> ExecResult:
        """Run a command inside. One that ran and failed is an answer, too, with its return code."""
        return await self._instances.inside.exec(call.caller, id, body)

    async def expose(self, call: Call, id: str, body: Expose) -> Exposed:
        """A URL, for whoever has it, of a port inside. It ends with its ttl, and with the instance."""
        return await self._instances.expose(call.caller, id, body)

    async def fork(
        self,
        call: Call,
        id: str,
        body: Fork | None = None,
        prefer: Prefer = "",
        key: Annotated[
            str | None, Header("Idempotency-Key", "asked again under the same key, the same forks are answered")
        ] = None,
    ) -> list[Instance]:
        """Forks of an instance that runs, each in the place that it is in.

        They are instances like others. Its environment must say that it is forkable, and its engine must be able to.
        """
        request = await self._instances.forks_of(call.caller, id, body or Fork())
        made = await self._instances.create(
            call.caller, request, token=call.token, key=key, wait=preferred_wait(call, prefer), local=call.peer_is_local
        )
        call.target = ", ".join([id, *(each.id for each in made[:4])])
        return made

    async def checkpoint(self, call: Call, id: str) -> None:
        """Keep the state of this moment: a fork that nobody calls is that, and this has no other."""
        await self._instances.cannot(call.caller, id, "checkpoint")

    async def restore(self, call: Call, id: str) -> None:
        """Put an instance back to a checkpoint: a fork of that is that, and this has no other."""
        await self._instances.cannot(call.caller, id, "restore")

    async def logs(
        self,
        call: Call,
        id: str,
        tail: Annotated[int | None, Query(about="how many of the last lines; all that are kept by default")] = None,
        follow: Annotated[bool, Query(about="also what it prints from now on, until it ends")] = False,
    ) -> Lines:
        """What an instance printed, as lines of text."""
        lines = await self._instances.inside.logs(
            call.caller, id, tail=tail, follow=follow, token=call.token, passed_on=HOP.lower().encode() in call.headers
        )
        return Streamed(lines, content_type="text/plain; charset=utf-8", endless=follow)

    async def history(
        self, call: Call, id: str, last: Annotated[int | None, Query(about="how many of the last calls")] = None
    ) -> list[dict[str, Any]]:
        """The calls that ended lately inside, the newest last."""
        return await self._instances.inside.history(call.caller, id, last)

    async def read(self, call: Call, id: str, path: str) -> Bytes | dict[str, Any]:
        """A file inside, as it is; of a directory, its entries."""
        opened = await self._instances.inside.read(call.caller, id, path)
        if not opened.is_file:
            entries: dict[str, Any] = await opened.entries()
            return entries
        return Streamed(opened, content_type="application/octet-stream", size=opened.size)

    async def write(self, call: Call, id: str, path: str, body: Upload) -> dict[str, Any]:
        """Write a file inside, in one step; folders that are missing are made."""
        return await self._instances.inside.write(call.caller, id, path, body, body.size)


def preferred_wait(call: Call, prefer: str) -> float:
    """How long the client wants to wait; said in the answer, as RFC 7240 has it."""
    found = _WAIT.search(prefer)
    if found is None:
        return 0.0
    if not _SECONDS.fullmatch(found[1]):
        raise Invalid(f"Prefer: {found[0][:64]!r} is no number of seconds", hint="use 'Prefer: wait=60'")
    seconds = min(float(found[1]), LONGEST_WAIT)
    call.answer_headers.append((b"preference-applied", f"wait={int(seconds)}".encode()))
    return seconds


def routes(instances: Instances) -> list[Route]:
    """The table of the API service's routes."""
    handle = Handlers(instances)
    one = "/env-instance/{id}"
    return [
        Route("POST", "/env-instance", handle.create, Scope.RUN),
        Route("GET", "/env-instance/list", handle.list_all, Scope.READ),
        Route("GET", one, handle.get, Scope.READ),
        Route("GET", "/env-instance/{name}/list", handle.list_of, Scope.READ),
        Route("DELETE", one, handle.delete, Scope.RUN),
        Route("POST", f"{one}/extend", handle.extend, Scope.RUN),
        Route("POST", f"{one}/renew", handle.renew, Scope.RUN),
        Route("POST", f"{one}/reset", handle.reset, Scope.RUN),
        Route("POST", f"{one}/exec", handle.exec, Scope.RUN),
        Route("POST", f"{one}/expose", handle.expose, Scope.RUN),
        Route("POST", f"{one}/fork", handle.fork, Scope.RUN),
        Route("POST", f"{one}/checkpoint", handle.checkpoint, Scope.RUN),
        Route("POST", f"{one}/restore", handle.restore, Scope.RUN),
        Route("GET", f"{one}/logs", handle.logs, Scope.READ),
        Route("GET", f"{one}/history", handle.history, Scope.RUN),
        Route("GET", f"{one}/files", handle.read, Scope.RUN),
        Route("PUT", f"{one}/files", handle.write, Scope.RUN, most=MOST_FILE),
    ]
