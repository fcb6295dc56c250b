"""Projects in volumes: one for each content, which every container of that project shares and none can change."""

from __future__ import annotations

import asyncio
import hashlib
from pathlib import Path

from aenv import project
from aenv.engines.docker.containers import PROJECT, PROJECTS
from aenv.engines.docker.daemon import Daemon
from aenv.engines.docker.images import Image
from aenv.engines.docker.keepers import Keepers
from aenv.errors import Invalid
from aenv.project import archive
from aenv.project.stamp import stamp

_PREFIX = "aenv-project-"
_OWN = frozenset(("aenv", "aenvironment"))


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
            content = await asyncio.to_thread(_packed, Path(root), image)
            name = self._known[root, edition, found] = _PREFIX + hashlib.sha256(content).hexdigest()[:32]

        async def packed() -> bytes:
            return content or await asyncio.to_thread(_packed, Path(root), image)

        await self.keepers.have(name, image.id, packed)
        return name


def _packed(root: Path, image: Image) -> bytes:
    found = project.read(root, config_required=False)
    _check_requirements(found.root, image)
    return archive.pack(found)


def _check_requirements(root: Path, image: Image) -> None:
    """Refuse a project that needs more than the base image has."""
    file = root / "requirements.txt"
    try:
        lines = file.read_text(encoding="utf-8-sig", errors="replace").splitlines()
    except OSError:
        return
    for line in lines:
        text = line.partition("#")[0].strip()
        if text and _name(text) not in _OWN:
            raise Invalid(
                f"{file} asks for {text[:100]!r}, which the image {image.reference} may not have",
                hint="make an image of the project with 'aenv build', and give that",
            )


def _name(requirement: str) -> str:
    """The package that a line of requirements.txt asks for."""
    name = requirement
    for mark in "[<>=!~;@ ":
        name = name.partition(mark)[0]
    return name.strip().lower()
