"""Schemas and validation from a function's signature: arguments in, result out."""

from __future__ import annotations

import inspect
import typing
from collections.abc import Callable, Mapping
from typing import Any, NotRequired

import msgspec
from pydantic import ConfigDict, Field, PydanticUserError, TypeAdapter, ValidationError
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
}
_CONTENT = (Image, Audio, ToolResult, bytes)
_BROKEN = (PydanticSchemaGenerationError, PydanticUserError, PydanticInvalidForJsonSchema)


class _Schema(GenerateJsonSchema):
    """Without a title that repeats each field's name: it costs a model tokens and says nothing."""

    def field_title_should_be_set(self, schema: Any) -> bool:
        return False


def _json_schema(adapter: TypeAdapter[Any], mode: JsonSchemaMode) -> dict[str, Any]:
    schema = adapter.json_schema(schema_generator=_Schema, mode=mode)
    schema.pop("title", None)
    return schema


def _hints(function: Callable[..., Any]) -> dict[str, Any]:
    try:
        return typing.get_type_hints(function, include_extras=True)
    except (NameError, TypeError) as exc:
        raise StartFailed(f"the annotations of {function.__qualname__}() cannot be read: {exc}") from exc


def _is_context(hint: Any) -> bool:
    return hint is Context or Context in typing.get_args(hint)


class Arguments:
    """What a function takes: the published schema, and the way from JSON to keyword arguments."""

    def __init__(self, function: Callable[..., Any], docstring: Docstring) -> None:
        self._who = function.__name__ if hasattr(function, "__name__") else repr(function)
        hints = _hints(function)
        fields: dict[str, Any] = {}
        self._defaults: dict[str, Any] = {}
        shown: dict[str, Any] = {}
        self.context: str | None = None
        """The parameter that wants a ``Context``."""
        extra: typing.Literal["allow", "forbid"] = "forbid"
        for name, parameter in inspect.signature(function).parameters.items():
            hint = hints.get(name, Any)
            if _is_context(hint):
                self.context = name
                continue
            if parameter.kind is parameter.VAR_KEYWORD:
                extra = "allow"
                continue
            if parameter.kind in (parameter.VAR_POSITIONAL, parameter.POSITIONAL_ONLY):
                raise StartFailed(
                    f"{self._who}(): parameter {name!r} can only be given by position, but callers give names",
                    hint="write it as an ordinary parameter",
                )
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
                    shown[name] = to_jsonable_python(default)
                except PydanticSerializationError:
                    continue
        shape = _typed_dict("Arguments", fields)
        shape.__pydantic_config__ = ConfigDict(extra=extra)
        try:
            adapter: TypeAdapter[dict[str, Any]] = TypeAdapter(shape)
            self.schema = _json_schema(adapter, "validation")
        except _BROKEN as exc:
            raise StartFailed(
                f"{self._who}(): a parameter has a type that JSON cannot carry: {exc.message}",
                hint="use str, int, float, bool, list, dict, enums, dataclasses or pydantic models",
            ) from exc
        self.schema.setdefault("properties", {})
        for name, value in shown.items():
            self.schema["properties"][name].setdefault("default", value)
        self._from_json = adapter.validator.validate_json
        self._from_python = adapter.validator.validate_python

    def decode(self, given: bytes | Mapping[str, Any], *, text: bool = False) -> dict[str, Any]:
        """Keyword arguments from a JSON object or a mapping; ``text`` for values that are all strings."""
        try:
            if isinstance(given, bytes):
                found = self._from_json(given)
            else:
                found = self._from_python(given, strict=False if text else None)
        except ValidationError as exc:
            raise Invalid(f"{self._who}: {_explain(exc)}") from None
        return {**self._defaults, **found} if self._defaults else found


def _explain(error: ValidationError) -> str:
    parts = []
    for item in error.errors(include_url=False):
        where = ".".join(str(step) for step in item["loc"]) or "arguments"
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
    return "; ".join(parts)


class Returned(msgspec.Struct):
    """A result on its way out: the value itself, or its JSON when the declared type wrote it."""

    value: Any
    json: bytes | None
    """The value as JSON; ``None`` when it is content (text, image ...) or has no declared type."""


class Result:
    """What a function gives back: the published output schema and the check against it."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self._who = getattr(function, "__name__", repr(function))
        hint = _hints(function).get("return", Any)
        self._plain = _PLAIN.get(_plain_type(hint))
        self._adapter: TypeAdapter[Any] | None = None
        self.schema: dict[str, Any] | None = None
        self.wrapped = False
        """Whether the schema is of ``{"result": value}``: structured content must be an object."""
        self._declared = hint
        if hint is Any or hint is None or hint is type(None) or hint is str or _mentions_content(hint):
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
            schema = {"type": "object", "properties": {"result": schema}, "required": ["result"]}
            if definitions:
                schema["$defs"] = definitions
        self.schema = schema

    def check(self, value: Any) -> Returned:
        """The value, as declared; an ``AuthorError`` when the function returned something else."""
        if self._plain is not None:
            if not isinstance(value, self._plain) or (self._declared in (int, float) and value is True):
                raise AuthorError(
                    f"{self._who}() is declared to return {_name(self._declared)}, but returned {_name(type(value))}"
                )
            return Returned(value, None)
        if self._adapter is None:
            return Returned(value, None)
        try:
            checked = self._adapter.validate_python(value)
            return Returned(checked, self._adapter.dump_json(checked))
        except (ValidationError, PydanticSerializationError) as exc:
            reason = exc.errors(include_url=False)[0]["msg"] if isinstance(exc, ValidationError) else str(exc)
            raise AuthorError(
                f"{self._who}() returned {_name(type(value))}, not what it declares ({_name(self._declared)}): {reason}"
            ) from None


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
    return kind.__name__ if isinstance(kind, type) else str(kind).replace("typing.", "")
