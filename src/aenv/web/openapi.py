"""The description of a service, made from its table of routes: OpenAPI 3.1."""

from __future__ import annotations

import ast
import inspect
import re
import textwrap
from collections.abc import Iterable, Sequence
from http import HTTPStatus
from itertools import pairwise
from typing import Any, get_args

import msgspec

from aenv import __version__, errors
from aenv.web.endpoints import Endpoint, Parameter
from aenv.web.routes import Streamed

_REF = "#/components/schemas/{name}"
_TOKEN = "token"  # noqa: S105 - its name in the description
_OURS, _OF_EVERY_SERVICE = "service", ("/health", "/metrics", "/openapi.json", "/docs")
_FAILURE: dict[str, Any] = {
    "type": "object",
    "description": "A failure: what is wrong, and what to do about it.",
    "properties": {
        "success": {"const": False},
        "code": {"type": "integer", "description": "The HTTP status."},
        "message": {"type": "string"},
        "data": {"type": "null"},
        "error": {"type": "string", "description": "What kind of failure it is."},
        "hint": {"type": ["string", "null"]},
    },
    "required": ["success", "code", "message", "data", "error", "hint"],
}
STATUSES = {
    400: "not HTTP",
    401: "no token, or not a valid one",
    403: "not allowed",
    404: "there is none",
    405: "another method is served",
    409: "it conflicts with what is there",
    413: "too large",
    422: "something in the request is wrong",
    429: "too many requests",
    500: "the service failed",
    501: "not to be had here",
    502: "the sandbox failed",
    503: "ask again in a moment",
    504: "the sandbox took too long",
    507: "no room is left",
}
"""What a failure's status means."""


def describe(title: str, endpoints: Sequence[Endpoint]) -> dict[str, Any]:
    """The whole document."""
    types = [found.returns for found in endpoints if found.returns is not Streamed]
    types += [found.body for found in endpoints if found.body is not None]
    schemas, components = msgspec.json.schema_components(types, ref_template=_REF)
    by_type = {repr(kind): schema for kind, schema in zip(types, schemas, strict=True)}
    structs = _structs(types)
    for name, schema in components.items():
        if name in structs:
            _document(schema, structs[name])
    components["Failure"] = _FAILURE | {
        "properties": _FAILURE["properties"] | {"error": _FAILURE["properties"]["error"] | {"examples": _codes()}}
    }
    paths: dict[str, dict[str, Any]] = {}
    names: set[str] = set()
    for endpoint in endpoints:
        operation = _operation(endpoint, by_type)
        operation["operationId"] = _unique(endpoint.route.handler.__name__, names)
        paths.setdefault(endpoint.route.path, {})[endpoint.route.method.lower()] = operation
    failures = "; ".join(f"{status} {why}" for status, why in STATUSES.items())
    return {
        "openapi": "3.1.0",
        "info": {"title": title, "version": __version__, "description": _about_answers()},
        "paths": paths,
        "components": {
            "schemas": dict(sorted(components.items())),
            "responses": {
                "Failure": {
                    "description": f"The request failed: {failures}.",
                    "headers": {"X-Request-Id": {"schema": {"type": "string"}}},
                    "content": {"application/json": {"schema": {"$ref": _REF.format(name="Failure")}}},
                }
            },
            "securitySchemes": {_TOKEN: {"type": "http", "scheme": "bearer"}},
        },
    }


def _about_answers() -> str:
    return (
        "An answer is `{success, code, message, data}`, and where `data` is a page also `total`, `limit` and `offset`. "
        "A failure has `success: false`, the HTTP status as `code`, and says in `error` what kind it is and in `hint` "
        "what to do. Every answer has an `X-Request-Id`: the request's own when it brought one."
    )


def _codes() -> list[str]:
    """The kinds of failure, as ``errors`` names them."""
    kinds = [kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, errors.AEnvError)]
    return sorted({kind.code for kind in kinds})


def _unique(name: str, taken: set[str]) -> str:
    count, found = 1, name
    while found in taken:
        count += 1
        found = f"{name}_{count}"
    taken.add(found)
    return found


