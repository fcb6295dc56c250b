"""Arguments that are drawn by a schema: the schema allows them, and one seed draws them again."""

from __future__ import annotations

import random
from typing import Any

import pytest
from jsonschema import Draft202012Validator

from aenv.rl.exercising import Drawing

SCHEMAS: dict[str, dict[str, Any]] = {
    "nothing": {"type": "object"},
    "every type": {
        "type": "object",
        "properties": {
            "text": {"type": "string", "minLength": 12, "maxLength": 14},
            "short": {"type": "string", "maxLength": 2},
            "date": {"type": "string", "format": "date"},
            "whole": {"type": "integer", "minimum": 3, "exclusiveMaximum": 5},
            "even": {"type": "integer", "multipleOf": 2, "exclusiveMinimum": -3, "maximum": 9},
            "real": {"type": "number", "exclusiveMinimum": 0, "exclusiveMaximum": 1},
            "low": {"type": "number", "maximum": -100},
            "flag": {"type": "boolean"},
            "none": {"type": "null"},
            "either": {"type": ["integer", "null"]},
            "one": {"enum": ["a", 1, None]},
            "fixed": {"const": {"a": [1]}},
            "any": True,
        },
    },
    "nested": {
        "type": "object",
        "properties": {
            "items": {"type": "array", "minItems": 2, "maxItems": 4, "items": {"$ref": "#/$defs/Part"}},
            "few": {"type": "array", "maxItems": 1, "items": {"type": "boolean"}},
            "pair": {"type": "array", "prefixItems": [{"type": "string"}, {"type": "integer"}], "maxItems": 2},
            "set": {"type": "array", "uniqueItems": True, "items": {"enum": [1, 2]}},
            "both": {"allOf": [{"$ref": "#/$defs/Part"}, {"required": ["weight"]}]},
            "choice": {"anyOf": [{"type": "integer"}, {"$ref": "#/$defs/Part"}], "default": 1},
            "other": {"oneOf": [{"type": "string"}, {"type": "null"}]},
        },
        "required": ["items", "both"],
        "$defs": {
            "Part": {
                "type": "object",
                "properties": {"name": {"type": "string"}, "weight": {"type": "number"}},
                "required": ["name"],
                "additionalProperties": False,
            }
        },
    },
    "endless": {
        "type": "object",
        "properties": {"tree": {"$ref": "#/$defs/Tree"}},
        "required": ["tree"],
        "$defs": {
            "Tree": {
                "type": "object",
                "properties": {
                    "left": {"$ref": "#/$defs/Tree"},
                    "all": {"type": "array", "items": {"$ref": "#/$defs/Tree"}},
                },
            }
        },
    },
}


@pytest.mark.parametrize("name", SCHEMAS)
def test_the_schema_allows_what_is_drawn(name: str) -> None:
    schema = SCHEMAS[name]
    Draft202012Validator.check_schema(schema)
    checker = Draft202012Validator(schema)
    drawn = [Drawing(schema, random.Random(seed)).arguments() for seed in range(300)]
    for arguments in drawn:
        checker.validate(arguments)
    assert drawn == [Drawing(schema, random.Random(seed)).arguments() for seed in range(300)]
    seen = {key for arguments in drawn for key in arguments}
    assert seen == set(schema.get("properties", {}))


def test_enums_and_defaults_are_drawn_with_all_they_have() -> None:
    schema = {"type": "object", "properties": {"a": {"enum": [1, 2, 3]}, "b": {"type": "integer", "default": 99}}}
    drawn = [Drawing(schema, random.Random(seed)).arguments() for seed in range(100)]
    assert {arguments.get("a") for arguments in drawn} == {None, 1, 2, 3}
    assert 99 in {arguments.get("b") for arguments in drawn}
    assert len({arguments.get("b") for arguments in drawn}) > 3
