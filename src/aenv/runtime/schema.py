"""Schemas and validation from a function's signature: arguments in, result out."""

from __future__ import annotations

import functools
import inspect
import math
import sys
import types
import typing
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NotRequired, Required

import msgspec
from pydantic import BaseModel, ConfigDict, Field, PydanticUserError, TypeAdapter, ValidationError
from pydantic.errors import PydanticInvalidForJsonSchema, PydanticSchemaGenerationError
from pydantic.fields import FieldInfo
from pydantic.json_schema import GenerateJsonSchema, JsonSchemaMode
from pydantic_core import PydanticSerializationError, PydanticUndefined, to_jsonable_python
from typing_extensions import TypedDict

from aenv.errors import AuthorError, Invalid, StartFailed
from aenv.models import Audio, Image, ToolResult
from aenv.runtime.context import Context
from aenv.runtime.docstrings import Docstring

_typed_dict: Any = TypedDict  # called with fields that are known at run time only
_PLAIN: dict[type | None, tuple[type, ...]] = {
    str: (str,),
    int: (int,),
    float: (int, float),
    bool: (bool,),
    dict: (dict,),
    list: (list, tuple),
    tuple: (list, tuple),
}
_CONTENT = (Image, Audio, ToolResult, bytes)
_UNSAID = (Any, object, None, type(None), str, BaseModel)
"""Results whose type says nothing that a schema could add."""
_MOST_FAULTS = 10
_WRAPPED = {"x-fastmcp-wrap-result": True}
"""Tells FastMCP's client to give its user the value itself; others pass over it."""
_BROKEN = (PydanticSchemaGenerationError, PydanticUserError, PydanticInvalidForJsonSchema)


class _Schema(GenerateJsonSchema):
    """Without a title that repeats each field's name: it costs a model tokens and says nothing."""

    def field_title_should_be_set(self, schema: Any) -> bool:
        return False


def _json_schema(adapter: TypeAdapter[Any], mode: JsonSchemaMode) -> dict[str, Any]:
    schema = adapter.json_schema(schema_generator=_Schema, mode=mode)
    schema.pop("title", None)
    return schema


def _label(function: Callable[..., Any]) -> str:
    """What to call a function in a message."""
    if isinstance(function, functools.partial):
        return _label(function.func)
    return str(getattr(function, "__name__", type(function).__name__))


def _hints(function: Callable[..., Any]) -> dict[str, Any]:
    target: Any = function
    while isinstance(target, functools.partial):
        target = target.func
    if isinstance(target, type):
        target = target.__init__  # type: ignore[misc]
    elif not inspect.isroutine(target):
        target = type(target).__call__
    try:
        hints = typing.get_type_hints(target, include_extras=True)
    except Exception as exc:
        raise StartFailed(
            f"the annotations of {_label(function)}() cannot be read: {exc}",
            hint="import the names they use where the function is written, and not under TYPE_CHECKING",
        ) from exc
    if isinstance(function, type):
        hints.pop("return", None)
    if sys.version_info < (3, 12):
        twins: dict[Any, Any] = {}
        hints = {name: _twin(hint, twins) for name, hint in hints.items()}
    return hints


def _twin(hint: Any, twins: dict[Any, Any]) -> Any:
    """A hint with each ``typing.TypedDict`` as that of typing_extensions, which pydantic wants before Python 3.12."""
    if typing.is_typeddict(hint) and type(hint).__module__ == "typing":
        if hint not in twins:
            twins[hint] = twin = _typed_dict(hint.__name__, {})
            twin.__doc__ = hint.__doc__
            for name, part in typing.get_type_hints(hint, include_extras=True).items():
                if typing.get_origin(part) not in (Required, NotRequired):
                    part = (NotRequired if name in hint.__optional_keys__ else Required)[part]  # noqa: PLW2901
                twin.__annotations__[name] = _twin(part, twins)
        return twins[hint]
    origin, parts = typing.get_origin(hint), typing.get_args(hint)
    found = tuple(_twin(part, twins) for part in parts)
    if origin is None or origin is typing.Literal or found == parts:
        return hint
    if origin is types.UnionType:
        origin = typing.Union
    return origin[found if len(found) > 1 else found[0]]


def _is_context(hint: Any) -> bool:
    if typing.get_origin(hint) in (typing.Annotated, typing.Union, types.UnionType):
        return any(map(_is_context, typing.get_args(hint)))
    return hint is Context


