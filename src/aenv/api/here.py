"""The project of a directory as the only environment there is, for ``aenv run``: as its files are now."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import AsyncIterator
from pathlib import Path

from aenv import project
from aenv.auth.callers import Caller
from aenv.errors import NotFound, Unsupported
from aenv.models import EnvRef
from aenv.project import Project
from aenv.project.stamp import stamp
from aenv.project.unpacked import Placed
from aenv.project.versions import admits
from aenv.wire import Env, Status, timestamp


class ProjectHere:
    """A source that serves the project in ``directory``. It is read anew for each instance; nothing is packed."""

    def __init__(self, directory: str | os.PathLike[str]) -> None:
        self._directory = Path(directory)

    async def resolve(self, ref: EnvRef, call_token: str, caller: Caller) -> Env:
        found = await asyncio.to_thread(project.read, self._directory, config_required=False)
        if found.name != ref.name or not admits(ref, found.version):
            raise NotFound(
                f"no environment {str(ref)!r} is known here", hint=f"only the one of this directory is: {found.name}"
            )
        return _env(found)

    async def place(self, env: Env) -> Placed:
        root = await asyncio.to_thread(project.find, self._directory)
        return Placed(str(root), await asyncio.to_thread(stamp, root))

    async def package(self, env: Env, call_token: str, caller: Caller) -> AsyncIterator[bytes]:
        raise Unsupported(f"{env.id} has no package: it is run from its directory")


def _env(found: Project) -> Env:
    now = timestamp(time.time())
    config = found.config
    return Env(
        id=f"{found.name}@{found.version}",
        name=found.name,
        version=found.version,
        description=found.description,
        tags=list(found.tags),
        code_url=str(found.value("codeUrl")),
        status=Status.READY,
        artifacts=config.get("artifacts") or [],
        build_config=config.get("buildConfig") or {},
        test_config=config.get("testConfig") or {},
        deploy_config=config.get("deployConfig") or {},
        created_at=now,
        updated_at=now,
    )