def _operation(endpoint: Endpoint, by_type: dict[str, Any]) -> dict[str, Any]:
    route = endpoint.route
    # The first sentence is the summary, the rest the description.
    summary, *more = re.split(r"(?<=\.) (?=[A-Z])", _prose(route.handler.__doc__ or ""), maxsplit=1)
    tag = _OURS if route.path in _OF_EVERY_SERVICE else endpoint.path[0] if endpoint.path else "/"
    operation: dict[str, Any] = {"tags": [tag], "summary": summary}
    if more:
        operation["description"] = more[0]
    if endpoint.parameters:
        operation["parameters"] = [_parameter(found) for found in endpoint.parameters]
    if endpoint.upload:
        operation["requestBody"] = {"required": False, "content": {"application/octet-stream": {"schema": {}}}}
    elif endpoint.body is not None:
        operation["requestBody"] = {
            "required": not endpoint.body_optional and _has_required(endpoint.body),
            "content": {"application/json": {"schema": by_type[repr(endpoint.body)]}},
        }
    operation["responses"] = {
        str(route.status): {
            "description": HTTPStatus(route.status).phrase,
            "headers": {"X-Request-Id": {"schema": {"type": "string"}}},
            "content": _content(endpoint, by_type),
        },
        "default": {"$ref": "#/components/responses/Failure"},
    }
    operation["security"] = [] if route.scope is None else [{_TOKEN: [route.scope.value]}]
    return operation


def _parameter(parameter: Parameter) -> dict[str, Any]:
    found: dict[str, Any] = {"name": parameter.key, "in": parameter.place, "required": parameter.required}
    if parameter.about:
        found["description"] = _prose(parameter.about)
    schema = msgspec.json.schema(parameter.type)
    schema.pop("description", None)
    if parameter.place == "path":
        schema |= {"minLength": 1, "pattern": r"^[^/\x00-\x1f\x7f]+$"}
    if not parameter.required and parameter.default is not None:
        schema["default"] = msgspec.to_builtins(parameter.default)
    if schema.get("type") == "integer" and parameter.place == "query":
        schema = {"minimum": -(2**63), "maximum": 2**63 - 1} | schema
    return found | {"schema": schema}


def _has_required(kind: Any) -> bool:
    fields = getattr(kind, "__struct_fields__", None)
    return fields is None or any(field.required for field in msgspec.structs.fields(kind))


def _content(endpoint: Endpoint, by_type: dict[str, Any]) -> dict[str, Any]:
    content: dict[str, Any] = {}
    if endpoint.returns is not Streamed:
        data = by_type[repr(endpoint.returns)]
        properties = {
            "success": {"const": True},
            "code": {"const": 0},
            "message": {"type": "string"},
            "data": {"type": "array", "items": data} if endpoint.paged else data,
        }
        if endpoint.paged:
            properties |= {name: {"type": "integer", "minimum": 0} for name in ("total", "limit", "offset")}
        schema = {"type": "object", "properties": properties, "required": list(properties)}
        content["application/json"] = {"schema": schema}
    if endpoint.streams:
        content[endpoint.content_type or "*/*"] = {"schema": {}}
    return content


# Descriptions of fields


def _structs(types: Iterable[Any]) -> dict[str, type]:
    """The structs that the types are made of, by name."""
    found: dict[str, type] = {}
    waiting = list(types)
    while waiting:
        kind = waiting.pop()
        waiting += get_args(kind)
        if isinstance(kind, type) and issubclass(kind, msgspec.Struct) and kind.__name__ not in found:
            found[kind.__name__] = kind
            waiting += [field.type for field in msgspec.structs.fields(kind)]
    return found


def _document(schema: dict[str, Any], struct: type) -> None:
    """Put the texts under a struct's fields into its schema."""
    if schema.get("description"):
        schema["description"] = _prose(schema["description"])
    texts = _field_texts(struct)
    for field in msgspec.structs.fields(struct):
        described = schema["properties"][field.encode_name]
        if field.name in texts:
            schema["properties"][field.encode_name] = described | {"description": _prose(texts[field.name])}


def _field_texts(struct: type) -> dict[str, str]:
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(struct)))
    except (OSError, TypeError):
        return {}
    body = tree.body[0].body if isinstance(tree.body[0], ast.ClassDef) else []
    texts = {}
    for field, text in pairwise(body):
        if not isinstance(field, ast.AnnAssign) or not isinstance(field.target, ast.Name):
            continue
        if isinstance(text, ast.Expr) and isinstance(text.value, ast.Constant) and isinstance(text.value.value, str):
            texts[field.target.id] = inspect.cleandoc(text.value.value)
    return texts


def _prose(text: str) -> str:
    """A docstring as one line of Markdown."""
    return re.sub(r"``(.+?)``", r"`\1`", " ".join(inspect.cleandoc(text).split()))
