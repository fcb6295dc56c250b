"""Volumes that never change, each kept by a container that never runs.

What is in one says its name, which the container gets when the volume is full: so nobody ever sees half of it, and
every container of that name has the same.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Any

from aenv.cleanup import finish
from aenv.engines.docker import containers
from aenv.engines.docker.containers import KIND
from aenv.engines.docker.daemon import Daemon
from aenv.errors import AEnvError, Conflict, NotFound

ABANDONED = 3600.0
"""Seconds after which a volume that was never filled is somebody's who is gone."""
USES = "aenv.uses"
"""Label of a container: the keeper of what it has mounted."""
FILLING = "aenv-filling-"
"""What the names of those begin with that are not full yet."""


class Keepers:
    """Those of one kind that a daemon has."""

    def __init__(self, daemon: Daemon, kind: str, place: str) -> None:
        """``place`` is where the volume is inside."""
        self._daemon, self._kind, self._place = daemon, kind, place
        self._filled: set[str] = set()
        self._filling: dict[str, asyncio.Lock] = {}

    async def have(self, name: str, image: str, content: Callable[[], Awaitable[bytes]]) -> None:
        """Make that one, of an image and a tar archive, when there is none."""
        if name in self._filled:
            return
        async with self._filling.setdefault(name, asyncio.Lock()):
            if name not in self._filled and not await self.is_there(name):
                await self._fill(name, image, await content())
            self._filled.add(name)

    def forget(self, name: str) -> None:
        """It turned out to be gone."""
        self._filled.discard(name)

    async def is_there(self, name: str) -> bool:
        try:
            await self._daemon.inspect(name)
        except NotFound:
            return False
        return True

    async def has_lost(self, container: str, name: str) -> bool:
        """Whether a container has no longer what that one keeps, and so will never run.

        Docker takes a volume for used from the start of a container on that has it from another one, not from its
        making. So it goes with the other one until then.
        """
        with suppress(NotFound):
            found = await self._daemon.inspect(container)
            with suppress(NotFound):
                return self._volume(await self._daemon.inspect(name)) != self._volume(found)
            return True
        return False

    def _volume(self, inspected: dict[str, Any]) -> str:
        return containers.mount_source(inspected, self._place)

    async def _fill(self, name: str, image: str, content: bytes) -> None:
        filling = FILLING + secrets.token_hex(8)
        body = {
            "Image": image,
            "Entrypoint": ["true"],
            "Cmd": [],
            "User": "0",
            "Labels": {KIND: self._kind},
            "HostConfig": {"NetworkMode": "none", "Mounts": [{"Type": "volume", "Target": self._place}]},
        }
        try:
            await finish(self._make(filling, body))
            await self._daemon.put(f"/containers/{filling}/archive", query={"path": self._place}, content=content)
            try:
                await self._daemon.ask("POST", f"/containers/{filling}/rename", query={"name": name})
            except AEnvError:
                if not await self.is_there(name):  # else another engine was faster, with the same content
                    raise
                await self._remove(filling)
        except BaseException:
            await finish(self._remove(filling))
            raise

    async def _make(self, name: str, body: dict[str, Any]) -> None:
        await self._daemon.ask("POST", "/containers/create", query={"name": name}, body=body)

    async def _remove(self, name: str) -> None:
        with suppress(NotFound, Conflict):
            await self._daemon.ask("DELETE", f"/containers/{name}", query={"force": "1", "v": "1"})