class Arguments:
    """What a function takes: the published schema, and the way from JSON to keyword arguments."""

    def __init__(self, function: Callable[..., Any], docstring: Docstring) -> None:
        self._who = _label(function)
        hints = _hints(function)
        fields: dict[str, Any] = {}
        self._defaults: dict[str, Any] = {}
        shown: dict[str, Any] = {}
        self.context: str | None = None
        """The parameter that wants a ``Context``."""
        extra: typing.Literal["allow", "forbid"] = "forbid"
        for name, parameter in self._parameters(function):
            hint = hints.get(name, Any)
            if parameter.kind is parameter.VAR_KEYWORD:
                extra = "allow"
                continue
            if parameter.kind in (parameter.VAR_POSITIONAL, parameter.POSITIONAL_ONLY):
                raise StartFailed(
                    f"{self._who}(): parameter {name!r} can only be given by position, but callers give names",
                    hint="write it as an ordinary parameter",
                )
            if _is_context(hint):
                if self.context:
                    raise StartFailed(
                        f"{self._who}(): both {self.context!r} and {name!r} want the Context", hint="remove one"
                    )
                self.context = name
                continue
            default = parameter.default
            if isinstance(default, FieldInfo):
                hint = typing.Annotated[hint, default]
                value = default.get_default(call_default_factory=True, validated_data={})
                default = inspect.Parameter.empty
                if value is not PydanticUndefined:
                    default = self._defaults[name] = value
            if description := docstring.arguments.get(name):
                hint = typing.Annotated[hint, Field(description=description)]
            if default is inspect.Parameter.empty:
                fields[name] = hint
            else:
                fields[name] = NotRequired[hint]
                try:
                    value = to_jsonable_python(default)
                except ValueError:
                    continue
                if _finite(value):
                    shown[name] = value
        shape = _typed_dict("Arguments", fields)
        shape.__pydantic_config__ = ConfigDict(extra=extra)
        try:
            adapter: TypeAdapter[dict[str, Any]] = TypeAdapter(shape)
            self.schema = _json_schema(adapter, "validation")
        except _BROKEN as exc:
            raise StartFailed(
                f"{self._who}(): {_culprit(fields)} has a type that JSON cannot carry: {exc.message.split('. ')[0]}",
                hint="use str, int, float, bool, list, dict, enums, dataclasses or pydantic models",
            ) from exc
        self.schema.setdefault("properties", {})
        for name, value in shown.items():
            if name in self.schema["properties"]:  # one with an alias is there under that
                self.schema["properties"][name].setdefault("default", value)
        self._from_json = adapter.validator.validate_json
        self._from_python = adapter.validator.validate_python

    def _parameters(self, function: Callable[..., Any]) -> Iterable[tuple[str, inspect.Parameter]]:
        try:
            return inspect.signature(function).parameters.items()
        except (TypeError, ValueError) as exc:
            raise StartFailed(
                f"{self._who}(): its parameters cannot be read: {exc}", hint="wrap it in a function of your own"
            ) from exc

    def decode(self, given: bytes | Mapping[str, Any], *, text: bool = False) -> dict[str, Any]:
        """Keyword arguments from a JSON object or a mapping; ``text`` for values that are all strings."""
        try:
            if isinstance(given, bytes):
                found = self._from_json(given)
            else:
                found = self._from_python(given, strict=False if text else None)
        except ValidationError as exc:
            raise Invalid(f"{self._who}: {_explain(exc)}") from None
        except Exception as exc:  # from a validator of the author's own
            raise Invalid(f"{self._who}: the arguments cannot be checked: {type(exc).__name__}: {exc}") from exc
        return {**self._defaults, **found} if self._defaults else found


def _culprit(fields: Mapping[str, Any]) -> str:
    for name, hint in fields.items():
        try:
            TypeAdapter(_typed_dict("Arguments", {name: hint})).json_schema()
        except _BROKEN:
            return f"parameter {name!r}"
    return "a parameter"


def _finite(value: Any) -> bool:
    """Whether JSON has a form for every number in a value made of plain types."""
    if isinstance(value, float):
        return math.isfinite(value)
    if isinstance(value, dict):
        return all(map(_finite, value.values()))
    return not isinstance(value, (list, tuple, set, frozenset)) or all(map(_finite, value))


def _explain(error: ValidationError) -> str:
    parts = []
    items = error.errors(include_url=False)
    for item in items[:_MOST_FAULTS]:
        where = ".".join(str(step) for step in item["loc"]) or "arguments"
        where = where if len(where) <= 80 else where[:77] + "..."
        if item["type"] == "missing":
            parts.append(f"argument {where!r} is missing")
        elif item["type"] == "extra_forbidden":
            parts.append(f"there is no argument {where!r}")
        elif item["type"] == "json_invalid":
            parts.append(item["msg"])
        else:
            found = repr(item["input"])
            found = found if len(found) <= 80 else found[:77] + "..."
            parts.append(f"argument {where!r}: {item['msg'][:1].lower()}{item['msg'][1:]}, found {found}")
    if len(items) > _MOST_FAULTS:
        parts.append(f"and {len(items) - _MOST_FAULTS} more")
    return "; ".join(parts)


