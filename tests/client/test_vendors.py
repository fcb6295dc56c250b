"""Tools in the words of vendors: names that they allow, and schemas that they know."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from jsonschema import Draft202012Validator

from aenv import anthropic_tools, gemini_tools, openai_tools
from aenv.client.vendors import gemini_schema

VENDORS = [openai_tools, anthropic_tools, gemini_tools]
GEMINI = {"type", "format", "description", "nullable", "items", "enum", "properties", "required", "anyOf"} | {
    f"{end}{what}" for end in ("min", "max") for what in ("Items", "Length", "Properties", "imum")
}
GEMINI |= {"pattern"}
TYPES = {"STRING", "NUMBER", "INTEGER", "BOOLEAN", "ARRAY", "OBJECT"}
names = st.text(st.sampled_from("ab._-/1 é"), min_size=1, max_size=3) | st.text("ab", min_size=63, max_size=70)
kinds = st.sampled_from(["string", "number", "integer", "boolean", "null"])
values = st.none() | st.booleans() | st.integers(-9, 9) | st.text("ab", max_size=2)


def larger(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    properties = st.dictionaries(st.sampled_from("abc"), inner, max_size=3)
    required = st.lists(st.sampled_from("abc"), unique=True)
    several = st.lists(inner, min_size=1, max_size=3)
    return st.one_of(
        st.fixed_dictionaries({"type": st.just("object"), "properties": properties, "required": required}),
        st.fixed_dictionaries({"type": st.just("array")}, optional={"items": inner, "prefixItems": several}),
        st.fixed_dictionaries({}, optional={"anyOf": several, "description": st.text(max_size=3)}),
        st.fixed_dictionaries({"allOf": several}),
        st.fixed_dictionaries({"oneOf": several, "title": st.just("A")}),
        properties.map(lambda given: {"properties": given, "additionalProperties": False, "minProperties": 1}),
    )


schemas = st.recursive(
    st.one_of(
        st.booleans(),
        st.builds(lambda kind: {"type": kind}, kinds | st.lists(kinds, min_size=1, max_size=3, unique=True)),
        st.builds(lambda given: {"enum": given}, st.lists(values, min_size=1, max_size=3)),
        st.builds(lambda given: {"const": given}, values),
        st.just({"$ref": "#/$defs/node"}),
        st.just({"$ref": "#/$defs/nowhere"}),
        st.just({"type": "string", "format": "email", "default": "x", "minLength": 1}),
    ),
    larger,
    max_leaves=12,
)
NODE = {"type": "object", "properties": {"next": {"anyOf": [{"$ref": "#/$defs/node"}, {"type": "null"}]}}}
inputs = st.fixed_dictionaries(
    {"type": st.just("object"), "properties": st.dictionaries(st.sampled_from("abc"), schemas, max_size=3)},
    optional={"required": st.lists(st.sampled_from("abcd"), unique=True), "anyOf": st.lists(schemas, min_size=1)},
).map(lambda schema: {**schema, "$defs": {"node": NODE}})


def tool(name: str = "press", **schema: Any) -> dict[str, Any]:
    return {"name": name, "description": "Press.", "inputSchema": {"type": "object", **schema}}


def is_geminis(schema: dict[str, Any]) -> bool:
    """Whether it says nothing that Gemini does not know, and all that it asks for."""
    assert set(schema) <= GEMINI
    if "anyOf" in schema:
        assert set(schema) <= {"anyOf", "description", "nullable"}
        return all(is_geminis(way) for way in schema["anyOf"])
    assert schema["type"] in TYPES
    assert all(isinstance(value, str) for value in schema.get("enum", ()))
    assert set(schema.get("required", ())) <= set(schema.get("properties", ()))
    inner = [*schema.get("properties", {}).values(), *([schema["items"]] if schema["type"] == "ARRAY" else [])]
    return all(is_geminis(one) for one in inner)


@given(st.lists(names, unique=True, max_size=6))
@pytest.mark.parametrize("vendor", VENDORS)
def test_names_fit_differ_and_map_back(vendor: Any, named: list[str]) -> None:
    found, meant = vendor([tool(name) for name in named])
    given_names = [one.get("function", one)["name"] for one in found]
    assert [meant[name] for name in given_names] == named
    pattern = r"[A-Za-z_][A-Za-z0-9_-]{0,63}" if vendor is gemini_tools else r"[A-Za-z0-9_-]{1,64}"
    assert all(re.fullmatch(pattern, name) for name in given_names)
    assert all(meant[name] == name for name in named if re.fullmatch(pattern, name))


@given(inputs)
def test_schemas_in_geminis_words(schema: dict[str, Any]) -> None:
    ((declared,), _) = gemini_tools([tool(**schema)])
    parameters = declared.get("parameters", {"type": "OBJECT", "properties": {}})
    assert is_geminis(parameters)
    assert set(parameters["properties"]) == {name for name, of in schema["properties"].items() if of is not False}


@given(inputs)
@pytest.mark.parametrize("vendor", [openai_tools, anthropic_tools])
def test_parameters_are_an_object_and_no_choice_of_several(vendor: Any, schema: dict[str, Any]) -> None:
    ((made,), _) = vendor([tool(**schema)])
    found = made["function"]["parameters"] if vendor is openai_tools else made["input_schema"]
    assert (found["type"], found["properties"]) == ("object", schema["properties"])
    assert "anyOf" not in found
    Draft202012Validator.check_schema(found)


def test_what_each_vendor_gets() -> None:
    pressed = tool("key/press", properties={"key": {"type": "integer", "minimum": 0}}, required=["key"])
    parameters = pressed["inputSchema"]
    named = {"name": "key_press", "description": "Press."}
    meant = {"key_press": "key/press"}
    assert openai_tools([pressed]) == ([{"type": "function", "function": {**named, "parameters": parameters}}], meant)
    assert anthropic_tools([pressed]) == ([{**named, "input_schema": parameters}], meant)
    key = {"type": "INTEGER", "minimum": 0}
    told = {**named, "parameters": {"type": "OBJECT", "properties": {"key": key}, "required": ["key"]}}
    assert gemini_tools([pressed]) == ([told], meant)
    assert gemini_tools([tool()])[0] == [{"name": "press", "description": "Press."}]


@pytest.mark.parametrize(
    ("schema", "found"),
    [
        ({"type": ["string", "null"], "maxLength": 3}, {"type": "STRING", "maxLength": 3, "nullable": True}),
        ({"anyOf": [{"type": "integer"}, {"type": "null"}], "default": None}, {"type": "INTEGER", "nullable": True}),
        (
            {"oneOf": [{"type": "integer"}, {"type": "string"}], "description": "Which."},
            {"anyOf": [{"type": "INTEGER"}, {"type": "STRING"}], "description": "Which."},
        ),
        ({"enum": ["a", "b", None]}, {"type": "STRING", "enum": ["a", "b"], "nullable": True}),
        ({"const": "a"}, {"type": "STRING", "enum": ["a"]}),
        ({"enum": [1, 2], "description": "How many."}, {"type": "INTEGER", "description": "How many. One of 1, 2."}),
        ({}, {"type": "STRING"}),
        (True, {"type": "STRING"}),
        ({"type": "array"}, {"type": "ARRAY", "items": {"type": "STRING"}}),
        (
            {"type": "array", "prefixItems": [{"type": "integer"}, {"type": "string"}], "maxItems": 2},
            {"type": "ARRAY", "items": {"anyOf": [{"type": "INTEGER"}, {"type": "STRING"}]}, "maxItems": 2},
        ),
        (
            {"allOf": [{"properties": {"a": {"type": "integer"}}, "required": ["a"]}, {"required": ["b"]}]},
            {"type": "OBJECT", "properties": {"a": {"type": "INTEGER"}}, "required": ["a"]},
        ),
        ({"type": "string", "format": "email"}, {"type": "STRING"}),
        ({"type": "string", "format": "date-time"}, {"type": "STRING", "format": "date-time"}),
        ({"type": "object", "additionalProperties": {"type": "integer"}}, {"type": "OBJECT", "properties": {}}),
    ],
)
def test_what_gemini_has_no_words_for(schema: Any, found: dict[str, Any]) -> None:
    assert gemini_schema({"properties": {"it": schema}})["properties"]["it"] == found


def test_a_reference_is_written_out_as_far_as_it_goes() -> None:
    found = gemini_schema({"properties": {"a": {"$ref": "#/$defs/a~1b"}}, "$defs": {"a/b": {"type": "number"}}})
    assert found["properties"]["a"] == {"type": "NUMBER"}
    inner = gemini_schema({"properties": {"it": {"$ref": "#/$defs/node"}}, "$defs": {"node": NODE}})
    for name in ("it", "next", "next", "next", "next", "next"):
        inner = inner["properties"][name]
        assert inner["type"] == "OBJECT"
    assert inner["properties"]["next"] == {"type": "OBJECT", "properties": {}, "nullable": True}


def test_a_schema_that_leads_back_to_itself_many_times_has_a_bound() -> None:
    """Written out as far as it goes, it would be eight million."""
    found = gemini_schema({"properties": {f"p{place}": {"$ref": "#"} for place in range(14)}})
    assert len(json.dumps(found)) < 1_000_000
    assert set(found["properties"]["p13"]) == {"type", "properties"}
