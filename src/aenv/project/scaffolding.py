"""New projects, made from the templates that ship with the package."""

from __future__ import annotations

import os
from pathlib import Path

from aenv.config import replace_file
from aenv.errors import Conflict, Invalid, did_you_mean
from aenv.models import NAME, VERSION

TEMPLATES = {
    "default": "an echo tool with a reward, a function and a health check",
    "terminal": "shell commands, scored by the files they leave",
    "gymnasium": "a Gymnasium environment as tools",
    "mcp": "an MCP server that exists already, with a reward beside it",
}
_FOLDER = Path(__file__).parent.parent / "templates"
_SHARED = "shared"  # the files that are the same in every template


def scaffold(
    name: str,
    directory: str | os.PathLike[str] = ".",
    *,
    template: str = "default",
    version: str = "1.0.0",
    force: bool = False,
    config_only: bool = False,
) -> list[Path]:
    """Write a new project into ``directory/name`` and return its files.

    A directory that holds anything is refused unless ``force``; then the template's files are written over
    and every other file is left alone.
    """
    if not NAME.fullmatch(name):
        raise Invalid(
            f"{name!r} is not a usable name",
            hint="use letters, digits, '-', '_' and '.', at most 63, and start with a letter or digit",
        )
    if not VERSION.fullmatch(version):
        raise Invalid(f"{version!r} is not a semantic version", hint="use three numbers, for example 1.0.0")
    if template not in TEMPLATES:
        raise Invalid(f"there is no template {template!r}", hint=did_you_mean(template, TEMPLATES))
    root = Path(directory) / name
    if root.exists() and not root.is_dir():
        raise Conflict(f"{root} is there already, and is not a directory", hint="choose another name")
    if not force and root.is_dir() and any(root.iterdir()):
        raise Conflict(
            f"{root} is not empty",
            hint="choose another name, or give --force to write over the template's files",
        )
    written = []
    for relative, origin in sorted(_files(template).items()):
        if config_only and relative != Path("config.json"):
            continue
        text = origin.read_text(encoding="utf-8").replace("{{name}}", name).replace("{{version}}", version)
        replace_file(root / relative, text)
        written.append(root / relative)
    return written


def _files(template: str) -> dict[Path, Path]:
    """What a project of this template gets: its path in the project, and the file it is made from."""
    return {
        file.relative_to(_FOLDER / layer): file
        for layer in (_SHARED, template)
        for file in (_FOLDER / layer).rglob("*")
        if file.is_file() and "__pycache__" not in file.parts and file.suffix != ".pyc"
    }
