"""Schemas and validation from a function's signature: arguments in, result out.

What is made of plain types is done here with ``plain``, everything else with ``validation``.
"""

from __future__ import annotations

import typing
from collections.abc import Callable, Mapping
from functools import cached_property
from typing import TYPE_CHECKING, Any

import msgspec

from aenv.errors import AEnvError, AuthorError, Invalid
from aenv.models import Audio, Image, ToolResult
from aenv.runtime import plain, signatures, trusted
from aenv.runtime.docstrings import Docstring

if TYPE_CHECKING:
    from aenv.runtime.validation import Checker, Declared

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
_UNSAID = (Any, object, None, type(None), str)
"""Results whose type says nothing that a schema could add."""
_WRAPPED = {"x-fastmcp-wrap-result": True}
"""Tells FastMCP's client to give its user the value itself; others pass over it."""


class Arguments:
    """What a function takes: the published schema, and the way from JSON to keyword arguments."""

    def __init__(self, function: Callable[..., Any], docstring: Docstring) -> None:
        self._signature = signature = signatures.read(function, docstring)
        self.context = signature.context
        """The parameter that wants a ``Context``."""
        self.conversations = signature.conversations
        """Parameters that want conversations, each with what of a ``Context`` that is."""
        found = plain.arguments(signature)
        self._read = None if found is None else plain.reader(signature.parameters)
        self.schema: dict[str, Any] = self._checker.schema if found is None else found

    @cached_property
    def _checker(self) -> Checker:
        """Made when it is needed, which for plain types is never in most sandboxes."""
        with trusted.imports():
            from aenv.runtime.validation import Checker

        return Checker(self._signature)

    def decode(self, given: bytes | Mapping[str, Any], *, text: bool = False) -> dict[str, Any]:
        """Keyword arguments from a JSON object or a mapping; ``text`` for values that are all strings."""
        if self._read is not None and (isinstance(given, bytes) or not given):
            found = self._read(given if isinstance(given, bytes) else b"{}")
            if found is not None:
                return found
        try:
            return self._checker.decode(given, text=text)
        except AEnvError:
            raise
        except Exception as exc:  # from a validator of the author's own
            who = self._signature.who
            raise Invalid(f"{who}: the arguments cannot be checked: {type(exc).__name__}: {exc}") from exc


class Returned(msgspec.Struct):
    """A result on its way out: the value itself, or its JSON when the declared type wrote it."""

    value: Any
    json: bytes | None
    """The value as JSON; ``None`` when it is content (text, image ...) or has no declared type."""


class Result:
    """What a function gives back: the published output schema and the check against it."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self._who = signatures.label(function)
        hint = signatures.hints_of(function).get("return", Any)
        self._plain = _PLAIN.get(_plain_type(hint))
        self._declared: Declared | None = None
        self.schema: dict[str, Any] | None = None
        self.wrapped = False
        """Whether the schema is of ``{"result": value}``: structured content must be an object."""
        self._hint = hint
        if any(hint is kind for kind in _UNSAID) or _mentions_content(hint):
            return
        schema = plain.schema(hint) if self._plain is not None else None
        if schema is None:
            with trusted.imports():
                from aenv.runtime.validation import Declared

            declared = Declared.of(hint)
            if declared is None:
                return
            schema = declared.schema
            if self._plain is None:
                self._declared = declared
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
        return self._plain is not None or self._declared is not None

    def check(self, value: Any) -> Returned:
        """The value, as declared; an ``AuthorError`` when the function returned something else."""
        if hasattr(value, "tolist") and hasattr(value, "dtype") and self.declared:  # an array, or one number of one
            value = value.tolist()
        if self._plain is not None:
            if not isinstance(value, self._plain) or (isinstance(value, bool) and bool not in self._plain):
                raise AuthorError(
                    f"{self._who}() is declared to return {_name(self._hint)}, but returned {_name(type(value))}"
                )
            if isinstance(value, float):
                self._check_finite(value)
            return Returned(value, None)
        if self._declared is None:
            return Returned(value, None)
        try:
            checked, json = self._declared.check(value)
        except Exception as exc:
            raise AuthorError(
                f"{self._who}() returned {_name(type(value))}, not what it declares ({_name(self._hint)}): {exc}"
            ) from None
        if b"null" in json:
            self._check_finite(self._declared.plain(checked))
        return Returned(checked, json)

    def _check_finite(self, value: Any) -> None:
        if not plain.is_finite(value):
            raise AuthorError(
                f"{self._who}() is declared to return {_name(self._hint)}, but a number in it is not finite",
                hint="JSON has no NaN and no infinity; return None where there is no number, and declare that",
            )


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
