"""Services over HTTP: the handlers, and the table of routes at the bottom."""

from __future__ import annotations

from typing import Annotated

from aenv.api.peers import HOP
from aenv.api.routes import Lines, Prefer, preferred_wait
from aenv.api.services.owners import Services
from aenv.auth.callers import Scope
from aenv.web.routes import Call, Header, Paged, Query, Route, Streamed
from aenv.wire import PAGE, Service, ServiceChange, ServiceRequest


class Handlers:
    """What each route does, with the words that its caller knows."""

    def __init__(self, services: Services) -> None:
        self._services = services

    async def create(
        self,
        call: Call,
        body: ServiceRequest,
        prefer: Prefer = "",
        key: Annotated[
            str | None, Header("Idempotency-Key", "asked again under the same key, the same service is answered")
        ] = None,
    ) -> Service:
        """Make a service: replicas of an environment behind one URL, until it is deleted.

        What is not given is what the environment's deployConfig.service says. Storage is made when there is none of
        that name, and found again when there is.
        """
        made = await self._services.create(
            call.caller, body, token=call.token, key=key, wait=preferred_wait(call, prefer)
        )
        call.target = made.id
        return made

    async def get(self, call: Call, id: str, prefer: Prefer = "") -> Service:
        """A service with its replicas. Its tokens are shown to who may run instances."""
        return await self._services.get(call.caller, id, wait=preferred_wait(call, prefer))

    async def change(self, call: Call, id: str, body: ServiceChange, prefer: Prefer = "") -> Service:
        """Have more or fewer replicas, another version, or other variables, which replace those that it has.

        Replicas follow one by one, and calls go on meanwhile. When the new ones do not become ready, it goes back to
        what it was, and says why. With generation, it is a conflict when somebody else has changed it since.
        """
        wait = preferred_wait(call, prefer)
        return await self._services.change(call.caller, id, body, token=call.token, wait=wait)

    async def restart(self, call: Call, id: str, prefer: Prefer = "") -> Service:
        """Put new replicas in the place of all, one by one."""
        return await self._services.restart(call.caller, id, token=call.token, wait=preferred_wait(call, prefer))

    async def list_all(
        self,
        call: Call,
        owner: Annotated[str, Query(about="whose they are; an admin sees everybody's")] = "",
        ended: Annotated[bool, Query(about="also those that were deleted within the last hour")] = False,
        limit: int = PAGE,
        offset: int = 0,
    ) -> Paged[Service]:
        """Services, the newest first."""
        return await self.list_of(call, "*", owner, ended, limit, offset)

    async def list_of(
        self,
        call: Call,
        name: str,
        owner: Annotated[str, Query(about="whose they are; an admin sees everybody's")] = "",
        ended: Annotated[bool, Query(about="also those that were deleted within the last hour")] = False,
        limit: int = PAGE,
        offset: int = 0,
    ) -> Paged[Service]:
        """Services of an environment: by name, name@version, or * for all; the newest first."""
        found, total = await self._services.list(
            call.caller, env=name, owner=owner or None, ended=ended, limit=limit, offset=offset
        )
        return Paged(found, total)

    async def delete(
        self,
        call: Call,
        id: str,
        storage: Annotated[bool, Query("deleteStorage", "also remove what it stored, which is kept otherwise")] = False,
    ) -> bool:
        """End a service. One that has ended already is fine."""
        await self._services.delete(call.caller, id, storage=storage)
        return True

    async def logs(
        self,
        call: Call,
        id: str,
        tail: Annotated[int | None, Query(about="how many of the last lines of each; all by default")] = None,
        follow: Annotated[bool, Query(about="also what they print from now on, until the service ends")] = False,
    ) -> Lines:
        """What the replicas of a service printed, each line with the replica's name before it."""
        lines = await self._services.logs(
            call.caller, id, tail=tail, follow=follow, token=call.token, passed_on=HOP.lower().encode() in call.headers
        )
        return Streamed(lines, content_type="text/plain; charset=utf-8", endless=follow)


def routes(services: Services) -> list[Route]:
    """The table of the routes of services."""
    handle = Handlers(services)
    one = "/env-service/{id}"
    return [
        Route("POST", "/env-service", handle.create, Scope.RUN),
        Route("GET", "/env-service/list", handle.list_all, Scope.READ),
        Route("GET", one, handle.get, Scope.READ),
        Route("GET", "/env-service/{name}/list", handle.list_of, Scope.READ),
        Route("PUT", one, handle.change, Scope.RUN),
        Route("DELETE", one, handle.delete, Scope.RUN),
        Route("POST", f"{one}/restart", handle.restart, Scope.RUN),
        Route("GET", f"{one}/logs", handle.logs, Scope.READ),
    ]
