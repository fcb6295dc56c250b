"""OpenAPI documents, good and bad: what becomes of an operation, and where a mistake is."""

from __future__ import annotations

import copy
import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jsonschema import Draft202012Validator

from aenv.errors import Invalid
from aenv.integrations.wrapping import documents, requests
from aenv.integrations.wrapping.operations import Filter, Operation, read, server_of
from tests.integrations.wrapping.shop import DOCUMENT

BASE = "http://shop.example:8000/v1"


def document(
    operation: dict[str, Any] | None = None, path: str = "/a", method: str = "get", **more: Any
) -> dict[str, Any]:
    return {"openapi": "3.1.0", "info": {}, "paths": {path: {method: operation or {}}}, **more}


def only(found: dict[str, Any]) -> Operation:
    (operation,) = read(found, BASE, Filter()).operations
    return operation


def parameter(**fields: Any) -> dict[str, Any]:
    return {"parameters": [{"name": "p", "in": "query", "schema": {}, **fields}]}


@pytest.mark.parametrize(
    ("fields", "value", "query"),
    [
        ({}, "a b", [("p", "a b")]),
        ({}, True, [("p", "true")]),
        ({}, 1.5, [("p", "1.5")]),
        ({}, [1, 2], [("p", "1"), ("p", "2")]),
        ({"explode": False}, [1, 2], [("p", "1,2")]),
        ({"style": "pipeDelimited", "explode": False}, ["x", "y"], [("p", "x|y")]),
        ({"style": "spaceDelimited", "explode": False}, ["x", "y"], [("p", "x y")]),
        ({"style": "deepObject", "explode": True}, {"k": 1}, [("p[k]", "1")]),
        ({}, {"k": 1, "l": "m"}, [("k", "1"), ("l", "m")]),
        ({"explode": False}, {"k": 1}, [("p", "k,1")]),
        ({"content": {"application/json": {"schema": {}}}}, {"k": [1]}, [("p", '{"k": [1]}')]),
    ],
)
def test_a_query_is_written_in_its_style(fields, value, query):
    operation = only(document(parameter(**fields)))
    assert requests.made(operation, {"p": value}).query == query


def test_each_argument_has_its_place():
    found = only(
        document(
            {
                "operationId": "Do it!",
                "parameters": [
                    {"name": "id", "in": "path", "required": True, "schema": {"type": "string"}},
                    {"name": "id", "in": "query", "schema": {"type": "integer"}},
                    {"name": "X-Trace", "in": "header", "schema": {}},
                    {"name": "Authorization", "in": "header", "schema": {}},
                    {"name": "crumb", "in": "cookie", "schema": {}},
                ],
                "requestBody": {
                    "content": {"application/json": {"schema": {"type": "object", "properties": {"x": {}}}}}
                },
            },
            path="/a/{id}",
            method="put",
        )
    )
    assert found.name == "Do_it"
    assert set(found.listed["inputSchema"]["properties"]) == {"id", "id_query", "X-Trace", "crumb", "body"}
    assert found.listed["inputSchema"]["required"] == ["id"]
    asked = requests.made(found, {"id": "a/b?", "id_query": 3, "X-Trace": "t", "crumb": "c d", "body": {"x": "ü"}})
    assert (asked.method, asked.url) == ("PUT", f"{BASE}/a/a%2Fb%3F")
    assert asked.query == [("id", "3")]
    assert (asked.headers["X-Trace"], asked.headers["Cookie"]) == ("t", "crumb=c%20d")
    assert json.loads(asked.content or b"") == {"x": "ü"}
    with pytest.raises(Invalid, match="X-Trace: a header takes"):
        requests.made(found, {"id": "a", "X-Trace": "a\r\nHost: other"})


def test_a_form_is_a_form():
    body = {"content": {"application/x-www-form-urlencoded": {"schema": {"type": "object", "properties": {"a": {}}}}}}
    found = only(document({"requestBody": {**body, "required": True}}, method="post"))
    assert requests.made(found, {"a": "b c"}).content == b"a=b+c"


def test_schemas_come_complete_and_refer_to_themselves():
    tree = {"type": "object", "properties": {"next": {"$ref": "#/components/schemas/Tree~1a"}}}
    body = {"required": True, "content": {"application/json": {"schema": {"$ref": "#/components/schemas/Tree~1a"}}}}
    found = only(document({"requestBody": body}, method="post", components={"schemas": {"Tree/a": tree}}))
    schema = found.listed["inputSchema"]
    assert schema["properties"]["next"] == {"$ref": "#/$defs/Tree~1a"}
    assert schema["$defs"]["Tree/a"]["properties"]["next"] == {"$ref": "#/$defs/Tree~1a"}


def test_what_no_tool_can_stand_for_is_left_out_with_the_reason():
    found = document(parameter(style="matrix", **{"in": "path", "name": "id"}), path="/a/{id}")
    found["paths"]["/b"] = {"get": {"servers": [{"url": "https://other.example"}]}}
    found["paths"]["/c"] = {"post": {"requestBody": {"content": {"image/png": {}}}}}
    found["paths"]["/d"] = {"get": {"security": [{"tls": []}]}}
    found["components"] = {"securitySchemes": {"tls": {"type": "mutualTLS"}}}
    result = read(found, BASE, Filter())
    assert result.operations == ()
    assert set(result.left_out) == {"GET /a/{id}", "GET /b", "POST /c", "GET /d"}


