"""New projects, made from the templates that ship with the package."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from aenv.config import replace_file
from aenv.errors import Conflict, Invalid, did_you_mean
from aenv.models import NAME, VERSION

TEMPLATES = {
    "default": "an echo tool with a reward, a function and a health check",
    "terminal": "shell commands, scored by the files they leave",
    "gymnasium": "a Gymnasium environment as tools",
    "mcp": "an MCP server that exists already, with a reward beside it",
    "agent": "an agent that others talk to, by rules or by a model, with a reward over what was said",
}
ADDED = ("added/mcp", "added/openapi", "added/a2a")
"""Templates of projects that wrap a service of others."""
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
    words: Mapping[str, str] | None = None,
    config: Mapping[str, Any] | None = None,
    files: Mapping[str, str] | None = None,
) -> list[Path]:
    """Write a new project into ``directory/name`` and return its files.

    ``words`` stand for more of what the template has in braces, ``config`` goes over its config.json, and ``files``
    come beside its own.

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
    if template not in (*TEMPLATES, *ADDED):
        raise Invalid(f"there is no template {template!r}", hint=did_you_mean(template, TEMPLATES))
    root = Path(directory) / name
    if root.exists() and not root.is_dir():
        raise Conflict(f"{root} is there already, and is not a directory", hint="choose another name")
    if not force and root.is_dir() and any(root.iterdir()):
        raise Conflict(
            f"{root} is not empty",
            hint="choose another name, or give --force to write over the template's files",
        )
    texts = {
        relative: _filled(origin.read_text(encoding="utf-8"), {**(words or {}), "name": name, "version": version})
        for relative, origin in _files(template).items()
        if not config_only or relative == Path("config.json")
    }
    if config:
        texts[Path("config.json")] = _over(texts[Path("config.json")], config)
    texts.update({Path(relative): text for relative, text in (files or {}).items()})
    for relative, text in sorted(texts.items()):
        replace_file(root / relative, text)
    return [root / relative for relative in sorted(texts)]


def _made_from(template: Path) -> Path:
    """What a file becomes: one that is no Python before its words are in does not end in ``.py``."""
    return template.with_suffix("") if template.suffix == ".in" else template


def _filled(text: str, words: Mapping[str, str]) -> str:
    """The text with its words in, none of which is looked into for others."""
    return re.sub(r"\{\{(\w+)\}\}", lambda found: words.get(found[1], found[0]), text)


def _over(text: str, config: Mapping[str, Any]) -> str:
    """A config.json with other fields, and other ones of ``deployConfig``."""
    found = json.loads(text)
    deploy = {**found["deployConfig"], **config.get("deployConfig", {})}
    first = {key: found[key] for key in ("name", "version")}
    return json.dumps({**first, **config, **found, "deployConfig": deploy}, indent=2, ensure_ascii=False) + "\n"


def _files(template: str) -> dict[Path, Path]:
    """What a project of this template gets: its path in the project, and the file it is made from."""
    return {
        _made_from(file.relative_to(_FOLDER / layer)): file
        for layer in (_SHARED, template)
        for file in (_FOLDER / layer).rglob("*")
        if file.is_file() and "__pycache__" not in file.parts and file.suffix != ".pyc"
    }
