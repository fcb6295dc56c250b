"""The hub's client: pushing environments, finding them, and fetching their packages."""

from __future__ import annotations

import hashlib
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import Any

from aenv.control import Service, segment
from aenv.errors import NetworkError, NotFound, TooLarge
from aenv.models import EnvRef
from aenv.project.archive import MAX_SIZE
from aenv.wire import LARGEST_PAGE, PAGE, Env, EnvRequest, EnvStatus, Exists, Policy, PolicyChange, Yank

UPLOAD = 600.0
"""Seconds that a package may take: it is sent, unpacked and read."""

Envs = list[Env]


class HubClient(Service):
    """What a hub offers to one caller."""

    async def create(self, request: EnvRequest) -> Env:
        """Announce a version; its package is uploaded next."""
        return await self.ask("POST", "/env/", body=request, type=Env)

    async def update(self, request: EnvRequest) -> Env:
        """Replace what is said about a version that is not released."""
        return await self.ask("PUT", _path(request.name, request.version), body=request, type=Env)

    async def upload(self, name: str, version: str, data: bytes) -> Env:
        """Give a version its package."""
        path = f"{_path(name, version)}/package"
        return await self.ask("POST", path, body=data, type=Env, timeout=max(self.timeout, UPLOAD))

    async def get(self, ref: EnvRef) -> Env:
        """A version: the exact one, or the newest that a range admits."""
        return await self.ask("GET", _path(ref.name, ref.version or "latest"), type=Env)

    async def list(
        self,
        name: str | None = None,
        tags: Sequence[str] = (),
        tool: str | None = None,
        *,
        owner: str | None = None,
        limit: int = PAGE,
        offset: int = 0,
    ) -> tuple[Envs, int]:
        """A page of environments, and how many there are."""
        query = {"name": name, "tags": tags, "tool": tool, "owner": owner, "limit": limit, "offset": offset}
        return await self.page("/env/", type=Env, query=query)

    async def versions(self, name: str) -> Envs:
        """The versions of an environment, newest first."""
        found: Envs = []
        while True:
            query = {"limit": LARGEST_PAGE, "offset": len(found)}
            page, total = await self.page(f"/env/{segment(name)}/versions", type=Env, query=query)
            found += page
            if not page or len(found) >= total:
                return found

    async def release(self, name: str, version: str) -> Env:
        """Fix a version for ever."""
        return await self.ask("POST", f"{_path(name, version)}/release", type=Env)

    async def yank(self, name: str, version: str, reason: str = "") -> Env:
        """Withdraw a version: only who names it exactly still gets it."""
        return await self.ask("POST", f"{_path(name, version)}/yank", body=Yank(reason), type=Env)

    async def delete(self, name: str, version: str) -> None:
        """Remove a version that is not released."""
        await self.ask("DELETE", _path(name, version), type=Any)

    async def policy(self, name: str) -> Policy:
        """Who may see an environment, and who may push to it."""
        return await self.ask("GET", f"/env/{segment(name)}/policy", type=Policy)

    async def set_policy(self, name: str, change: PolicyChange) -> Policy:
        return await self.ask("PUT", f"/env/{segment(name)}/policy", body=change, type=Policy)

    async def exists(self, name: str, version: str) -> bool:
        return (await self.ask("GET", f"{_path(name, version)}/exists", type=Exists)).exists

    async def status(self, name: str, version: str) -> EnvStatus:
        return await self.ask("GET", f"{_path(name, version)}/status", type=EnvStatus)

    async def package(self, env: Env) -> AsyncGenerator[bytes, None]:
        """A version's package, piece by piece. What is not the announced one, byte by byte, ends in an exception."""
        if not env.digest:
            raise NotFound(f"{env.id} has no package", hint="push it again")
        most = min(env.size or MAX_SIZE, MAX_SIZE)
        digest, size = hashlib.sha256(), 0
        async with self.stream("GET", f"{_path(env.name, env.version)}/package") as pieces:
            async for piece in pieces:
                size += len(piece)
                if size > most:
                    raise TooLarge(f"the package of {env.id} has more than {most} bytes, which is what it may have")
                digest.update(piece)
                yield piece
        if digest.hexdigest() != env.digest:
            raise NetworkError(
                f"the package of {env.id} is not what was pushed: its sha256 is {digest.hexdigest()}, not {env.digest}",
                hint="it was changed on its way, or where it is kept",
            )

    async def download(self, env: Env) -> bytes:
        """A version's package as a whole."""
        async with aclosing(self.package(env)) as pieces:
            return b"".join([piece async for piece in pieces])


def _path(name: str, version: str) -> str:
    return f"/env/{segment(name)}/{segment(version)}"
