"""The hub over HTTP: the handlers, and the table of routes at the bottom."""

from __future__ import annotations

from typing import Annotated

from aenv.auth.callers import Scope
from aenv.hub.packages import MOST
from aenv.hub.service import Hub
from aenv.web.routes import Call, Paged, Query, Route, Streamed, Upload
from aenv.wire import PAGE, Env, EnvRequest, EnvStatus, Exists, Policy, PolicyChange, Yank

_PACKAGE = "application/gzip"


class Handlers:
    """What each route does, with the hub's own words for it."""

    def __init__(self, hub: Hub) -> None:
        self._hub = hub

    async def create(self, call: Call, body: EnvRequest) -> Env:
        """Make a version. Its package is uploaded next; the first version of a name makes the caller its owner."""
        call.target = f"{body.name[:63]}@{body.version[:100]}"
        return await self._hub.create(call.caller, body)

    async def list(
        self,
        call: Call,
        name: Annotated[str, Query(about="part of the name")] = "",
        tags: Annotated[list[str] | None, Query(about="all of these; several, or separated by commas")] = None,
        tool: Annotated[str, Query(about="name of a tool")] = "",
        owner: Annotated[str, Query(about="whose they are")] = "",
        limit: int = PAGE,
        offset: int = 0,
    ) -> Paged[Env]:
        """Versions that the caller may see, the newest first, without their documents."""
        wanted = [tag.strip() for given in tags or () for tag in given.split(",") if tag.strip()]
        found, total = await self._hub.list(
            call.caller, name=name, tags=wanted, tool=tool, owner=owner, limit=limit, offset=offset
        )
        return Paged(found, total)

    async def versions(self, call: Call, name: str, limit: int = PAGE, offset: int = 0) -> Paged[Env]:
        """The versions of an environment, the newest first."""
        found, total = await self._hub.versions(call.caller, name, limit=limit, offset=offset)
        return Paged(found, total)

    async def policy(self, call: Call, name: str) -> Policy:
        """Who may see an environment, and who may push to it. Readers and writers are shown to its writers."""
        return await self._hub.policy(call.caller, name)

    async def set_policy(self, call: Call, name: str, body: PolicyChange) -> Policy:
        """Change who has access. Only the owner may, and an admin; what is not given stays as it is."""
        return await self._hub.set_policy(call.caller, name, body)

    async def get(self, call: Call, name: str, version: str) -> Env:
        """A version with its tools, functions, rewards, README and history: exact, a range such as ^1.0, or latest."""
        return await self._hub.get(call.caller, name, version)

    async def update(self, call: Call, name: str, version: str, body: EnvRequest) -> Env:
        """Replace what is said of a version that is not released."""
        return await self._hub.update(call.caller, name, version, body)

    async def delete(self, call: Call, name: str, version: str) -> None:
        """Remove a version that is not released and on which nothing depends. An admin may remove a released one."""
        await self._hub.delete(call.caller, name, version)

    async def exists(self, call: Call, name: str, version: str) -> Exists:
        """Whether there is such a version, for the caller."""
        return Exists(await self._hub.exists(call.caller, name, version))

    async def status(self, call: Call, name: str, version: str) -> EnvStatus:
        """Where a version is in its life, and why it failed if it did."""
        return await self._hub.status(call.caller, name, version)

    async def release(self, call: Call, name: str, version: str) -> Env:
        """Fix a version for ever."""
        return await self._hub.release(call.caller, name, version)

    async def yank(self, call: Call, name: str, version: str, body: Yank | None) -> Env:
        """Withdraw a version: only who names it exactly still gets it."""
        return await self._hub.yank(call.caller, name, version, body.reason if body else "")

    async def upload(self, call: Call, name: str, version: str, body: Upload) -> Env:
        """Give a version its package, a project as tar.gz. It is read in a sandbox; one that cannot be read is 422."""
        return await self._hub.upload(call.caller, name, version, body)

    async def download(self, call: Call, name: str, version: str) -> Annotated[Streamed, _PACKAGE]:
        """The package of a version, as it was pushed."""
        env, chunks = await self._hub.package(call.caller, name, version)
        headers = [(b"etag", f'"{env.digest}"'.encode()), (b"aenv-digest", env.digest.encode())]
        return Streamed(chunks, content_type=_PACKAGE, size=env.size, headers=headers)


def routes(hub: Hub) -> list[Route]:
    """The hub's part of a service."""
    on = Handlers(hub)
    push = Scope.PUSH
    return [
        Route("POST", "/env", on.create, push),
        Route("GET", "/env", on.list),
        Route("GET", "/env/{name}/versions", on.versions),
        Route("GET", "/env/{name}/policy", on.policy),
        Route("PUT", "/env/{name}/policy", on.set_policy, push),
        Route("GET", "/env/{name}/{version}", on.get),
        Route("PUT", "/env/{name}/{version}", on.update, push),
        Route("DELETE", "/env/{name}/{version}", on.delete, push),
        Route("GET", "/env/{name}/{version}/exists", on.exists),
        Route("GET", "/env/{name}/{version}/status", on.status),
        Route("POST", "/env/{name}/{version}/release", on.release, push),
        Route("POST", "/env/{name}/{version}/yank", on.yank, push),
        Route("POST", "/env/{name}/{version}/package", on.upload, push, most=MOST),
        Route("GET", "/env/{name}/{version}/package", on.download),
    ]
