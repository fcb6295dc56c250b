"""Tools as the APIs of models take them. Each function takes a ``tools/list``, and gives the tools in one vendor's form
and which tool each name there means: vendors allow fewer names than MCP does."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from hashlib import sha256
from typing import Any

_ALLOWED = re.compile(r"[A-Za-z0-9_-]{1,64}")
_BEGINS = re.compile(r"[A-Za-z_]")
"""A name of Gemini's."""
_NOT_ON_TOP = ("allOf", "anyOf", "oneOf", "not", "enum", "const", "if", "then", "else")
"""What neither OpenAI nor Anthropic takes beside the parameters themselves."""


def openai_tools(tools: Sequence[Mapping[str, Any]]) -> tuple[list[dict[str, Any]], dict[str, str]]:
    """The tools of a ``tools/list`` for ``tools`` of OpenAI's chat completions, and which tool each name means."""
    names = vendor_names(tools, _ALLOWED.fullmatch)
    found = [
        {"type": "function", "function": {**_told(name, tool), "parameters": _parameters(tool)}}
        for name, tool in zip(names, tools, strict=True)
    ]
    return found, _meant(names, tools)


def anthropic_tools(tools: Sequence[Mapping[str, Any]]) -> tuple[list[dict[str, Any]], dict[str, str]]:
    """The tools of a ``tools/list`` for ``tools`` of Anthropic's messages, and which tool each name means."""
    names = vendor_names(tools, _ALLOWED.fullmatch)
    found = [{**_told(name, tool), "input_schema": _parameters(tool)} for name, tool in zip(names, tools, strict=True)]
    return found, _meant(names, tools)


def gemini_tools(tools: Sequence[Mapping[str, Any]]) -> tuple[list[dict[str, Any]], dict[str, str]]:
    """The tools of a ``tools/list`` for ``function_declarations`` of Gemini's, and which tool each name means.

    Its schemas know less than JSON Schema: what can be said otherwise is, and the rest is left out, so a model may be
    offered more than a tool takes.
    """
    names = vendor_names(tools, lambda name: _ALLOWED.fullmatch(name) and _BEGINS.match(name))
    found = []
    for name, tool in zip(names, tools, strict=True):
        parameters = gemini_schema(_parameters(tool))
        found.append(_told(name, tool) | ({"parameters": parameters} if parameters["properties"] else {}))
    return found, _meant(names, tools)


def vendor_names(tools: Sequence[Mapping[str, Any]], fits: Callable[[str], object]) -> list[str]:
    """What each tool is called: as it is, where that fits."""
    taken = {tool["name"] for tool in tools if fits(tool["name"])}
    names = []
    for tool in tools:
        name = tool["name"]
        if not fits(name):
            name = re.sub(r"[^A-Za-z0-9_-]", "_", name)[:64]
            name = name if fits(name) else f"_{name}"[:64]
            if name in taken or len(tool["name"]) > 64:
                name = f"{name[:55]}_{sha256(tool['name'].encode()).hexdigest()[:8]}"
        taken.add(name)
        names.append(name)
    return names


def _meant(names: Sequence[str], tools: Sequence[Mapping[str, Any]]) -> dict[str, str]:
    return {name: tool["name"] for name, tool in zip(names, tools, strict=True)}


def _told(name: str, tool: Mapping[str, Any]) -> dict[str, Any]:
    return {"name": name, "description": tool.get("description") or ""}


def _parameters(tool: Mapping[str, Any]) -> dict[str, Any]:
    said = {key: value for key, value in tool["inputSchema"].items() if key not in _NOT_ON_TOP}
    return {**said, "type": "object", "properties": said.get("properties", {})}


# Gemini's schemas

_KEPT = (
    *("description", "minItems", "maxItems", "minLength", "maxLength", "pattern", "minimum", "maximum"),
    *("minProperties", "maxProperties"),
)
_FORMATS = ("date-time", "float", "double", "int32", "int64")
_TYPES = ("string", "number", "integer", "boolean", "array", "object")
_BY_KEYWORD = {"properties": "object", "required": "object", "items": "array", "prefixItems": "array"}
_BY_VALUE = ((bool, "boolean"), (int, "integer"), (float, "number"), (list, "array"), (dict, "object"))
_DEEPEST = 6
"""How many references inside each other are written out: more is one that leads back to itself."""
_MOST = 1000
"""How many are written out of one schema: those that lead back several ways each would be millions."""


