"""A route whose handler was taken apart once: what it takes, where that is in a request, and how it is decoded."""

from __future__ import annotations

import functools
import inspect
import math
import re
from collections.abc import Mapping
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, NamedTuple, Union, get_args, get_origin, get_type_hints
from urllib.parse import parse_qsl

import msgspec

from aenv.errors import Invalid
from aenv.web.routes import Call, Header, Paged, Query, Route, Streamed, Upload
from aenv.wire import LARGEST_PAGE

LARGEST_OFFSET = 2**53
MOST_FIELDS = 1000
"""Parameters in one query."""
DEEPEST = 100
"""How deep a JSON body may be nested."""

_REQUIRED: Any = inspect.Parameter.empty
_UNIONS = (Union, UnionType)
_EXPECTED = {int: "an integer", float: "a number", bool: "true or false", str: "a text"}
_PAGING = {
    "limit": (Annotated[int, msgspec.Meta(ge=1, le=LARGEST_PAGE)], f"how many at most, 1 to {LARGEST_PAGE}"),
    "offset": (Annotated[int, msgspec.Meta(ge=0, le=LARGEST_OFFSET)], "how many to pass over"),
}
_SUSPECT = re.compile(rb"\\u0000|[0-9]{19}")
_CONTROL = re.compile(r"[\x00-\x1f\x7f/]")


class Parameter(NamedTuple):
    """Something small that a request brings: a part of its path, of its query, or a header."""

    name: str
    """As the handler has it."""
    key: str
    """As the request has it."""
    place: Literal["path", "query", "header"]
    type: Any
    """Without its ``| None``."""
    default: Any
    about: str = ""

    @property
    def required(self) -> bool:
        return self.default is _REQUIRED

    @property
    def many(self) -> bool:
        return _plain(self.type) in (list, tuple, set, frozenset)

    def decode(self, values: list[str]) -> Any:
        """The value of what was sent; an ``Invalid`` names it and says what was expected."""
        if not self.many and len(values) > 1:
            raise Invalid(f"{self.place} parameter {self.key!r} is given {len(values)} times", hint="give it once")
        if any("\0" in value for value in values):
            raise Invalid(f"{self.place} parameter {self.key!r} has a NUL character in it")
        try:
            found = msgspec.convert(values if self.many else values[0], self.type, strict=False)
        except msgspec.ValidationError as exc:
            raise self._wrong(values, str(exc)) from None
        outside = isinstance(found, int) and not -(2**63) <= found < 2**63
        if outside or (isinstance(found, float) and not math.isfinite(found)):
            raise self._wrong(values, "out of range")
        return found

    def _wrong(self, values: list[str], why: str) -> Invalid:
        expected = _EXPECTED.get(_plain(self.type)) if " got `str`" in why and " - at" not in why else None
        shown = ", ".join(repr(value if len(value) <= 80 else f"{value[:80]}...") for value in values[:3])
        why = f"expected {expected}" if expected else why[:1].lower() + why[1:]
        return Invalid(f"{self.place} parameter {self.key!r}: {why}, found {shown}")


