"""Projects in volumes: one for each content, which every container of that project shares and none can change."""

from __future__ import annotations

import asyncio
import hashlib
from pathlib import Path

from aenv.engines.docker.containers import PROJECT, PROJECTS
from aenv.engines.docker.daemon import Daemon
from aenv.engines.docker.images import Image
from aenv.engines.docker.keepers import Keepers
from aenv.engines.projects import packed
from aenv.project.stamp import stamp

_PREFIX = "aenv-project-"


class Projects:
    """The projects that one daemon has."""

    def __init__(self, daemon: Daemon) -> None:
        self.keepers = Keepers(daemon, PROJECT, PROJECTS)
        self._known: dict[tuple[str, str, str], str] = {}

    async def keeper(self, root: str, edition: str, image: Image) -> str:
        """The name of the container that keeps this project's volume; it is made when there is none."""
        found = await asyncio.to_thread(stamp, Path(root))
        name = self._known.get((root, edition, found), "")
        content = b""
        if not name:
            content = await asyncio.to_thread(packed, Path(root), image.reference)
            name = self._known[root, edition, found] = _PREFIX + hashlib.sha256(content).hexdigest()[:32]

        async def pack() -> bytes:
            return content or await asyncio.to_thread(packed, Path(root), image.reference)

        await self.keepers.have(name, image.id, pack)
        return name
