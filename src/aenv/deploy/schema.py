"""Whether values are such as the chart's ``values.schema.json`` describes, with what was probably meant.

Of JSON Schema it knows what that file uses: types, properties, items, bounds, patterns, choices and ``$defs``.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from typing import Any

from aenv.errors import Invalid, did_you_mean

_KNOWN = {
    "$defs",
    "$ref",
    "$schema",
    "additionalProperties",
    "anyOf",
    "description",
    "enum",
    "items",
    "maximum",
    "minLength",
    "minimum",
    "pattern",
    "properties",
    "propertyNames",
    "required",
    "title",
    "type",
}
_TYPES: dict[str, tuple[type, ...]] = {
    "object": (dict,),
    "array": (list,),
    "string": (str,),
    "boolean": (bool,),
    "null": (type(None),),
}


def check(values: Any, schema: Mapping[str, Any]) -> None:
    """Raise the first thing that is wrong with ``values``."""
    for message, hint in _wrong(values, schema, schema, "values"):
        raise Invalid(message, hint=hint)


def _wrong(value: Any, schema: Mapping[str, Any], root: Mapping[str, Any], where: str) -> Iterator[tuple[str, str]]:
    if strange := set(schema) - _KNOWN:
        raise Invalid(f"the schema of {where} uses {', '.join(sorted(strange))}, which is not known here")
    if "$ref" in schema:
        yield from _wrong(value, root["$defs"][schema["$ref"].rpartition("/")[2]], root, where)
        return
    if "anyOf" in schema:
        found = [list(_wrong(value, choice, root, where)) for choice in schema["anyOf"]]
        if all(found):
            yield found[0][0]
        return
    about = schema.get("description", "")
    types = schema.get("type", [])
    types = [types] if isinstance(types, str) else types
    if types and not any(_is(value, name) for name in types):
        yield f"{where} is {_named(value)}, and must be {' or '.join(types)}", about
        return
    if "enum" in schema and value not in schema["enum"]:
        yield f"{where} is {value!r}", f"use one of {', '.join(map(repr, schema['enum']))}"
    if isinstance(value, str):
        if len(value) < schema.get("minLength", 0):
            yield f"{where} is too short", about
        if "pattern" in schema and not re.search(schema["pattern"], value):
            yield f"{where} is {value!r}, which does not fit {schema['pattern']}", about
    elif isinstance(value, (int, float)) and not isinstance(value, bool):
        if not schema.get("minimum", -math.inf) <= value <= schema.get("maximum", math.inf):
            yield f"{where} is {value:g}, which is too small or too large", about
    elif isinstance(value, list):
        for index, item in enumerate(value):
            yield from _wrong(item, schema.get("items", {}), root, f"{where}[{index}]")
    elif isinstance(value, dict):
        yield from _wrong_object(value, schema, root, where)


def _wrong_object(
    value: dict[str, Any], schema: Mapping[str, Any], root: Mapping[str, Any], where: str
) -> Iterator[tuple[str, str]]:
    properties = schema.get("properties", {})
    more = schema.get("additionalProperties", True)
    for name in schema.get("required", ()):
        if name not in value:
            yield f"{where}.{name} is missing", properties.get(name, {}).get("description", "")
    for name, found in value.items():
        yield from _wrong(name, schema.get("propertyNames", {}), root, f"a name in {where}")
        if name in properties:
            yield from _wrong(found, properties[name], root, f"{where}.{name}")
        elif more is False:
            yield f"there is no value {where}.{name}", did_you_mean(name, properties)
        elif isinstance(more, Mapping):
            yield from _wrong(found, more, root, f"{where}.{name}")


def _is(value: Any, name: str) -> bool:
    if name in ("integer", "number"):
        number = isinstance(value, (int, float)) and not isinstance(value, bool)
        return number and (name == "number" or value == int(value))
    return isinstance(value, _TYPES[name])


def _named(value: Any) -> str:
    names = {dict: "an object", list: "a list", type(None): "nothing"}
    return names.get(type(value), repr(value))