class Endpoint:
    """A route, ready to be called."""

    def __init__(self, route: Route) -> None:
        self.route = route
        self.action = f"{route.method} {route.path}"
        self.path = [part for part in route.path.split("/") if part]
        self.keys = [part[1:-1] for part in self.path if part[0] == "{"]
        self.parameters: list[Parameter] = []
        """Of the path, the query and the headers."""
        self.body: Any = None
        """The type of the JSON body; None when there is none, or it is an ``Upload``."""
        self.body_optional = False
        self.upload = False
        hints = self._hints()
        self.returns: Any = hints.pop("return")
        """The type of ``data``, or of its items when it is ``paged``; ``Streamed`` where that is all there is."""
        self.content_type = ""
        """What a ``Streamed`` answer is; empty when the annotation does not say or there is none."""
        self.paged = get_origin(self.returns) is Paged
        if self.paged:
            self.returns = get_args(self.returns)[0]
        self._read_return()
        self._read_parameters(hints)
        self._by_key = {(found.place, found.key): found for found in self.parameters}
        self._decoder = None if self.body is None else msgspec.json.Decoder(self.body)

    # Taking a handler apart

    def _bad(self, what: str) -> TypeError:
        handler = self.route.handler
        name = f"{handler.__module__}.{getattr(handler, '__qualname__', handler)}"
        return TypeError(f"{name}, the handler of {self.action}, {what}")

    def _hints(self) -> dict[str, Any]:
        route = self.route
        if not inspect.iscoroutinefunction(route.handler):
            raise self._bad("is not an async function")
        if not route.path.startswith("/") or any("{" in part[1:] or part == "{}" for part in self.path):
            raise self._bad("has a path that is none: parts in braces stand alone, as in /env/{name}")
        if any((part[0] == "{") != (part[-1] == "}") for part in self.path) or len({*self.keys}) < len(self.keys):
            raise self._bad("has a path whose parameters cannot be told")
        try:
            hints = get_type_hints(route.handler, include_extras=True)
        except NameError as exc:
            raise self._bad(f"has an annotation that cannot be looked up: {exc}") from exc
        if "return" not in hints:
            raise self._bad("does not say what it returns")
        return hints

    def _read_return(self) -> None:
        kinds = []
        for kind in _alternatives(self.returns):
            if get_origin(kind) is Annotated and get_args(kind)[0] is Streamed:
                self.content_type = next((x for x in kind.__metadata__ if isinstance(x, str)), "")
                kinds.append(Streamed)
            else:
                kinds.append(kind)
        self.streams = Streamed in kinds
        data = [kind for kind in kinds if kind is not Streamed]
        self.returns = Union[tuple(data)] if data else Streamed  # noqa: UP007 - made at run time
        if data:
            self._check(self.returns, "returns")

    def _read_parameters(self, hints: dict[str, Any]) -> None:
        first, *rest = inspect.signature(self.route.handler).parameters.values() or (None,)
        if first is None or hints.get(first.name) is not Call:
            raise self._bad("does not take a Call first")
        for parameter in rest:
            if parameter.kind not in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY):
                raise self._bad(f"takes {parameter}, which has no name to be found by")
            if parameter.name not in hints:
                raise self._bad(f"does not say what {parameter.name!r} is")
            if parameter.name == "body":
                self._read_body(hints["body"])
            else:
                self.parameters.append(self._parameter(parameter, hints[parameter.name]))
        names = {found.name: found for found in self.parameters}
        if missing := set(self.keys) - {found.name for found in self.parameters if found.place == "path"}:
            raise self._bad(f"does not take {', '.join(sorted(missing))}, which its path has")
        if self.paged and not {"limit", "offset"} <= set(names):
            raise self._bad("returns a Paged and does not take limit and offset")

    def _read_body(self, hint: Any) -> None:
        if hint is Upload:
            self.upload = True
        else:
            self.body_optional = NoneType in get_args(hint)
            self.body = hint
            self._check(hint, "has a body")
        if self.route.method in ("GET", "DELETE"):
            raise self._bad(f"has a body, which a {self.route.method} does not bring")

    def _parameter(self, parameter: inspect.Parameter, hint: Any) -> Parameter:
        name, default = parameter.name, parameter.default
        marks = get_args(hint)[1:] if get_origin(hint) is Annotated else ()
        mark = next((found for found in marks if isinstance(found, Header | Query)), Query())
        about = mark.about or next((x.description for x in marks if isinstance(x, msgspec.Meta) and x.description), "")
        if marks:
            kept = tuple(found for found in marks if not isinstance(found, Header | Query))
            hint = Annotated[(_without_none(get_args(hint)[0]), *kept)] if kept else get_args(hint)[0]
        hint = _without_none(hint)
        if self.paged and name in _PAGING:
            hint, about = _PAGING[name]
        if name in self.keys:
            if _plain(hint) is not str or default is not _REQUIRED:
                raise self._bad(f"must take {name!r}, which its path has, as a str without a default")
            return Parameter(name, name, "path", hint, default, about)
        self._check(hint, f"takes {name!r}")
        if isinstance(mark, Header):
            return Parameter(name, mark.name, "header", hint, default, about)
        return Parameter(name, mark.name or name, "query", hint, default, about)

    def _check(self, hint: Any, what: str) -> None:
        if why := _without_json(hint):
            raise self._bad(f"{what} of a type that has no JSON: {why}")

    # Decoding a request

    def arguments(self, path: list[str], query: bytes, headers: Mapping[bytes, bytes]) -> dict[str, Any]:
        """What the handler is called with, but for the body."""
        given: dict[tuple[str, str], list[str]] = {}
        for key, value in zip(self.keys, path, strict=True):
            if _CONTROL.search(value):
                raise Invalid(f"path parameter {key!r} has a slash or a control character in it: {value[:80]!r}")
            given["path", key] = [value]
        for key, value in _pairs(query):
            if ("query", key) in self._by_key:
                given.setdefault(("query", key), []).append(value)
        found: dict[str, Any] = {}
        for parameter in self.parameters:
            values = given.get((parameter.place, parameter.key))
            if parameter.place == "header" and (header := headers.get(parameter.key.lower().encode())) is not None:
                values = [header.decode("latin-1")]
            if values is not None:
                found[parameter.name] = parameter.decode(values)
            elif parameter.required:
                raise Invalid(f"{parameter.place} parameter {parameter.key!r} is missing")
            else:
                found[parameter.name] = parameter.default
        return found

    def decode(self, body: bytes) -> Any:
        """The JSON body as the handler takes it."""
        if not body and self.body_optional:
            return None
        assert self._decoder is not None
        try:
            found = self._decoder.decode(body or b"{}")
        except RecursionError:
            raise Invalid("the body is nested too deeply") from None
        except (msgspec.DecodeError, UnicodeDecodeError) as exc:
            raise _wrong_body(str(exc)) from None
        if _SUSPECT.search(body) or body.count(b"[") + body.count(b"{") > DEEPEST:
            _check_values(msgspec.to_builtins(found))
        return found


