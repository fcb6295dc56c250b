"""The description of a service: sound in itself, complete, and true of what is answered."""

from __future__ import annotations

import re
from collections.abc import Iterator
from html.parser import HTMLParser
from typing import Any

import pytest
from jsonschema import Draft202012Validator

from aenv.api.routes import routes as instance_routes
from aenv.hub.routes import routes as hub_routes
from aenv.runtime.access import Hosts
from aenv.web import openapi, pages
from aenv.web.accounts import routes as account_routes
from aenv.web.app import App
from aenv.web.endpoints import Endpoint
from aenv.web.routes import Route
from tests.runtime.wire import send
from tests.web.shop import Server, Shop

SCHEMA_OR_REF = {"type": ["object", "boolean"]}
RESPONSE = {
    "type": "object",
    "properties": {
        "$ref": {"type": "string"},
        "description": {"type": "string"},
        "content": {
            "type": "object",
            "additionalProperties": {"type": "object", "required": ["schema"], "properties": {"schema": SCHEMA_OR_REF}},
        },
    },
    "anyOf": [{"required": ["$ref"]}, {"required": ["description"]}],
}
OPERATION = {
    "type": "object",
    "required": ["operationId", "summary", "responses", "security", "tags"],
    "properties": {
        "operationId": {"type": "string", "pattern": "^[A-Za-z_0-9]+$"},
        "summary": {"type": "string", "minLength": 1},
        "description": {"type": "string", "minLength": 1},
        "parameters": {
            "type": "array",
            "items": {
                "type": "object",
                "required": ["name", "in", "required", "schema"],
                "properties": {
                    "name": {"type": "string"},
                    "in": {"enum": ["path", "query", "header"]},
                    "required": {"type": "boolean"},
                    "description": {"type": "string"},
                    "schema": SCHEMA_OR_REF,
                },
                "if": {"properties": {"in": {"const": "path"}}},
                "then": {"properties": {"required": {"const": True}}},
                "additionalProperties": False,
            },
        },
        "requestBody": {
            "type": "object",
            "required": ["content", "required"],
            "properties": {"content": {"type": "object", "minProperties": 1}, "required": {"type": "boolean"}},
        },
        "responses": {
            "type": "object",
            "required": ["default"],
            "minProperties": 2,
            "patternProperties": {"^(default|[1-5][0-9][0-9])$": RESPONSE},
            "additionalProperties": False,
        },
        "security": {"type": "array", "items": {"type": "object"}},
        "tags": {"type": "array", "items": {"type": "string"}},
    },
    "additionalProperties": False,
}
DOCUMENT = {
    "type": "object",
    "required": ["openapi", "info", "paths", "components"],
    "properties": {
        "openapi": {"const": "3.1.0"},
        "info": {"type": "object", "required": ["title", "version"]},
        "paths": {
            "type": "object",
            "propertyNames": {"pattern": "^/"},
            "additionalProperties": {
                "type": "object",
                "patternProperties": {"^(get|put|post|delete|patch)$": OPERATION},
                "additionalProperties": False,
            },
        },
        "components": {
            "type": "object",
            "properties": {
                "schemas": {"type": "object", "propertyNames": {"pattern": r"^[a-zA-Z0-9._-]+$"}},
                "responses": {"type": "object", "additionalProperties": RESPONSE},
            },
        },
    },
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def document(shared: Server) -> Any:
    reply = send(shared.port, "GET", "/openapi.json")
    assert reply.headers["content-type"] == "application/json"
    return reply.json


def operations(document: Any) -> Iterator[tuple[str, str, Any]]:
    for path, methods in document["paths"].items():
        for method, operation in methods.items():
            yield method.upper(), path, operation


def schemas(found: Any) -> Iterator[Any]:
    """Every schema of the document."""
    yield from found["components"]["schemas"].values()
    contents = [found["components"]["responses"]]
    for _, _, operation in operations(found):
        yield from (parameter["schema"] for parameter in operation.get("parameters", ()))
        contents += [operation["responses"], {"body": operation.get("requestBody", {})}]
    for content in contents:
        for response in content.values():
            yield from (media["schema"] for media in response.get("content", {}).values())


def refs(found: Any) -> Iterator[str]:
    if isinstance(found, dict):
        if isinstance(found.get("$ref"), str):
            yield found["$ref"]
        for inner in found.values():
            yield from refs(inner)
    elif isinstance(found, list):
        for inner in found:
            yield from refs(inner)


def resolve(document: Any, ref: str) -> Any:
    assert ref.startswith("#/")
    for part in ref[2:].split("/"):
        document = document[part]
    return document


def check(document: Any) -> None:
    """That a document is sound in itself."""
    Draft202012Validator(DOCUMENT).validate(document)
    for schema in schemas(document):
        Draft202012Validator.check_schema(schema)
    for ref in refs(document):
        assert resolve(document, ref)
    ids = [operation["operationId"] for _, _, operation in operations(document)]
    assert len({*ids}) == len(ids)
    for _, path, operation in operations(document):
        named = {found["name"] for found in operation.get("parameters", ()) if found["in"] == "path"}
        assert named == {*re.findall(r"{(\w+)}", path)}


def test_it_is_sound(document: Any) -> None:
    check(document)


def test_the_platforms_own_are_sound() -> None:
    nothing: Any = None
    own = [*hub_routes(nothing), *instance_routes(nothing), *account_routes(nothing, nothing, nothing)]
    app = App(own, title="Platform", authenticate=Shop().authenticate, guard=Hosts(loopback=True))
    found = openapi.describe("Platform", app.table.endpoints)
    check(found)
    page = _Tags()
    page.feed(pages.page(found))
    assert all(link == "openapi.json" or link[1:] in page.ids for link in page.links)
    assert page.open == []


def test_it_has_every_route(document: Any, shared: Server) -> None:
    described = {(method, path) for method, path, _ in operations(document)}
    routes: list[Route] = [endpoint.route for endpoint in shared.app.table.endpoints]
    assert described == {(route.method, route.path) for route in routes}
    assert {route.path for route in routes} >= {"/health", "/metrics", "/openapi.json", "/docs"}
    for route in routes:
        operation = document["paths"][route.path][route.method.lower()]
        assert str(route.status) in operation["responses"]
        assert operation["security"] == ([] if route.scope is None else [{"token": [route.scope.value]}])
        assert operation["responses"]["default"] == {"$ref": "#/components/responses/Failure"}
    for status in (400, 401, 403, 404, 405, 409, 413, 422, 429, 500, 501, 502, 503, 504):
        assert str(status) in document["components"]["responses"]["Failure"]["description"]


def test_parameters_and_bodies_are_described(document: Any) -> None:
    listed = document["paths"]["/item/"]["get"]
    assert (listed["summary"], listed["description"]) == ("List items.", "The ones of `kind`, with each tag.")
    found = {parameter["name"]: parameter for parameter in listed["parameters"]}
    assert found["limit"]["schema"] == {"type": "integer", "minimum": 1, "maximum": 1000, "default": 100}
    assert found["kind"]["schema"] == {"enum": ["new", "old"]}
    assert found["tag"]["schema"] == {"type": "array", "items": {"type": "string"}}
    made = document["paths"]["/item/"]["post"]
    assert [(p["name"], p["in"], p["description"]) for p in made["parameters"]] == [
        ("dryRun", "query", "Change `nothing`."),
        ("Idempotency-Key", "header", "To ask twice."),
    ]
    assert made["requestBody"]["required"] is True
    item = document["components"]["schemas"]["Item"]
    assert item["description"] == "Something that is sold."
    assert item["properties"]["name"]["description"] == "What `people` call it."
    assert item["required"] == ["name"]
    assert document["paths"]["/item/{name}/note"]["put"]["requestBody"]["required"] is False
    assert list(document["paths"]["/item/{name}/picture"]["put"]["requestBody"]["content"]) == [
        "application/octet-stream"
    ]
    assert [*document["paths"]["/item/{name}/picture"]["get"]["responses"]["200"]["content"]] == ["image/x-fake"]
    assert [*document["paths"]["/follow"]["get"]["responses"]["200"]["content"]] == ["application/json", "*/*"]


@pytest.mark.parametrize(
    ("method", "path", "template", "body"),
    [
        ("GET", "/item?limit=2", "/item/", None),
        ("POST", "/item", "/item/", {"name": "a"}),
        ("POST", "/item", "/item/", {}),
        ("GET", "/item/newest", "/item/newest", None),
        ("GET", "/item/a", "/item/{name}", None),
        ("DELETE", "/item/a", "/item/{name}", None),
        ("PUT", "/item/a/note", "/item/{name}/note", None),
        ("POST", "/fail/bug", "/fail/{how}", None),
        ("POST", "/fail/conflict", "/fail/{how}", None),
        ("GET", "/health", "/health", None),
    ],
)
def test_answers_are_as_described(
    document: Any, shared: Server, method: str, path: str, template: str, body: Any
) -> None:
    reply = send(shared.port, method, path, body, {"Authorization": "Bearer t-push"})
    responses = document["paths"][template][method.lower()]["responses"]
    response = responses.get(str(reply.status), responses["default"])
    if "$ref" in response:
        response = resolve(document, response["$ref"])
    schema = response["content"][reply.headers["content-type"]]["schema"]
    Draft202012Validator({**schema, "components": document["components"]}).validate(reply.json)


class _Tags(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.tags: set[str] = set()
        self.links: list[str] = []
        self.ids: set[str] = set()
        self.open: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        found = dict(attrs)
        self.links += [value or "" for name, value in attrs if name in ("href", "src")]
        if "id" in found:
            self.ids.add(found["id"] or "")
        if tag != "meta":
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def test_the_page_needs_nothing_else(shared: Server) -> None:
    reply = send(shared.port, "GET", "/docs")
    assert reply.headers["content-type"] == "text/html; charset=utf-8"
    assert reply.headers["content-security-policy"].startswith("default-src 'none'")
    text = reply.body.decode()
    page = _Tags()
    page.feed(text)
    assert page.open == []
    assert not page.tags & {"script", "img", "link", "iframe", "form"}
    assert all(link == "openapi.json" or link[1:] in page.ids for link in page.links)
    assert "http://" not in text
    assert "https://" not in text
    for endpoint in shared.app.table.endpoints:
        assert f"</span>{endpoint.route.path}<" in text
    assert "<code>Idempotency-Key</code>" in text
    assert "What <code>people</code> call it." in text


def test_handlers_of_one_name_have_ids_of_their_own() -> None:
    routes = [Route("GET", "/a", Shop().newest), Route("GET", "/b", Shop().newest)]
    found = openapi.describe("Two", [Endpoint(route) for route in routes])
    assert [operation["operationId"] for _, _, operation in operations(found)] == ["newest", "newest_2"]