class _Whole:
    """A schema, in which references are looked up."""

    def __init__(self, schema: Mapping[str, Any]) -> None:
        self._schema = schema
        self._left = _MOST

    def named(self, reference: Any, depth: int) -> Any:
        """What a reference names, a place in the schema; any object where there are too many."""
        self._left -= 1
        if depth > _DEEPEST or self._left < 0:
            return {"type": "object"}
        found: Any = self._schema
        for part in str(reference).removeprefix("#").split("/")[1:]:
            found = found.get(part.replace("~1", "/").replace("~0", "~")) if isinstance(found, Mapping) else None
        return found


def gemini_schema(schema: Mapping[str, Any]) -> dict[str, Any]:
    """A JSON Schema in Gemini's words. What may be anything is a text, which it may be, too."""
    return _gemini(schema, _Whole(schema), 0)


def _gemini(schema: Any, root: _Whole, depth: int) -> dict[str, Any]:
    known, depth = _flat(schema, root, depth)
    choice = next((key for key in ("anyOf", "oneOf") if known.get(key)), None)
    if choice is not None:
        ways = [_flat(way, root, depth) for way in known.pop(choice)]
    elif isinstance(known.get("type"), list):
        ways = [({"type": kind}, depth) for kind in known.pop("type")]
    else:
        return _typed(known, root, depth)
    some = [(way, down) for way, down in ways if way.get("type") != "null"]
    found: dict[str, Any] = {"nullable": True} if len(some) < len(ways) else {}
    if len(some) <= 1:
        way, down = some[0] if some else ({}, depth)
        return _gemini(_both(known, way), root, down) | found
    if "description" in known:
        found["description"] = known.pop("description")
    return found | {"anyOf": [_gemini(_both(known, way), root, down) for way, down in some]}


def _typed(known: Mapping[str, Any], root: _Whole, depth: int) -> dict[str, Any]:
    """One that is of one type."""
    values = known["enum"] if "enum" in known else [known["const"]] if "const" in known else []
    kind = known.get("type") or next((kind for key, kind in _BY_KEYWORD.items() if key in known), "")
    kind = kind or next((kind for of, kind in _BY_VALUE if values and isinstance(values[0], of)), "string")
    if kind not in _TYPES:  # null
        return {"type": "STRING", "nullable": True}
    found = {key: known[key] for key in _KEPT if key in known} | {"type": kind.upper()}
    if known.get("format") in _FORMATS:
        found["format"] = known["format"]
    if values and kind == "string":
        found["enum"] = [value for value in values if isinstance(value, str)]
        if None in values:
            found["nullable"] = True
    elif values:  # it has none but of texts
        listed = f"One of {', '.join(json.dumps(value) for value in values)}."
        found["description"] = f"{found.get('description', '')} {listed}".strip()
    if kind == "array":
        several = known.get("prefixItems")
        items = {"anyOf": several} if several else known.get("items", {})
        found["items"] = _gemini(items, root, depth)
    if kind == "object":
        there = {name: of for name, of in known.get("properties", {}).items() if of is not False}
        found["properties"] = {name: _gemini(of, root, depth) for name, of in there.items()}
        if required := [name for name in known.get("required", ()) if name in there]:
            found["required"] = required
    return found


def _flat(schema: Any, root: _Whole, depth: int) -> tuple[dict[str, Any], int]:
    """A schema without references and ``allOf``, and how many references it took."""
    if not isinstance(schema, Mapping):  # true and false are schemas, too
        return {}, depth
    known = {key: value for key, value in schema.items() if key not in ("$ref", "allOf")}
    parts = list(schema.get("allOf", ()))
    if "$ref" in schema:
        depth += 1
        parts.append(root.named(schema["$ref"], depth))
    for part in parts:
        inner, depth = _flat(part, root, depth)
        known = _both(inner, known)
    return known, depth


def _both(first: Mapping[str, Any], second: Mapping[str, Any]) -> dict[str, Any]:
    """What holds where both do. Where both say the same thing, the second counts."""
    found = {**first, **second}
    if "properties" in first and "properties" in second:
        found["properties"] = {**first["properties"], **second["properties"]}
    if "required" in first and "required" in second:
        found["required"] = list(dict.fromkeys([*first["required"], *second["required"]]))
    return found