@pytest.mark.parametrize(
    ("wanted", "names"),
    [
        (Filter(), ["get_a", "post_a", "get_a_b"]),
        (Filter(read_only=True), ["get_a", "get_a_b"]),
        (Filter(include=["GET /a/*"]), ["get_a_b"]),
        (Filter(include=["*_a"], exclude=["post*"]), ["get_a"]),
    ],
)
def test_a_filter_takes_what_it_says(wanted, names):
    found = {"openapi": "3.0.1", "paths": {"/a": {"get": {}, "post": {}}, "/a/b": {"get": {}}}}
    assert [one.name for one in read(found, BASE, wanted).operations] == names


@pytest.mark.parametrize(
    ("servers", "where", "base"),
    [
        ([{"url": "/v2"}], "http://host:1/docs/openapi.json", "http://host:1/v2"),
        (
            [{"url": "https://{region}.example/", "variables": {"region": {"default": "eu"}}}],
            None,
            "https://eu.example",
        ),
        (None, "http://host:1/docs/openapi.json", "http://host:1"),
    ],
)
def test_the_service_is_where_the_document_says(servers, where, base):
    assert server_of({"servers": servers}, where) == base


DEEP: dict[str, Any] = {}
DEEP["not"] = DEEP


@pytest.mark.parametrize(
    ("found", "said"),
    [
        ({"swagger": "2.0", "paths": {}}, "Swagger 2.0"),
        ({"openapi": 3, "paths": {}}, "openapi: the version"),
        ({"openapi": "3.0.0"}, "paths: an object"),
        (document(path="a"), "paths.a: a path begins"),
        (document({"operationId": 7}), "paths./a.get.operationId: a text"),
        (document({"parameters": {}}), "paths./a.get.parameters: a list"),
        (document({"parameters": [{"name": "p"}]}), "paths./a.get.parameters[0]: a parameter has a name"),
        (document(parameter(schema=3)), "paths./a.get.parameters[0].schema: a schema is an object"),
        (document(parameter(schema={"type": "text"})), "'text' is not valid"),
        (document(parameter(schema={"properties": []})), "parameters[0].schema.properties: an object"),
        (document(parameter(schema={"$ref": "http://evil.example/x.json"})), "leads out of the document"),
        (document(parameter(schema={"$ref": "#/nowhere"})), "leads nowhere"),
        (document(parameter(schema=DEEP)), "nested too deeply"),
        (document({"$ref": "#/paths/~1a/get"}), "leads in a circle"),
        (document(path="/a/{id}"), "and no parameter of that name"),
        (document({"requestBody": {}}), "paths./a.get.requestBody.content: an object"),
        (document({"security": [{"none": []}]}), "components.securitySchemes.none: it is asked for"),
        (document({"security": {}}), "paths./a.get.security: a list"),
        (
            {"openapi": "3.1.0", "paths": {"/a": {"get": {"operationId": "x"}, "put": {"operationId": "x"}}}},
            "paths./a.put.operationId: 'x' is taken",
        ),
    ],
)
def test_a_mistake_is_told_with_its_place(found, said):
    with pytest.raises(Invalid) as raised:
        read(found, BASE, Filter())
    assert said in str(raised.value)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (b"{", "is no JSON"),
        (b"a: [", "neither JSON nor YAML"),
        (b"a: &x [*x]", "too large, or nested"),
        (b"x: &a [1,1,1,1,1,1,1,1,1,1]\n" + b"".join(
            b"%c: &%c [%s]\n" % (98 + n, 98 + n, b",".join([b"*%c" % (97 + n)] * 10)) for n in range(8)
        ), "too large"),
        (b"a: !!python/object:os.system x", "neither JSON nor YAML"),
        (b"a: !!binary aGk=", "JSON does not know"),
        (b"\xff\xfe\x00", "neither JSON nor YAML"),
    ],
    ids=range(7),
)  # fmt: skip
def test_what_is_no_document_says_so(text, said):
    with pytest.raises(Invalid) as raised:
        documents.parse(text, "shop")
    assert said in str(raised.value)


def test_yaml_is_read_as_json_has_it():
    assert documents.parse(b"when: 2026-01-02\n200: ok\n", "shop") == {"when": "2026-01-02", "200": "ok"}


places = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)


@settings(max_examples=60)
@given(st.data(), places)
def test_any_wrong_value_is_an_error_of_ours_or_none(data, value):
    found: Any = copy.deepcopy(DOCUMENT)
    node = found
    while True:
        key = data.draw(st.sampled_from(sorted(node) if isinstance(node, dict) else range(len(node))))
        if not isinstance(node[key], (dict, list)) or not node[key] or data.draw(st.booleans()):
            break
        node = node[key]
    node[key] = value
    try:
        for operation in read(found, BASE, Filter()).operations:
            json.dumps(operation.listed)
    except Invalid:
        pass


def test_what_operations_share_is_looked_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A document of a hundred kilobytes took a minute, at every start of its sandboxes."""
    looked: list[Any] = []
    monkeypatch.setattr(Draft202012Validator, "check_schema", looked.append)
    body = {"requestBody": {"content": {"application/json": {"schema": {"$ref": "#/components/schemas/big"}}}}}
    big = {"type": "object", "properties": {"name": {"type": "string"}}}
    found = document(components={"schemas": {"big": big}})
    found["paths"] = {f"/{place}": {"post": body} for place in range(20)}
    assert len(read(found, BASE, Filter()).operations) == 20
    assert len(looked) == 2


def test_a_mistake_in_a_definition_is_named_with_its_place() -> None:
    body = {"requestBody": {"content": {"application/json": {"schema": {"$ref": "#/components/schemas/odd"}}}}}
    odd = {"type": "object", "properties": {"name": {"type": "no such type"}}}
    with pytest.raises(Invalid, match=r"paths\./a\.post, at \$defs\.odd\.properties\.name\.type"):
        read(document(body, method="post", components={"schemas": {"odd": odd}}), BASE, Filter())