class Returned(msgspec.Struct):
    """A result on its way out: the value itself, or its JSON when the declared type wrote it."""

    value: Any
    json: bytes | None
    """The value as JSON; ``None`` when it is content (text, image ...) or has no declared type."""


class Result:
    """What a function gives back: the published output schema and the check against it."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self._who = _label(function)
        hint = _hints(function).get("return", Any)
        self._plain = _PLAIN.get(_plain_type(hint))
        self._adapter: TypeAdapter[Any] | None = None
        self.schema: dict[str, Any] | None = None
        self.wrapped = False
        """Whether the schema is of ``{"result": value}``: structured content must be an object."""
        self._declared = hint
        if any(hint is kind for kind in _UNSAID) or _mentions_content(hint):
            return
        try:
            adapter = TypeAdapter[Any](hint)
            schema = _json_schema(adapter, "serialization")
        except _BROKEN:
            return
        if self._plain is None:
            self._adapter = adapter
        if str(schema.get("$ref", "")).startswith("#/$defs/"):  # a model that contains itself
            schema["type"] = schema["$defs"][schema["$ref"].rpartition("/")[2]].get("type")
        self.wrapped = schema.get("type") != "object"
        if self.wrapped:
            definitions = schema.pop("$defs", None)
            schema = {"type": "object", "properties": {"result": schema}, "required": ["result"], **_WRAPPED}
            if definitions:
                schema["$defs"] = definitions
        self.schema = schema

    @property
    def declared(self) -> bool:
        """Whether the function says what it returns, so that ``check`` can tell."""
        return self._plain is not None or self._adapter is not None

    def check(self, value: Any) -> Returned:
        """The value, as declared; an ``AuthorError`` when the function returned something else."""
        if hasattr(value, "tolist") and hasattr(value, "dtype") and self.declared:  # an array, or one number of one
            value = value.tolist()
        if self._plain is not None:
            if not isinstance(value, self._plain) or (isinstance(value, bool) and bool not in self._plain):
                raise AuthorError(
                    f"{self._who}() is declared to return {_name(self._declared)}, but returned {_name(type(value))}"
                )
            if isinstance(value, float):
                self._check_finite(value)
            return Returned(value, None)
        if self._adapter is None:
            return Returned(value, None)
        try:
            checked = self._adapter.validate_python(value)
            try:
                json = _dump(self._adapter, checked)
            except PydanticSerializationError:
                # An instance whose fields hold something else than they declare: its fields are then checked too.
                fields = self._adapter.dump_python(checked, by_alias=True, warnings="none")
                checked = self._adapter.validate_python(fields)
                json = _dump(self._adapter, checked)
        except Exception as exc:
            reason = exc.errors(include_url=False)[0]["msg"] if isinstance(exc, ValidationError) else str(exc)
            raise AuthorError(
                f"{self._who}() returned {_name(type(value))}, not what it declares ({_name(self._declared)}): {reason}"
            ) from None
        if b"null" in json:
            self._check_finite(self._adapter.dump_python(checked))
        return Returned(checked, json)

    def _check_finite(self, value: Any) -> None:
        if not _finite(value):
            raise AuthorError(
                f"{self._who}() is declared to return {_name(self._declared)}, but a number in it is not finite",
                hint="JSON has no NaN and no infinity; return None where there is no number, and declare that",
            )


def _dump(adapter: TypeAdapter[Any], value: Any) -> bytes:
    return adapter.serializer.to_json(value, by_alias=True, warnings="error")


def _plain_type(hint: Any) -> type | None:
    """The built-in type behind an annotation that says no more than that type."""
    origin = typing.get_origin(hint)
    if origin in (dict, list) and all(part in (Any, str) for part in typing.get_args(hint)[:1]):
        return origin if typing.get_args(hint)[-1] is Any else None
    return hint if isinstance(hint, type) else None


def _mentions_content(hint: Any) -> bool:
    if isinstance(hint, type) and issubclass(hint, _CONTENT):
        return True
    return any(_mentions_content(part) for part in typing.get_args(hint))


def _name(kind: Any) -> str:
    if typing.get_origin(kind) is typing.Annotated:
        kind = typing.get_args(kind)[0]
    return kind.__name__ if isinstance(kind, type) else str(kind).replace("typing.", "")
