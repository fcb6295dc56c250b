"""From a tool's arguments to the request that its operation stands for. Pure."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple
from urllib.parse import quote, urlencode

from aenv.errors import Invalid
from aenv.integrations.wrapping.operations import FORM, Operation, Parameter

_BETWEEN = {"spaceDelimited": " ", "pipeDelimited": "|"}


class Asked(NamedTuple):
    """A request, before it is sent."""

    method: str
    url: str
    headers: dict[str, str]
    query: list[tuple[str, str]]
    content: bytes | None


def made(operation: Operation, given: Mapping[str, Any]) -> Asked:
    """The request for arguments that fit the operation's schema."""
    path = operation.path
    asked = Asked(operation.method.upper(), "", {"Accept": "application/json, */*;q=0.5"}, [], None)
    for parameter in operation.parameters:
        if parameter.argument not in given:
            continue
        value = given[parameter.argument]
        if parameter.place == "path":
            path = path.replace(f"{{{parameter.name}}}", _segment(parameter, value))
        elif parameter.place == "query":
            asked.query.extend(_pairs(parameter, value))
        elif parameter.place == "header":
            asked.headers[parameter.name] = _line(parameter, value)
        else:
            add_cookie(asked, parameter.name, _line(parameter, value))
    return asked._replace(url=operation.base + path, content=_content(operation, given, asked.headers))


def add_cookie(asked: Asked, name: str, value: str) -> None:
    before = asked.headers.get("Cookie")
    cookie = f"{name}={quote(value, safe='')}"
    asked.headers["Cookie"] = f"{before}; {cookie}" if before else cookie


def _segment(parameter: Parameter, value: Any) -> str:
    text = _joined(parameter, value)
    if text in ("", ".", ".."):
        raise Invalid(f"{parameter.argument}: {text!r} cannot stand in a path")
    return quote(text, safe="")


def _line(parameter: Parameter, value: Any) -> str:
    text = _joined(parameter, value)
    if not text.isascii() or not text.isprintable():
        raise Invalid(f"{parameter.argument}: a {parameter.place} takes printable ASCII on one line")
    return text


def _joined(parameter: Parameter, value: Any) -> str:
    """A value in one piece, as styles ``simple`` and ``form`` write it."""
    if parameter.is_json:
        return json.dumps(value, ensure_ascii=False)
    if isinstance(value, list):
        return ",".join(map(_word, value))
    if isinstance(value, dict):
        between = "=" if parameter.explode else ","
        return ",".join(f"{key}{between}{_word(inner)}" for key, inner in value.items())
    return _word(value)


def _pairs(parameter: Parameter, value: Any) -> Iterator[tuple[str, str]]:
    name = parameter.name
    if parameter.is_json or not isinstance(value, (list, dict)):
        yield name, _joined(parameter, value)
    elif parameter.style == "deepObject" and isinstance(value, dict):
        for key, inner in value.items():
            yield f"{name}[{key}]", _word(inner)
    elif parameter.explode and isinstance(value, list):
        for inner in value:
            yield name, _word(inner)
    elif parameter.explode and isinstance(value, dict):
        for key, inner in value.items():
            yield key, _word(inner)
    elif isinstance(value, list):
        yield name, _BETWEEN.get(parameter.style, ",").join(map(_word, value))
    else:
        yield name, ",".join(f"{key},{_word(inner)}" for key, inner in value.items())


def _word(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _content(operation: Operation, given: Mapping[str, Any], headers: dict[str, str]) -> bytes | None:
    body = operation.body
    if body is None:
        return None
    if body.arguments is not None:
        value: Any = {name: given[name] for name in body.arguments if name in given}
    elif "body" in given:
        value = given["body"]
    else:
        return None
    bare = body.media_type.partition(";")[0].strip()
    headers["Content-Type"] = "application/json" if bare == "*/*" else body.media_type
    if bare == FORM:
        if not isinstance(value, dict):
            raise Invalid("body: a form is an object")
        return urlencode({name: _word(inner) for name, inner in value.items()}).encode()
    if bare == "text/plain":
        return _word(value).encode()
    return json.dumps(value).encode()
