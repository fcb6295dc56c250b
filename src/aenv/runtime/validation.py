"""What pydantic does for schemas: every type that it knows, values converted to theirs, and why one is refused.

Importing it takes as long as the rest of a start, so it is imported where a type or a value is not plain.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal, NotRequired

from pydantic import BaseModel, ConfigDict, Field, PydanticUserError, TypeAdapter, ValidationError
from pydantic.errors import PydanticInvalidForJsonSchema, PydanticSchemaGenerationError
from pydantic.fields import FieldInfo
from pydantic.json_schema import GenerateJsonSchema, JsonSchemaMode
from pydantic_core import PydanticSerializationError, PydanticUndefined, to_jsonable_python
from typing_extensions import TypedDict

from aenv.errors import Invalid, StartFailed
from aenv.runtime.plain import is_finite
from aenv.runtime.signatures import MISSING, Signature

_typed_dict: Any = TypedDict  # called with fields that are known at run time only
_MOST_FAULTS = 10
_BROKEN = (PydanticSchemaGenerationError, PydanticUserError, PydanticInvalidForJsonSchema)

TypeAdapter(int)  # at the first one pydantic imports the rest, and its plugins: to be found where it was found itself


class _Schema(GenerateJsonSchema):
    """Without a title that repeats each field's name: it costs a model tokens and says nothing."""

    def field_title_should_be_set(self, schema: Any) -> bool:
        return False


def _json_schema(adapter: TypeAdapter[Any], mode: JsonSchemaMode) -> dict[str, Any]:
    schema = adapter.json_schema(schema_generator=_Schema, mode=mode)
    schema.pop("title", None)
    return schema


class Checker:
    """What a function takes: the published schema, and the way from JSON to keyword arguments."""

    def __init__(self, signature: Signature) -> None:
        self._who = signature.who
        fields: dict[str, Any] = {}
        self._defaults: dict[str, Any] = {}
        shown: dict[str, Any] = {}
        extra: Literal["allow", "forbid"] = "allow" if signature.is_open else "forbid"
        for name, hint, default, description in signature.parameters:
            if isinstance(default, FieldInfo):
                hint = Annotated[hint, default]  # noqa: PLW2901
                value = default.get_default(call_default_factory=True, validated_data={})
                default = MISSING  # noqa: PLW2901
                if value is not PydanticUndefined:
                    default = self._defaults[name] = value  # noqa: PLW2901
            if description:
                hint = Annotated[hint, Field(description=description)]  # noqa: PLW2901
            if default is MISSING:
                fields[name] = hint
            else:
                fields[name] = NotRequired[hint]
                try:
                    value = to_jsonable_python(default)
                except ValueError:
                    continue
                if is_finite(value):
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


def _culprit(fields: Mapping[str, Any]) -> str:
    for name, hint in fields.items():
        try:
            TypeAdapter(_typed_dict("Arguments", {name: hint})).json_schema()
        except _BROKEN:
            return f"parameter {name!r}"
    return "a parameter"


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


class Declared:
    """What a function says that it returns: the published schema, and the way from a value to JSON."""

    def __init__(self, adapter: TypeAdapter[Any], schema: dict[str, Any]) -> None:
        self._adapter = adapter
        self.schema = schema

    @classmethod
    def of(cls, hint: Any) -> Declared | None:
        """None for a type that says nothing, or that has no schema."""
        if hint is BaseModel:
            return None
        try:
            adapter = TypeAdapter[Any](hint)
            schema = _json_schema(adapter, "serialization")
        except _BROKEN:
            return None
        if str(schema.get("$ref", "")).startswith("#/$defs/"):  # a model that contains itself
            schema["type"] = schema["$defs"][schema["$ref"].rpartition("/")[2]].get("type")
        return cls(adapter, schema)

    def check(self, value: Any) -> tuple[Any, bytes]:
        """The value as it is declared, and its JSON; ``ValueError`` says why it is something else."""
        try:
            checked = self._adapter.validate_python(value)
            try:
                return checked, self._dump(checked)
            except PydanticSerializationError:
                # An instance whose fields hold something else than they declare: its fields are then checked too.
                fields = self._adapter.dump_python(checked, by_alias=True, warnings="none")
                checked = self._adapter.validate_python(fields)
                return checked, self._dump(checked)
        except ValidationError as exc:
            raise ValueError(exc.errors(include_url=False)[0]["msg"]) from None

    def plain(self, checked: Any) -> Any:
        """A value that was checked, made of plain types."""
        return self._adapter.dump_python(checked)

    def _dump(self, value: Any) -> bytes:
        return self._adapter.serializer.to_json(value, by_alias=True, warnings="error")
