"""JSON text with the line of every value, so that a mistake can be shown where it stands."""

from __future__ import annotations

import json
import re
from typing import Any, NamedTuple, NoReturn

from aenv.errors import InvalidConfig

Where = tuple[str | int, ...]
"""The keys and indexes that lead to a value."""

_TOKEN = re.compile(r'"(?:[^"\\]|\\.)*"|[{}\[\],]|[^\s{}\[\],:"]+')
_HINTS = (
    (
        "property name enclosed in double quotes",
        "keys stand in double quotes, and nothing follows the last comma",
    ),
    ("trailing comma", "remove the comma after the last entry"),
    (
        "Expecting value",
        "a value is missing here; strings stand in double quotes, and nothing follows the last comma",
    ),
    ("',' delimiter", "a comma is missing before this place"),
    ("':' delimiter", "a colon is missing between a key and its value"),
    ("Extra data", "the file holds more than one value"),
)


class Scanned(NamedTuple):
    value: Any
    lines: dict[Where, int]
    repeated: tuple[Where, ...]
    """Keys that stand twice in one object; JSON keeps the last."""


def scan(text: str, file: str) -> Scanned:
    """The value in ``text`` and where its parts stand; ``InvalidConfig`` when it is not JSON."""
    try:
        value = json.loads(text, parse_constant=_refuse)
    except json.JSONDecodeError as exc:
        hint = next((hint for part, hint in _HINTS if part in exc.msg), None)
        raise InvalidConfig(f"{file}:{exc.lineno}:{exc.colno}: not valid JSON: {exc.msg}", hint=hint) from exc
    except (ValueError, RecursionError) as exc:
        reason = "nested too deeply" if isinstance(exc, RecursionError) else str(exc)
        raise InvalidConfig(f"{file}: not valid JSON: {reason}") from exc
    return Scanned(value, *_places(text))


def _refuse(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is not a JSON number")


def _places(text: str) -> tuple[dict[Where, int], tuple[Where, ...]]:
    """The line of every value in ``text``, which is valid JSON; and the keys given twice."""
    lines: dict[Where, int] = {(): 1}
    repeated: list[Where] = []
    place: list[str | int | None] = []  # one entry per open container: an index, a key, or None before a key
    line, seen = 1, 0
    for match in _TOKEN.finditer(text):
        line += text.count("\n", seen, match.start())
        seen, mark = match.start(), match.group()
        if mark in "}]":
            place.pop()
        elif mark == ",":
            place[-1] = place[-1] + 1 if isinstance(place[-1], int) else None
        elif place and place[-1] is None:
            place[-1] = json.loads(mark)
            where = _where(place)
            if where in lines:
                repeated.append(where)
            lines[where] = line
        else:
            lines.setdefault(_where(place), line)
            if mark in "{[":
                place.append(None if mark == "{" else 0)
    return lines, tuple(repeated)


def _where(place: list[str | int | None]) -> Where:
    return tuple(step for step in place if step is not None)
