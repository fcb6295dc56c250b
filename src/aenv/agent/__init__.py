"""The agent of a second container: a small static program that runs commands in an image it knows nothing about.

Its source is here, in C. A wheel for Linux has it compiled; elsewhere it is compiled when it is first needed.
"""

from __future__ import annotations

import platform
from pathlib import Path

from aenv import config
from aenv.agent import recipe
from aenv.errors import Unsupported

_HERE = Path(__file__).parent
_NAMES = {"amd64": "x86_64", "x64": "x86_64", "arm64": "aarch64"}
"""What Docker and others call an architecture, and what compilers do."""


def binary(architecture: str | None = None) -> Path:
    """The program for machines of that kind, such as ``x86_64`` or ``arm64``; for this one when none is given.

    Raises ``Unsupported`` when there is none and it cannot be compiled.
    """
    name = (architecture or platform.machine()).lower()
    name = _NAMES.get(name, name)
    shipped = _HERE / "bin" / recipe.file_name(name)
    if shipped.is_file():
        return shipped
    made = config.home() / "cache" / "agent" / f"{recipe.file_name(name)}-{recipe.digest(_HERE)}"
    if made.is_file():
        return made
    try:
        return recipe.make(_HERE, name, made)
    except recipe.NotMade as exc:
        raise Unsupported(
            f"there is no agent for the second container on {name!r}: {exc}",
            hint=f"install the package from its wheel for Linux, or a compiler: apt install {recipe.package(name)}",
        ) from exc
