"""The schemas of an OpenAPI document as JSON Schema, each complete in itself: what it refers to comes along.

References are followed within the document and nowhere else: a document that names another host has nobody ask there.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from aenv.errors import Invalid

_LEFT_OUT = (
    "example",
    "examples",
    "xml",
    "externalDocs",
    "discriminator",
    "$id",
    "$schema",
    "$anchor",
    "$dynamicAnchor",
)
"""Of no use to who fills in arguments, or with a meaning beyond the schema."""
_MAPS = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
_LISTS = ("allOf", "anyOf", "oneOf", "prefixItems")
_ONE = (
    *("items", "additionalProperties", "not", "if", "then", "else", "contains", "propertyNames"),
    *("unevaluatedItems", "unevaluatedProperties", "contentSchema"),
)
_LONGEST_CHAIN = 32


def wrong(place: str, what: str) -> Invalid:
    return Invalid(f"{place}: {what}", hint="mend it in the document, or leave the operation out with --exclude")


class References:
    """What a document's references mean."""

    def __init__(self, document: Mapping[str, Any]) -> None:
        self._document = document

    def found(self, reference: Any, place: str) -> Any:
        """What ``#/a/b`` leads to."""
        if not isinstance(reference, str):
            raise wrong(place, f"a $ref is a text, found {reference!r}")
        if not reference.startswith("#/"):
            raise wrong(place, f"$ref {reference!r} leads out of the document, and is not followed")
        node: Any = self._document
        for part in steps(reference):
            try:
                node = node[int(part)] if isinstance(node, list) else node[part]
            except (KeyError, IndexError, ValueError, TypeError):
                raise wrong(place, f"$ref {reference!r} leads nowhere") from None
        return node

    def resolved(self, node: Any, place: str) -> dict[str, Any]:
        """An object of the document, behind any references."""
        for _ in range(_LONGEST_CHAIN):
            if not isinstance(node, dict):
                raise wrong(place, f"an object is needed, found {_shown(node)}")
            if "$ref" not in node:
                return node
            node = self.found(node["$ref"], place)
        raise wrong(place, f"$ref {node.get('$ref')!r} leads in a circle")


class Schemas:
    """Schemas of one tool, and the definitions that they share."""

    def __init__(self, references: References, old: bool) -> None:
        self._references = references
        self._old = old
        """Whether the document is of OpenAPI 3.0, whose schemas are not quite JSON Schema."""
        self.definitions: dict[str, Any] = {}
        self._names: dict[str, str] = {}

    def read(self, schema: Any, place: str) -> Any:
        """A schema as JSON Schema has it."""
        if isinstance(schema, bool):
            return schema
        if not isinstance(schema, dict):
            raise wrong(place, f"a schema is an object, found {_shown(schema)}")
        if "$ref" in schema:
            reference = {"$ref": self._definition(schema["$ref"], place)}
            beside = {} if self._old else {key: value for key, value in schema.items() if key != "$ref"}
            return {**self.read(beside, place), **reference} if beside else reference
        found = {key: value for key, value in schema.items() if key not in _LEFT_OUT and not key.startswith("x-")}
        for key, inner, at in _inner(found, place):
            found[key] = inner if not isinstance(inner, (dict, list)) else self._inside(key, inner, at)
        _without_read_only(found, schema)
        return _modern(found) if self._old else found

    def _inside(self, key: str, inner: Any, place: str) -> Any:
        if key in _MAPS:
            return {name: self.read(value, f"{place}.{name}") for name, value in inner.items()}
        if key in _LISTS:
            return [self.read(value, f"{place}[{index}]") for index, value in enumerate(inner)]
        return self.read(inner, place)

    def _definition(self, reference: Any, place: str) -> str:
        """What a reference is called among the definitions. It may be to what is being read."""
        if reference not in self._names:
            target = self._references.found(reference, place)
            name = base = steps(reference)[-1]
            number = 2
            while name in self.definitions:
                name, number = f"{base}_{number}", number + 1
            self._names[reference] = name
            self.definitions[name] = {}
            self.definitions[name] = self.read(target, reference)
        return "#/$defs/" + self._names[reference].replace("~", "~0").replace("/", "~1")


def steps(reference: str) -> list[str]:
    """The way that a local reference goes."""
    from urllib.parse import unquote

    return [unquote(part).replace("~1", "/").replace("~0", "~") for part in reference[2:].split("/")]


def _inner(schema: dict[str, Any], place: str) -> Iterator[tuple[str, Any, str]]:
    """The schemas in a schema, where they are what they must be."""
    for keys, kind, what in ((_MAPS, dict, "an object"), (_LISTS, list, "a list"), (_ONE, (dict, bool), "a schema")):
        for key in keys:
            if key in schema:
                if not isinstance(schema[key], kind):
                    raise wrong(f"{place}.{key}", f"{what} is needed, found {_shown(schema[key])}")
                yield key, schema[key], f"{place}.{key}"


def _without_read_only(found: dict[str, Any], schema: dict[str, Any]) -> None:
    """Leave out what only answers have."""
    properties = schema.get("properties", {})
    hidden = {name for name, value in properties.items() if isinstance(value, dict) and value.get("readOnly") is True}
    if hidden:
        found["properties"] = {name: value for name, value in found["properties"].items() if name not in hidden}
        if isinstance(found.get("required"), list):
            found["required"] = [name for name in found["required"] if name not in hidden]


def _modern(schema: dict[str, Any]) -> dict[str, Any]:
    """What OpenAPI 3.0 writes in a way of its own."""
    for bound, limit in (("exclusiveMinimum", "minimum"), ("exclusiveMaximum", "maximum")):
        if isinstance(schema.get(bound), bool) and schema.pop(bound) and limit in schema:
            schema[bound] = schema.pop(limit)
    if schema.pop("nullable", False) is True:
        if isinstance(schema.get("type"), str):
            schema["type"] = [schema["type"], "null"]
            if isinstance(schema.get("enum"), list) and None not in schema["enum"]:
                schema["enum"] = [*schema["enum"], None]
        elif schema:
            return {"anyOf": [schema, {"type": "null"}]}
    return schema


def _shown(value: Any) -> str:
    return "nothing" if value is None else f"{type(value).__name__} {str(value)[:60]!r}"
