"""Types that need no pydantic, the import of which would be half of a sandbox's start: text, numbers, lists, dicts.

Arguments that are of exactly such types are read here. All others are for pydantic to convert, or to refuse.
"""

from __future__ import annotations

import math
import types
import typing
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
from msgspec import UNSET, UnsetType

from aenv.runtime.signatures import MISSING, Parameter, Signature

_KINDS = ((str, "string"), (int, "integer"), (float, "number"), (bool, "boolean"))
_DEFAULTS = (str, int, float, bool, type(None))
_UNREADABLE = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)


def schema(hint: Any) -> dict[str, Any] | None:
    """The JSON Schema of a type, as pydantic writes it; None for a type that is not plain."""
    if hint is Any:
        return {}
    if kind := next((name for kind, name in _KINDS if hint is kind), None):
        return {"type": kind}
    if hint is list:
        return {"items": {}, "type": "array"}
    if hint is dict:
        return {"additionalProperties": True, "type": "object"}
    origin, parts = typing.get_origin(hint), typing.get_args(hint)
    if origin is list and parts:
        inner = schema(parts[0])
        return None if inner is None else {"items": inner, "type": "array"}
    if origin is dict and parts[:1] == (str,):
        inner = schema(parts[1])
        return None if inner is None else {"additionalProperties": inner or True, "type": "object"}
    if origin in (typing.Union, types.UnionType) and len(parts) == 2 and parts[1] is type(None):
        inner = schema(parts[0])
        return {"anyOf": [inner, {"type": "null"}]} if inner else None
    return None


def arguments(signature: Signature) -> dict[str, Any] | None:
    """The JSON Schema of a function's arguments, as pydantic writes it; None when not all of them are plain."""
    if signature.is_open:
        return None
    properties: dict[str, Any] = {}
    required = []
    for parameter in signature.parameters:
        found = schema(parameter.hint)
        if found is None or parameter.name.startswith("_"):
            return None
        if parameter.description:
            found = dict(sorted({**found, "description": parameter.description}.items()))
        if parameter.default is MISSING:
            required.append(parameter.name)
        elif not _is_plain(parameter.default):
            return None
        else:
            found["default"] = parameter.default
        properties[parameter.name] = found
    more = {"required": required} if required else {}
    return {"additionalProperties": False, "properties": properties, **more, "type": "object"}


def _is_plain(default: Any) -> bool:
    """Whether JSON has the value as it is."""
    if type(default) is str:
        return default == default.encode(errors="replace").decode()  # and has no half of a surrogate pair
    return type(default) in _DEFAULTS and is_finite(default)


def reader(parameters: Sequence[Parameter]) -> Callable[[bytes], dict[str, Any] | None]:
    """What reads such arguments from JSON; it returns None when they are not exactly what is declared."""
    fields: list[Any] = []
    for name, hint, default, _ in parameters:
        fields.append((name, hint) if default is MISSING else (name, typing.Union[hint, UnsetType], UNSET))  # noqa: UP007
    shape = msgspec.defstruct("Arguments", fields, kw_only=True, forbid_unknown_fields=True)
    decode, as_dict = msgspec.json.Decoder(shape).decode, msgspec.structs.asdict
    has_defaults = any(len(field) > 2 for field in fields)

    def read(given: bytes) -> dict[str, Any] | None:
        try:
            found = as_dict(decode(given))
        except _UNREADABLE:
            return None
        return {name: value for name, value in found.items() if value is not UNSET} if has_defaults else found

    return read


def is_finite(value: Any) -> bool:
    """Whether JSON has a form for every number in a value made of plain types."""
    if isinstance(value, float):
        return math.isfinite(value)
    if isinstance(value, dict):
        return all(map(is_finite, value.values()))
    return not isinstance(value, (list, tuple, set, frozenset)) or all(map(is_finite, value))
