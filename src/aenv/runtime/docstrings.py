"""Descriptions from a docstring: what comes before the sections, and a line for each argument.

Understands the Google, NumPy and Sphinx ways of writing them.
"""

from __future__ import annotations

import inspect
import re
from typing import NamedTuple

_SECTION = re.compile(r"(Args|Arguments|Parameters|Params|Returns?|Yields?|Raises|Examples?|Notes?)\s*:?\s*")
_ARGUMENTS = ("Args", "Arguments", "Parameters", "Params")
_GOOGLE = re.compile(r"\*{0,2}(\w+)\s*(?:\([^)]*\))?\s*:\s*(.*)")
_NUMPY = re.compile(r"(\w+)\s*(?::.*)?")
_SPHINX = re.compile(r":param\s+(?:[^:]*\s)?(\w+)\s*:\s*(.*)")
_SPHINX_OTHER = re.compile(r":(returns?|rtype|raises|type)\b.*:")


class Docstring(NamedTuple):
    description: str | None
    arguments: dict[str, str]


def parse(text: str | None) -> Docstring:
    """The parts of a docstring; an absent one has no description."""
    lines = inspect.cleandoc(text).splitlines() if text else []
    about: list[str] = []
    arguments: dict[str, list[str]] = {}
    section: str | None = None
    current: list[str] | None = None
    margin: int | None = None
    for number, line in enumerate(lines):
        stripped = line.strip()
        if number and not line.startswith(" ") and (found := _SECTION.fullmatch(stripped)):
            under = lines[number + 1].strip() if number + 1 < len(lines) else ""
            if stripped.endswith(":") or (under and set(under) == {"-"}):
                section, current, margin = found[1], None, None
                continue
        if sphinx := _SPHINX.match(stripped):
            section, current = "sphinx", arguments.setdefault(sphinx[1], [sphinx[2]])
        elif _SPHINX_OTHER.match(stripped):
            section, current = "sphinx", None
        elif section is None:
            about.append(line)
        elif section in _ARGUMENTS and stripped and set(stripped) != {"-"}:
            indent = len(line) - len(line.lstrip())
            margin = indent if margin is None else margin
            header = (_GOOGLE if margin else _NUMPY).fullmatch(stripped) if indent <= margin else None
            if header:
                current = arguments.setdefault(header[1], [header[2]] if header.re is _GOOGLE else [])
            elif current is not None:
                current.append(stripped)
        elif current is not None and stripped:
            current.append(stripped)
    description = "\n".join(about).strip() or None
    return Docstring(description, {name: " ".join(filter(None, part)) for name, part in arguments.items()})
