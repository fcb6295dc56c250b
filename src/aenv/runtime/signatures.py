"""What a function's signature says: its parameters, their types, and which of them wants the ``Context``."""

from __future__ import annotations

import functools
import inspect
import sys
import types
import typing
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple, NotRequired, Required

from aenv.errors import StartFailed
from aenv.runtime.context import Context
from aenv.runtime.conversations import Conversation
from aenv.runtime.docstrings import Docstring

MISSING = inspect.Parameter.empty
_CONVERSATIONS = ((Conversation, "conversation"), (list[Conversation], "conversations"))


class Parameter(NamedTuple):
    """One that callers give by name."""

    name: str
    hint: Any
    default: Any
    """``MISSING`` when there is none."""
    description: str | None


class Signature(NamedTuple):
    """What a function takes."""

    who: str
    """What the function is called in a message."""
    parameters: list[Parameter]
    context: str | None
    """The parameter that wants a ``Context``."""
    conversations: dict[str, str]
    """Parameters that want one or all conversations, each with what of a ``Context`` that is."""
    is_open: bool
    """Whether it takes arguments of any name."""


def read(function: Callable[..., Any], docstring: Docstring) -> Signature:
    """The signature of a function; ``StartFailed`` when callers could not give what it takes."""
    who, hints = label(function), hints_of(function)
    found: list[Parameter] = []
    context: str | None = None
    conversations: dict[str, str] = {}
    is_open = False
    for name, parameter in _parameters(function, who):
        hint = hints.get(name, Any)
        if parameter.kind is parameter.VAR_KEYWORD:
            is_open = True
            continue
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.POSITIONAL_ONLY):
            raise StartFailed(
                f"{who}(): parameter {name!r} can only be given by position, but callers give names",
                hint="write it as an ordinary parameter",
            )
        if _is_context(hint):
            if context:
                raise StartFailed(f"{who}(): both {context!r} and {name!r} want the Context", hint="remove one")
            context = name
            continue
        if wanted := next((what for kind, what in _CONVERSATIONS if hint == kind), None):
            conversations[name] = wanted
            continue
        found.append(Parameter(name, hint, parameter.default, docstring.arguments.get(name)))
    return Signature(who, found, context, conversations, is_open)


def _parameters(function: Callable[..., Any], who: str) -> Iterable[tuple[str, inspect.Parameter]]:
    try:
        return inspect.signature(function).parameters.items()
    except (TypeError, ValueError) as exc:
        raise StartFailed(
            f"{who}(): its parameters cannot be read: {exc}", hint="wrap it in a function of your own"
        ) from exc


def label(function: Callable[..., Any]) -> str:
    """What to call a function in a message."""
    if isinstance(function, functools.partial):
        return label(function.func)
    return str(getattr(function, "__name__", type(function).__name__))


def hints_of(function: Callable[..., Any]) -> dict[str, Any]:
    """The types of a function's parameters, and of what it returns."""
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
            f"the annotations of {label(function)}() cannot be read: {exc}",
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
            from typing_extensions import TypedDict

            made: Any = TypedDict  # called with fields that are known at run time only
            twins[hint] = twin = made(hint.__name__, {})
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
