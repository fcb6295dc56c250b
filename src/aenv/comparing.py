"""Two values that should be the same, as JSON has them: where they first differ, and how to show that."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, NamedTuple

import msgspec

from aenv.models import ToolResult, to_json

ABSENT = "(absent)"
"""Stands for a value that is not there at all."""
_BEFORE = 20
"""Characters that are shown before the place where two texts differ."""


class Unlike(NamedTuple):
    """Where two values differ."""

    path: str
    expected: Any
    found: Any


def unlike(expected: Any, found: Any, path: str = "") -> Unlike | None:
    """The first place where two values are not the same as JSON: in order of the keys, then of the places."""
    return _unlike(_plain(expected), _plain(found), path)


def unlike_results(expected: ToolResult, found: ToolResult) -> Unlike | None:
    """The same for what a tool gave. Its data come first, since its text often repeats them; but of a failure it is
    the text that tells."""
    fields = ["structured", "content", "is_error"]
    if expected.is_error != found.is_error:
        fields.reverse()
        fields[:2] = reversed(fields[:2])
    pairs = (unlike(getattr(expected, field), getattr(found, field), field) for field in fields)
    return next(filter(None, pairs), None)


def _plain(value: Any) -> Any:
    return msgspec.json.decode(to_json(value))


def _unlike(expected: Any, found: Any, path: str) -> Unlike | None:
    if isinstance(expected, dict) and isinstance(found, dict):
        keys = [*expected, *(key for key in found if key not in expected)]
        pairs = ((_below(path, key), expected.get(key, ABSENT), found.get(key, ABSENT)) for key in keys)
        return _first(list(pairs))
    if isinstance(expected, list) and isinstance(found, list):
        longest = max(len(expected), len(found))
        return _first([(f"{path}[{at}]", _at(expected, at), _at(found, at)) for at in range(longest)])
    if isinstance(expected, bool) == isinstance(found, bool) and expected == found:  # True is 1 in Python, not in JSON
        return None
    return Unlike(path, expected, found)


def _first(pairs: Sequence[tuple[str, Any, Any]]) -> Unlike | None:
    return next(filter(None, (_unlike(expected, found, path) for path, expected, found in pairs)), None)


def _below(path: str, key: str) -> str:
    part = key if key.isidentifier() else json.dumps(key)
    return f"{path}.{part}" if path else part


def _at(values: list[Any], index: int) -> Any:
    return values[index] if index < len(values) else ABSENT


def shown(expected: Any, found: Any, width: int = 60) -> tuple[str, str]:
    """Both as short text. Of two long texts it is the part where they part."""
    if isinstance(expected, str) and isinstance(found, str):
        same = next((at for at, (one, other) in enumerate(zip(expected, found, strict=False)) if one != other), None)
        same = min(len(expected), len(found)) if same is None else same
        begin = max(same - _BEFORE, 0) if max(len(expected), len(found)) > width else 0
        return _short(expected, begin, width), _short(found, begin, width)
    return _short(expected, 0, width), _short(found, 0, width)


def _short(value: Any, begin: int, width: int) -> str:
    if value == ABSENT:
        return "nothing"
    if isinstance(value, str):
        piece = value[begin : begin + width]
        left, right = "..." if begin else "", "..." if begin + width < len(value) else ""
        return f"{left}{json.dumps(piece, ensure_ascii=False)}{right}"
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= width else f"{text[:width]}..."
