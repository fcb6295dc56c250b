"""Descriptions from a docstring: what comes before the sections, and a line for each argument.

Understands the Google, NumPy and Sphinx ways of writing them.
"""

from __future__ import annotations

import inspect
import re
from typing import Literal, NamedTuple

_NAMES = r"(\*{0,2}\w+(?:\s*,\s*\*{0,2}\w+)*)"
_SECTION = re.compile(
    r"((?:Keyword |Other )?(?:Args|Arguments|Parameters|Params))|Returns?|Yields?|Raises|Examples?|Notes?"
)
_GOOGLE = re.compile(_NAMES + r"\s*(?:\(.*?\))?\s*:\s*(.*)")
_NUMPY = re.compile(_NAMES + r"\s*(?::.*)?()")
_SPHINX = re.compile(r":(?:param|parameter|arg|argument|key|keyword)\s+(?:[^:]*\s)?\*{0,2}(\w+)\s*:\s*(.*)")
_SPHINX_OTHER = re.compile(r":(returns?|rtype|raises|type)\b.*:")


class Docstring(NamedTuple):
    description: str | None
    arguments: dict[str, str]


def parse(text: str | None) -> Docstring:
    """The parts of a docstring; an absent one has no description."""
    lines = inspect.cleandoc(text).splitlines() if text else []
    about: list[str] = []
    arguments: dict[str, list[str]] = {}
    section: Literal["arguments", "other", "sphinx"] | None = None
    entry = _GOOGLE
    current: list[str] | None = None
    margin: int | None = None
    for number, line in enumerate(lines):
        stripped = line.strip()
        indent = len(line) - len(line.lstrip())
        if not stripped or (section and set(stripped) == {"-"}):
            if section is None:
                about.append(line)
            continue
        under = lines[number + 1].strip() if number + 1 < len(lines) else ""
        underlined = set(under) == {"-"}
        known = _SECTION.fullmatch(stripped.removesuffix(":").rstrip())
        if not indent and (known or section) and (underlined or (known and stripped.endswith(":"))):
            section = "arguments" if known and known[1] else "other"
            entry, current, margin = _NUMPY if underlined else _GOOGLE, None, None
            continue
        if section in ("arguments", "other") and margin and not indent:  # back at the edge: the section is over
            section, current, margin = "other" if stripped.endswith(":") else None, None, None
        if sphinx := _SPHINX.match(stripped):
            section, current = "sphinx", arguments.setdefault(sphinx[1], [sphinx[2]])
        elif _SPHINX_OTHER.match(stripped):
            section, current = "sphinx", None
        elif section is None:
            about.append(line)
        else:
            margin = indent if margin is None else margin
            header = entry.fullmatch(stripped) if section == "arguments" and indent <= margin else None
            if header:
                current = [header[2]]
                for name in header[1].split(","):
                    arguments.setdefault(name.strip().lstrip("*"), current)
            elif current is not None:
                current.append(stripped)
    description = "\n".join(about).strip() or None
    return Docstring(description, {name: " ".join(filter(None, part)) for name, part in arguments.items()})
