"""Projects that are brought into an image which others share: as archives, where nothing but the project is missing."""

from __future__ import annotations

from pathlib import Path

from aenv import project
from aenv.errors import Invalid
from aenv.project import archive

_OWN = frozenset(("aenv", "aenvironment"))


def packed(root: Path, image: str) -> bytes:
    """The archive of a project that is to run in that image."""
    found = project.read(root, config_required=False)
    _check_requirements(found.root, image)
    return archive.pack(found)


def _check_requirements(root: Path, image: str) -> None:
    """Refuse a project that needs more than the base image has."""
    for file in (root / "requirements.txt", root / "requirements-no-deps.txt"):
        _check_file(file, image)


def _check_file(file: Path, image: str) -> None:
    try:
        lines = file.read_text(encoding="utf-8-sig", errors="replace").splitlines()
    except OSError:
        return
    for line in lines:
        text = line.partition("#")[0].strip()
        if text and _name(text) not in _OWN:
            raise Invalid(
                f"{file} asks for {text[:100]!r}, which the image {image} may not have",
                hint="make an image of the project with 'aenv build', and give that",
            )


def _name(requirement: str) -> str:
    """The package that a line of requirements.txt asks for."""
    name = requirement
    for mark in "[<>=!~;@ ":
        name = name.partition(mark)[0]
    return name.strip().lower()
