"""What a controller does: an engine's verbs for callers elsewhere, the projects they send, and where sandboxes are."""

from __future__ import annotations

import asyncio
import hashlib
import logging
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from urllib.parse import urlsplit

import msgspec

from aenv import __version__, project
from aenv.api.admission import RESERVED, allowed_data, environment
from aenv.cleanup import finish
from aenv.controller.creations import Creations
from aenv.engines.base import Engine, new_id
from aenv.engines.contract import Cleaned, Facts, Held, Named, Wanted
from aenv.engines.specs import complete
from aenv.errors import AEnvError, Invalid, NotFound, StartFailed, TooLarge
from aenv.models import EnvRef, Sandbox, SandboxSpec, Second, State
from aenv.project.archive import MAX_SIZE
from aenv.project.builtin import builtin
from aenv.project.images import image_of
from aenv.project.unpacked import Unpacked, is_digest
from aenv.runtime.access import is_loopback
from aenv.wire import Env, timestamp

log = logging.getLogger("aenv.controller")

PROJECT = f"{RESERVED}project"
"""The label that says which unpacked project a sandbox is of; nobody is shown it."""
_LABEL = 32
"""Characters of a digest that a label has."""
_LONGEST = 600.0
"""Seconds that a request without a wish waits for a start."""


class Controller:
    """An engine, served."""

    def __init__(
        self,
        engine: Engine,
        folder: Path,
        *,
        data_url: str = "",
        carry: bool = False,
        datasources: Sequence[Path] = (),
    ) -> None:
        """Projects are kept below ``folder``. ``data_url`` is the gateway by which sandboxes are reached that have no
        address of their own; with ``carry``, all are. Data may be used that is below ``datasources``."""
        self.engine = engine
        self.creations = Creations(engine)
        self.listeners: list[Callable[[str], None]] = []
        """Who is told the id of a sandbox that was deleted."""
        self._data_url = data_url
        self._carry = carry
        self._datasources = datasources
        self._unpacked = Unpacked(folder)

    async def close(self) -> None:
        """Give up what is being made. What is made lives on."""
        await self.creations.close()

    # The verbs

    async def create(self, wanted: Wanted, patience: float | None, attempt: str) -> Held:
        """A sandbox; one that is alive under the id that is given is returned as it is."""
        id = wanted.instance_id
        spec: SandboxSpec | None = None
        if not (id and self.creations.is_known(id)):
            spec = await self._spec(wanted)
            id = id or new_id(spec.env.name)
            if wanted.project and spec.project == "":
                return await self._alive(id) or Held(id=id, missing=True)
        found = await self.creations.create(id, spec, _LONGEST if patience is None else patience, attempt)
        return self.shown(found) if found is not None else Held(id=id, status=State.CREATING.value, pending=True)

    async def _alive(self, id: str) -> Held | None:
        with suppress(NotFound):
            found = await self.engine.get(id)
            return None if found.state.over else self.shown(found)
        return None

    async def get(self, id: str, patience: float) -> Held:
        """A sandbox, once it is not starting any more, or after so many seconds."""
        if patience:
            with suppress(StartFailed, TimeoutError):
                async with asyncio.timeout(patience):  # also where the engine has no room
                    return self.shown(await self.engine.wait(id, patience, where=False))
        return self.shown(await self.engine.get(id))

    async def find(self, env: str, labels: Mapping[str, str]) -> list[Held]:
        """Those of an environment, all when none is named, that bear all these labels."""
        found = await self.engine.find(labels)
        return [self.shown(one) for one in found if not env or env in (one.env, one.env.partition("@")[0])]

    async def delete(self, id: str, attempt: str) -> None:
        """End a sandbox."""
        await self.creations.delete(id, attempt)
        for tell in self.listeners:
            tell(id)

    async def prepare(self, wanted: Wanted) -> Held:
        """Do now what the first sandbox of an environment would have to wait for."""
        spec = await self._spec(wanted)
        if wanted.project and not spec.project:
            return Held(missing=True)
        done = await self.engine.prepare(spec)
        env = Named(name=spec.env.name, version=spec.env.version or "")
        if done:
            return Held(env=env, status=State.RUNNING.value)
        return Held(env=env, reason=f"the {self.engine.name} engine has nothing to prepare")

    async def clean(self) -> Cleaned:
        """Remove sandboxes that are over, with all that is kept of them, and projects that nobody uses."""
        over = [one for one in await self.engine.find() if one.state.over]
        for one in over:
            await self.delete(one.id, "")
        projects = await asyncio.to_thread(self._unpacked.make_room, await self._in_use())
        log.info("cleaned up: %d sandboxes that were over, %d projects", len(over), projects)
        return Cleaned(instances=len(over), projects=projects)

    def facts(self) -> Facts:
        """What the engine is."""
        refusals = {}
        for kind, second in {"image": Second(image="an image"), "directory": Second(directory="/directory")}.items():
            try:
                self.engine.check_second(second)
            except AEnvError as exc:
                refusals[kind] = exc.to_wire()
        return Facts(
            name=self.engine.name,
            version=__version__,
            cannot=dict(self.engine.cannot),
            images=self.engine.images,
            refusals=refusals,
        )

    # Projects

    async def receive(self, digest: str, pieces: AsyncIterator[bytes]) -> None:
        """Unpack a project that somebody sends, under its digest."""
        if not is_digest(digest):
            raise Invalid(f"{digest[:80]!r} is no sha256", hint="64 characters of 0-9 and a-f")
        folder = self._unpacked.folder
        try:
            folder.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=folder) as file:
                found, size = hashlib.sha256(), 0
                async for piece in pieces:
                    size += len(piece)
                    if size > MAX_SIZE:
                        raise TooLarge(f"the project is over {MAX_SIZE} bytes")
                    found.update(piece)
                    file.write(piece)
                if found.hexdigest() != digest:
                    raise Invalid(f"what came has the sha256 {found.hexdigest()}, and {digest} was said")
                file.seek(0)
                await finish(asyncio.to_thread(self._unpacked.put, file, digest, await self._in_use()))
        except OSError as exc:
            raise AEnvError(f"{folder} cannot hold a project: {exc.strerror or exc}", hint="make room") from exc

    async def _in_use(self) -> set[str]:
        """Digests of projects that something alive is of."""
        alive = [one.labels for one in await self.engine.find() if not one.state.over]
        used = {labels.get(PROJECT, "") for labels in (*alive, *(spec.labels for spec in self.creations.specs))}
        folder = self._unpacked.folder
        return {path.name for path in folder.iterdir() if path.name[:_LABEL] in used} if folder.is_dir() else set()

    # From a request to a spec

    async def _spec(self, wanted: Wanted) -> SandboxSpec:
        """What the engine is given. Its project is empty where that must be sent first."""
        spec = wanted.spec
        if spec is None:
            return await asyncio.to_thread(_of_stranger, wanted)
        second = spec.second
        if second is not None and second.directory:
            second = Second(image=second.image, directory=await allowed_data(second.directory, self._datasources))
        datasource = await allowed_data(spec.datasource, self._datasources)
        if not is_digest(wanted.project):
            if wanted.project:
                raise Invalid(f"{wanted.project[:80]!r} is no sha256", hint="64 characters of 0-9 and a-f")
            return msgspec.structs.replace(spec, project="", stamp="", second=second, datasource=datasource)
        placed = self._unpacked.find(wanted.project)
        return msgspec.structs.replace(
            spec,
            project="" if placed is None else placed.root,
            stamp="" if placed is None else placed.stamp,
            second=second,
            datasource=datasource,
            labels={**spec.labels, PROJECT: wanted.project[:_LABEL]},
        )

    # From a sandbox to an answer

    def shown(self, sandbox: Sandbox) -> Held:
        """A sandbox as it is reached from elsewhere."""
        url = self.reached(sandbox)
        labels = {name: value for name, value in sandbox.labels.items() if name != PROJECT}
        name, _, version = sandbox.env.partition("@")
        left = None if sandbox.expires_at is None else max(sandbox.expires_at - sandbox.created_at, 0.0)
        return Held(
            id=sandbox.id,
            env=Named(name=name, version=version),
            status=sandbox.state.value,
            created_at=timestamp(sandbox.created_at),
            updated_at=timestamp(time.time()),
            ip=urlsplit(url).hostname or "",
            ttl="" if left is None else f"{left:.0f}s",
            sandbox=msgspec.structs.replace(sandbox, url=url, labels=labels),
            reason=sandbox.reason,
        )

    def reached(self, sandbox: Sandbox) -> str:
        """Where others reach it: at its own address, when it has one that others know, or through the gateway."""
        if not sandbox.url:
            return ""
        host = "" if sandbox.url.startswith("unix:") else urlsplit(sandbox.url).hostname or ""
        if host and not is_loopback(host) and not self._carry:
            return sandbox.url
        return f"{self._data_url}/env-instance/{sandbox.id}"


def _of_stranger(wanted: Wanted) -> SandboxSpec:
    """What an environment says of itself, where its sender says no more: by its image, or as one that comes with us."""
    ref = EnvRef.parse(f"{wanted.name}@{wanted.version.removeprefix('v')}" if wanted.version else wanted.name)
    deploy = wanted.deploy_config or {}
    env = Env(
        id=str(ref),
        name=ref.name,
        version=ref.version or "",
        artifacts=wanted.artifacts or [],
        deploy_config=deploy,
        created_at="",
        updated_at="",
    )
    spec = SandboxSpec(env=ref)
    image = image_of(wanted.artifacts or [])
    place = builtin(ref.name)
    if not image and place is not None:
        return complete(spec, project.read(place))
    if not image:
        raise Invalid(
            f"{ref} has no image, and no environment of that name comes with the controller",
            hint="build one with 'aenv build --push', or send the project and its spec",
        )
    return complete(spec, environment(env, ""))
