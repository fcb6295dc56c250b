"""Carries out the tree of a template."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from aenv.deploy.documents import shown
from aenv.deploy.functions import FUNCTIONS, true
from aenv.deploy.parsing import (
    Assign,
    Branch,
    Call,
    Command,
    Dot,
    Field,
    Include,
    Literal,
    Parsed,
    Pipe,
    Show,
    Text,
    Variable,
    parse,
)
from aenv.errors import AEnvError, Invalid, did_you_mean

_DEEPEST = 50
"""Templates that include one another."""


class Renderer:
    """The templates of a chart, by their names. ``lookup`` answers what the cluster has, for those that ask."""

    def __init__(self, sources: Mapping[str, str], lookup: Callable[[str, str, str, str], Any]) -> None:
        self._lookup = lookup
        self._parsed: dict[str, Parsed] = {name: parse(name, text) for name, text in sources.items()}
        self._defined = {name: body for found in self._parsed.values() for name, body in found.defined.items()}
        self._depth = 0

    def render(self, name: str, root: Any) -> str:
        """One of the sources, with ``root`` as its dot."""
        try:
            return _Run(self, root).block(self._parsed[name].body, root)
        except AEnvError as exc:
            raise Invalid(f"{name}: {exc.message}", hint=exc.hint) from exc

    def include(self, name: str, value: Any = None) -> str:
        """A template that one of the sources defines."""
        if name not in self._defined:
            raise Invalid(f"there is no template {name!r}", hint=did_you_mean(name, self._defined))
        if self._depth >= _DEEPEST:
            raise Invalid(f"the template {name!r} includes itself")
        self._depth += 1
        try:
            return _Run(self, value).block(self._defined[name], value)
        finally:
            self._depth -= 1

    def function(self, name: str) -> Callable[..., Any]:
        if name == "include":
            return self.include
        if name == "lookup":
            return self._lookup
        if name not in FUNCTIONS:
            raise Invalid(f"there is no function {name!r}", hint=did_you_mean(name, [*FUNCTIONS, "include", "lookup"]))
        return FUNCTIONS[name]


class _Run:
    """One template being carried out, with its variables: a list of scopes, the innermost last."""

    def __init__(self, renderer: Renderer, root: Any) -> None:
        self._renderer = renderer
        self._scopes: list[dict[str, Any]] = [{"$": root}]

    def block(self, nodes: list[Any], dot: Any, **variables: Any) -> str:
        self._scopes.append(variables)
        try:
            return "".join([self._node(node, dot) for node in nodes])
        finally:
            self._scopes.pop()

    def _node(self, node: Any, dot: Any) -> str:
        if isinstance(node, Text):
            return node.text
        try:
            if isinstance(node, Show):
                return shown(self._pipe(node.pipe, dot))
            if isinstance(node, Include):
                return self._renderer.include(node.name, self._pipe(node.pipe, dot) if node.pipe else None)
            if isinstance(node, Assign):
                self._assign(node, self._pipe(node.pipe, dot))
                return ""
            assert isinstance(node, Branch)
            value = self._pipe(node.pipe, dot)
        except (AEnvError, TypeError, KeyError, IndexError, AttributeError, ValueError) as exc:
            why = exc.message if isinstance(exc, AEnvError) else f"{type(exc).__name__}: {exc}"
            if why.startswith("line "):
                raise
            hint = exc.hint if isinstance(exc, AEnvError) else None
            raise Invalid(f"line {node.line}: {why}", hint=hint) from exc
        return self._branch(node, value, dot)

    def _branch(self, node: Branch, value: Any, dot: Any) -> str:
        if not true(value):
            return self.block(node.otherwise, dot)
        if node.kind != "range":
            names = dict.fromkeys(node.names, value)
            return self.block(node.body, value if node.kind == "with" else dot, **names)
        pairs = sorted(value.items()) if isinstance(value, Mapping) else list(enumerate(value))
        parts = []
        for key, found in pairs:
            both = (key, found) if len(node.names) == 2 else (found,)
            parts.append(self.block(node.body, found, **dict(zip(node.names, both, strict=False))))
        return "".join(parts)

    def _assign(self, node: Assign, value: Any) -> None:
        if node.declare:
            self._scopes[-1][node.name] = value
            return
        for scope in reversed(self._scopes):
            if node.name in scope:
                scope[node.name] = value
                return
        raise Invalid(f"there is no variable {node.name}")

    def _pipe(self, pipe: Pipe, dot: Any) -> Any:
        value = self._command(pipe.commands[0], dot)
        for command in pipe.commands[1:]:
            value = self._command(command, dot, value)
        return value

    def _command(self, command: Command, dot: Any, *last: Any) -> Any:
        head, *arguments = command.parts
        if isinstance(head, Call) and head.name in ("and", "or"):
            return self._chosen(head.name == "or", arguments, dot, last)
        if isinstance(head, Call):
            function = self._renderer.function(head.name)
        else:
            function = self._value(head, dot)
            if not callable(function):
                if arguments or last:
                    raise Invalid("a value is given arguments, and is no function")
                return function
        return function(*(self._value(argument, dot) for argument in arguments), *last)

    def _chosen(self, wanted: bool, arguments: list[Any], dot: Any, last: tuple[Any, ...]) -> Any:
        """The first argument that decides, or the last one; what comes after it is not looked at."""
        value = None
        for argument in arguments:
            value = self._value(argument, dot)
            if true(value) is wanted:
                return value
        return last[0] if last else value

    def _value(self, node: Any, dot: Any) -> Any:
        if isinstance(node, Literal):
            return node.value
        if isinstance(node, Dot):
            return dot
        if isinstance(node, Pipe):
            return self._pipe(node, dot)
        if isinstance(node, Call):
            return self._renderer.function(node.name)()
        if isinstance(node, Variable):
            for scope in reversed(self._scopes):
                if node.name in scope:
                    return scope[node.name]
            raise Invalid(f"there is no variable {node.name}")
        assert isinstance(node, Field)
        value = self._value(node.of, dot)
        if value is None:
            raise Invalid(f"'.{node.name}' is asked of nothing", hint="what holds it is not set")
        if isinstance(value, Mapping):
            return value.get(node.name)
        raise Invalid(f"'.{node.name}' is asked of {value!r}, which has no fields")
