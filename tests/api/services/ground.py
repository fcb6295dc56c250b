"""Services on an engine whose sandboxes are doors: each answers on a real socket, and does as a test says."""

from __future__ import annotations

import asyncio
import tempfile
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from aenv.api.instances import Instances
from aenv.api.packages import Packages
from aenv.api.services.directory import ServiceDirectory
from aenv.api.services.owners import Services
from aenv.auth.keys import platform_key
from aenv.auth.secrets import Secrets
from aenv.engines.base import Output
from aenv.engines.failing import PaperEngine
from aenv.errors import Conflict, NotFound, StartFailed
from aenv.models import Sandbox, SandboxSpec, State
from aenv.store import Store, open_store
from aenv.wire import Env, Service, ServiceChange, ServiceRequest, timestamp
from tests.api.ground import ALICE, PaperShelf, until

PATIENCE = 60.0


class DoorEngine(PaperEngine):
    """What it makes answers ``/health``. An environment variable ``MOOD`` says how a start goes: ``broken`` fails at
    once, ``never`` never ends."""

    name = "door"

    def __init__(self) -> None:
        super().__init__()
        self.made: list[str] = []
        """Every id that was ever made, in order."""
        self.specs: dict[str, SandboxSpec] = {}
        self.sick: set[str] = set()
        self.busy: dict[str, int] = {}
        """Calls in flight, as a sandbox tells."""
        self.printed: dict[str, bytes] = {}
        self.stored: dict[tuple[str, str], str] = {}
        """Volumes, and who has each."""
        self._folder = tempfile.TemporaryDirectory(prefix="aedoor-", dir="/tmp")
        self._doors: dict[str, asyncio.Server] = {}
        self._guests: dict[str, set[asyncio.StreamWriter]] = {}

    async def create(self, id: str, spec: SandboxSpec) -> Sandbox:
        if id in self.sandboxes:
            return self.sandboxes[id]
        mood = spec.environment_variables.get("MOOD")
        if mood == "broken":
            raise StartFailed("it is broken on purpose")
        for volume in spec.volumes:
            holder = self.stored.setdefault((volume.owner, volume.name), "")
            if holder in self.sandboxes:
                raise Conflict(f"{volume.name} is in use by {holder}")
            self.stored[volume.owner, volume.name] = id
        made = await super().create(id, spec)
        self.made.append(id)
        self.specs[id] = spec
        if mood == "never":
            made = msgspec.structs.replace(made, url="", state=State.CREATING, reason="it takes its time")
        else:
            path = Path(self._folder.name) / id
            self._doors[id] = await asyncio.start_unix_server(lambda *ends: self._answer(id, *ends), path)
            made = msgspec.structs.replace(made, url=f"unix:{path}", boot=id)
        self.sandboxes[id] = made
        return made

    async def _answer(self, id: str, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        guests = self._guests.setdefault(id, set())
        guests.add(writer)
        try:
            while await reader.readuntil(b"\r\n\r\n"):
                status = "503 Unhealthy" if id in self.sick else "200 OK"
                body = b'{"success": false, "error": "it is sick"}' if id in self.sick else b'{"success": true}'
                head = f"HTTP/1.1 {status}\r\nContent-Length: {len(body)}\r\nAEnv-Calls: {self.busy.get(id, 0)}\r\n\r\n"
                writer.write(head.encode() + body)
                await writer.drain()
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            guests.discard(writer)
            writer.close()

    def _close(self, id: str) -> None:
        if door := self._doors.pop(id, None):
            door.close()
        for guest in self._guests.pop(id, ()):
            guest.close()

    def kill(self, id: str, reason: str = "signal 9 ended it") -> None:
        """It ends by itself, and is kept with the reason."""
        self._close(id)
        self.sandboxes[id] = msgspec.structs.replace(self.sandboxes[id], url="", state=State.FAILED, reason=reason)

    async def delete(self, id: str) -> None:
        self._close(id)
        await super().delete(id)

    async def output(self, id: str, start: int) -> Output:
        await self.get(id)
        return Output(start, self.printed.get(id, b"")[start:])

    async def volumes(self, owner: str) -> dict[str, int]:
        return {name: 0 for whose, name in self.stored if whose == owner}

    async def delete_volume(self, owner: str, name: str) -> None:
        if self.stored.get((owner, name)) in self.sandboxes:
            raise Conflict(f"{name} is in use")
        self.stored.pop((owner, name), None)

    async def close(self) -> None:
        for id in list(self._doors):
            self._close(id)
        await asyncio.sleep(0)
        self._folder.cleanup()

    @property
    def alive(self) -> list[str]:
        return [id for id, sandbox in self.sandboxes.items() if not sandbox.state.over]


class Shelf(PaperShelf):
    """Environments by version."""

    def add(self, name: str, version: str = "1.0.0", **deploy: Any) -> Env:
        now = timestamp(time.time())
        id = f"{name}@{version}"
        env = Env(id=id, name=name, version=version, deploy_config=deploy, created_at=now, updated_at=now)
        self.envs[id] = env
        return env


class House(NamedTuple):
    """A server of services."""

    services: Services
    instances: Instances
    directory: ServiceDirectory
    engine: DoorEngine

    async def make(self, env: str = "env@1.0.0", *, wait: float = PATIENCE, **fields: Any) -> Service:
        made = await self.services.create(ALICE, ServiceRequest(env_name=env, **fields), wait=wait)
        assert wait == 0 or made.status == "Running", (made.status, made.reason)
        return made

    async def put(self, id: str, *, wait: float = PATIENCE, **fields: Any) -> Service:
        return await self.services.change(ALICE, id, ServiceChange(**fields), wait=wait)

    async def get(self, id: str) -> Service:
        return await self.services.get(ALICE, id)

    async def once(self, id: str, holds: Any, what: str) -> Service:
        """The service, as soon as that holds of it."""

        async def look() -> Service | None:
            found = await self.get(id)
            return found if holds(found) else None

        found: Service = await until(look, what, PATIENCE)
        return found


def ready(found: Service) -> list[str]:
    return sorted(member.id for member in found.members if member.ready)


def on_shelf() -> Shelf:
    shelf = Shelf()
    shelf.add("env", "1.0.0")
    shelf.add("env", "1.1.0", environmentVariables={"VERSION": "1.1.0"})
    shelf.add("env", "2.0.0", environmentVariables={"MOOD": "broken"})
    shelf.add("env", "2.1.0", environmentVariables={"MOOD": "never"}, timeouts={"startup": "1s"})
    shelf.add("stored", service={"enableStorage": True, "storageSize": "1Mi", "storageName": "drawer"})
    shelf.add("stored", "2.0.0", environmentVariables={"MOOD": "broken"})
    shelf.add("three", service={"replicas": 3, "port": 9000})
    shelf.add("dual", podTemplate="DualContainer", imagePrefix="reg.example.com/judge:1")
    shelf.add("dual", "2.0.0", podTemplate="DualContainer")
    return shelf


@asynccontextmanager
async def house(
    where: str | Store, engine: DoorEngine, home: Path, *, name: str = "server", shelf: Shelf | None = None
) -> AsyncIterator[House]:
    """A server until the block ends. Its engine is the caller's to close."""
    async with AsyncExitStack() as stack:
        store = await stack.enter_async_context(await open_store(where)) if isinstance(where, str) else where
        packages, secrets = Packages(shelf or on_shelf(), home / "packages"), Secrets(store)
        key = await platform_key(store)
        url = "http://127.0.0.1:1"
        instances = Instances(store, engine, packages, secrets, key, data_url=url, name=name)
        stack.push_async_callback(instances.close)
        await instances.start()
        services = Services(store, instances.lives, packages, secrets, key, data_url=url)
        stack.push_async_callback(services.close)
        await services.start()
        yield House(services, instances, ServiceDirectory(services.keepers), engine)


async def gone(work: Any) -> bool:
    """Whether something is not there."""
    try:
        await work
    except NotFound:
        return True
    return False
