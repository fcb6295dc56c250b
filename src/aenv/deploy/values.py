"""Values of a chart: files over its own, and ``--set`` over those, as Helm puts them together."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from aenv.deploy import documents
from aenv.errors import Invalid

_KEY = re.compile(r"((?:\\.|[^.\[\]=\\])+)|\[(\d+)\]|(\.)")
_MOST_ITEMS = 1000


def merged(below: Mapping[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
    """``above`` over ``below``: objects key by key, anything else in place of what is there, null takes it away."""
    result = dict(below)
    for key, value in above.items():
        if value is None:
            result.pop(key, None)
        elif isinstance(value, dict) and isinstance(result.get(key), dict):
            result[key] = merged(result[key], value)
        else:
            result[key] = _without_nulls(value)
    return result


def _without_nulls(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_nulls(found) for key, found in value.items() if found is not None}
    return value


def read(file: Path) -> dict[str, Any]:
    """A file of values."""
    try:
        text = file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as exc:
        raise Invalid(f"{file} cannot be read: {getattr(exc, 'strerror', None) or exc}") from exc
    found = documents.load(text, str(file)) or {}
    if not isinstance(found, dict):
        raise Invalid(f"{file} holds no values", hint="it is YAML like 'api: {replicas: 3}'")
    return found


def given(settings: Iterable[str], base: Mapping[str, Any]) -> dict[str, Any]:
    """``base`` with what ``--set a.b=c,d[0]=e`` says over it."""
    values = dict(base)
    for setting in settings:
        for part in _split(setting, ","):
            key, found, text = part.partition("=")
            path = _path(key) if found else []
            if not path:
                raise Invalid(f"--set {part!r} is not understood", hint="use key=value: --set api.replicas=3")
            values = _put(values, path, _value(text), part)
    return values


def _split(text: str, at: str) -> list[str]:
    """Parts between commas that are neither escaped nor in braces."""
    parts, depth, escaped = [""], 0, False
    for character in text:
        if character == at and not depth and not escaped:
            parts.append("")
            continue
        depth += {"{": 1, "}": -1}.get(character, 0) if not escaped else 0
        escaped = character == "\\" and not escaped
        parts[-1] += character
    return parts


def _path(key: str) -> list[str | int]:
    path: list[str | int] = []
    position = 0
    for found in _KEY.finditer(key):
        if found.start() != position:
            return []
        position = found.end()
        if found[1]:
            path.append(re.sub(r"\\(.)", r"\1", found[1]))
        elif found[2]:
            path.append(int(found[2]))
    return path if position == len(key) else []


def _value(text: str) -> Any:
    if text.startswith("{") and text.endswith("}"):
        return [_value(item) for item in _split(text[1:-1], ",")] if text != "{}" else []
    if text in ("true", "false"):
        return text == "true"
    if text == "null":
        return None
    if re.fullmatch(r"0|-?[1-9]\d*", text):
        return float(text)
    return re.sub(r"\\(.)", r"\1", text)


def _put(values: Any, path: list[str | int], value: Any, part: str) -> Any:
    key, *rest = path
    if isinstance(key, int):
        if key > _MOST_ITEMS:
            raise Invalid(f"--set {part!r} names item {key}, beyond any list")
        items = list(values) if isinstance(values, list) else []
        items += [None] * (key + 1 - len(items))
        items[key] = _put(items[key], rest, value, part) if rest else value
        return items
    held = dict(values) if isinstance(values, dict) else {}
    held[key] = _put(held.get(key), rest, value, part) if rest else value
    return held
