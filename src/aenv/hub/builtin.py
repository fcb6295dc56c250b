"""The built-in environments, published when a hub starts that does not have them.

To publish one is to start it once. Benchmarks, which need packages of others, are left to whoever wants them:
``aenv push NAME`` finds them.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from pathlib import Path
from typing import TYPE_CHECKING

from aenv.auth.callers import Caller, Scope
from aenv.errors import AEnvError
from aenv.project import CONFIG, Project, archive, read
from aenv.project.builtin import builtin_root, needs_packages
from aenv.wire import EnvRequest, Status

if TYPE_CHECKING:
    from aenv.hub.service import Hub

log = logging.getLogger("aenv.hub")

OWNER = "aenv"
"""Whose they are."""
_PUBLISHER = Caller(OWNER, frozenset({Scope.PUSH, Scope.READ}))


async def publish(hub: Hub, root: Path | None = None) -> list[str]:
    """Publish those versions that this hub does not have; which ones. One that cannot be published stops nobody."""
    published = []
    for folder in await asyncio.to_thread(_folders, root or builtin_root()):
        try:
            project = await asyncio.to_thread(read, folder)
            if await _publish(hub, project):
                published.append(f"{project.name}@{project.version}")
        except AEnvError as exc:
            log.warning("the built-in environment %s is not published: %s", folder.name, exc)
    return published


async def _publish(hub: Hub, project: Project) -> bool:
    name, version = project.name, project.version
    if not await hub.exists(_PUBLISHER, name, version):
        await hub.create(_PUBLISHER, EnvRequest(name=name, version=version))
    status = (await hub.status(_PUBLISHER, name, version)).status
    if status == Status.RELEASED:
        return False
    if status != Status.READY:  # a hub that was killed may have come as far as that
        await hub.upload(_PUBLISHER, name, version, _piece(await asyncio.to_thread(archive.pack, project)))
    await hub.release(_PUBLISHER, name, version)
    return True


async def _piece(package: bytes) -> AsyncIterator[bytes]:
    yield package


def _folders(root: Path) -> list[Path]:
    found = sorted(path for path in root.iterdir() if (path / CONFIG).is_file()) if root.is_dir() else []
    return [path for path in found if not needs_packages(path)]
