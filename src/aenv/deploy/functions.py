"""What a chart's templates may call: the functions of Go's templates and of Helm that ours are written with."""

from __future__ import annotations

import base64
import hashlib
import json
import secrets
import string
from collections.abc import Callable, Mapping
from typing import Any, NoReturn

from aenv.deploy import documents
from aenv.deploy.documents import shown
from aenv.errors import Invalid

_ALPHANUMERIC = string.ascii_letters + string.digits


def true(value: Any) -> bool:
    """What ``if`` takes for true: whatever is not empty."""
    return bool(value) if not callable(value) else True


def _equal(value: Any, *others: Any) -> bool:
    for other in others:
        if None not in (value, other) and _kind(value) != _kind(other):
            raise Invalid(
                f"{value!r} and {other!r} are of different kinds and cannot be compared",
                hint="numbers of values.yaml are compared as (int .Values.x)",
            )
    return value in others


def _kind(value: Any) -> str:
    return type(value).__name__


def _ordered(value: Any, other: Any) -> int:
    if _kind(value) != _kind(other) or not isinstance(value, (int, float, str)):
        raise Invalid(f"{value!r} and {other!r} are of different kinds and cannot be compared")
    return int(value > other) - int(value < other)


def _default(fallback: Any, value: Any = None) -> Any:
    return value if true(value) else fallback


def _required(why: str, value: Any) -> Any:
    if value is None or value == "":
        raise Invalid(why)
    return value


def _fail(why: str) -> NoReturn:
    raise Invalid(why)


def _quote(*values: Any) -> str:
    return " ".join(json.dumps(shown(value), ensure_ascii=False) for value in values if value is not None)


def _squote(*values: Any) -> str:
    return " ".join(f"'{shown(value)}'" for value in values if value is not None)


def _indent(width: int, text: str) -> str:
    return "\n".join(" " * width + line for line in text.split("\n"))


def _to_json(value: Any) -> str:
    text = json.dumps(documents.plain(value), ensure_ascii=False, sort_keys=True, separators=(",", ":"))
    for character in "<>&\u2028\u2029":
        text = text.replace(character, f"\\u{ord(character):04x}")
    return text


def _printf(form: str, *values: Any) -> str:
    """Only ``%s``, ``%d``, ``%v``, ``%q`` and ``%%``."""
    left = list(values)
    parts = []
    pieces = iter(form.split("%"))
    parts.append(next(pieces))
    for piece in pieces:
        if not piece:  # a percent sign, written twice
            parts += ["%", next(pieces, "")]
            continue
        if piece[0] not in "sdvq" or not left:
            raise Invalid(f"printf {form!r}: '%{piece[0]}' is not to be had, or has no value")
        value = left.pop(0)
        if piece[0] == "d" and (isinstance(value, bool) or not isinstance(value, int)):
            raise Invalid(f"printf {form!r}: {value!r} is no whole number", hint="use (int .Values.x)")
        parts += [_quote(value) if piece[0] == "q" else shown(value), piece[1:]]
    return "".join(parts)


def _int(value: Any) -> int:
    try:
        return int(value or 0)
    except (TypeError, ValueError):
        return 0


def _index(value: Any, *keys: Any) -> Any:
    for key in keys:
        value = value.get(key) if isinstance(value, Mapping) else value[key]
    return value


def _dict(*parts: Any) -> dict[str, Any]:
    return dict(zip(parts[::2], parts[1::2], strict=True))


def _trunc(length: int, text: str) -> str:
    return text[:length] if length >= 0 else text[length:]


FUNCTIONS: dict[str, Callable[..., Any]] = {
    "not": lambda value: not true(value),
    "eq": _equal,
    "ne": lambda value, other: not _equal(value, other),
    "lt": lambda value, other: _ordered(value, other) < 0,
    "le": lambda value, other: _ordered(value, other) <= 0,
    "gt": lambda value, other: _ordered(value, other) > 0,
    "ge": lambda value, other: _ordered(value, other) >= 0,
    "add": lambda *values: sum(_int(value) for value in values),
    "b64dec": lambda text: base64.b64decode(text).decode(),
    "b64enc": lambda text: base64.b64encode(text.encode()).decode(),
    "contains": lambda part, text: part in text,
    "default": _default,
    "dict": _dict,
    "empty": lambda value: not true(value),
    "fail": _fail,
    "hasKey": lambda value, key: key in value,
    "indent": _indent,
    "index": _index,
    "int": _int,
    "join": lambda between, values: between.join(shown(value) for value in values),
    "len": len,
    "list": lambda *values: list(values),
    "nindent": lambda width, text: "\n" + _indent(width, text),
    "printf": _printf,
    "quote": _quote,
    "randAlphaNum": lambda length: "".join(secrets.choice(_ALPHANUMERIC) for _ in range(length)),
    "required": _required,
    "sha256sum": lambda text: hashlib.sha256(text.encode()).hexdigest(),
    "squote": _squote,
    "ternary": lambda yes, no, value: yes if value else no,
    "toJson": _to_json,
    "toString": shown,
    "toYaml": documents.dump,
    "trimSuffix": lambda end, text: text.removesuffix(end),
    "trunc": _trunc,
}
"""By name. ``and``, ``or``, ``include`` and ``lookup`` are with whoever evaluates."""