@functools.cache
def _without_json(hint: Any) -> str:
    """Why a type has no JSON; empty when it has."""
    try:
        msgspec.json.schema(hint)
    except TypeError as exc:
        return str(exc)
    return ""


def _wrong_body(why: str) -> Invalid:
    what, _, place = why.partition(" - at `")
    place = place.rstrip("`").removeprefix("$").lstrip(".")
    what = what if what.startswith("JSON") else what[:1].lower() + what[1:]
    return Invalid(f"the body is wrong at {place}: {what}" if place else f"the body is wrong: {what}")


def _check_values(whole: Any) -> None:
    """Refuse what JSON can say and little else can hold: NUL characters, endless numbers, towers of brackets."""
    stack: list[tuple[Any, str, int]] = [(whole, "", 1)]
    while stack:
        value, place, depth = stack.pop()
        if isinstance(value, str):
            if "\0" in value:
                raise Invalid(f"the body is wrong at {place or 'its top'}: there is a NUL character in it")
        elif isinstance(value, int):
            if not -(2**63) <= value < 2**64:
                raise Invalid(f"the body is wrong at {place or 'its top'}: the number is too large")
        elif isinstance(value, dict | list | tuple):
            if depth > DEEPEST:
                raise Invalid("the body is nested too deeply")
            pairs = value.items() if isinstance(value, dict) else enumerate(value)
            for key, inner in pairs:
                if isinstance(key, str) and "\0" in key:
                    raise Invalid(f"the body is wrong at {place or 'its top'}: there is a NUL character in a name")
                stack.append((inner, f"{place}.{key}".lstrip("."), depth + 1))


def _pairs(query: bytes) -> list[tuple[str, str]]:
    if not query:
        return []
    try:
        return parse_qsl(query.decode(), keep_blank_values=True, errors="strict", max_num_fields=MOST_FIELDS)
    except UnicodeDecodeError:
        raise Invalid("the query is not UTF-8") from None
    except ValueError:
        raise Invalid(f"the query has over {MOST_FIELDS} parameters") from None


def _alternatives(hint: Any) -> list[Any]:
    return list(get_args(hint)) if get_origin(hint) in _UNIONS else [hint]


def _without_none(hint: Any) -> Any:
    kinds = _alternatives(hint)
    kept = tuple(kind for kind in kinds if kind is not NoneType)
    return hint if len(kept) == len(kinds) else Union[kept]  # noqa: UP007 - made at run time


def _plain(hint: Any) -> Any:
    if get_origin(hint) is Annotated:
        hint = get_args(hint)[0]
    return get_origin(hint) or hint
