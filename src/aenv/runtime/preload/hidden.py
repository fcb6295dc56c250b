"""Calls that nothing sees as they happen: functions in C, handed by an author to what may call them from C."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

from aenv.runtime.preload.acts import CALLING_IN_PYTHON, gives_something_else


class Handed(NamedTuple):
    what: str
    to: str
    line: int


def handed(module: ModuleType, file: str, *, validated: bool) -> Iterator[Handed]:
    """The functions that a module hands on at its import. Pydantic's models count only when one was ``validated``."""
    for call in _calls(ast.parse(Path(file).read_bytes())):
        package = str(getattr(_meant(call.func, module), "__module__", "")).partition(".")[0]
        if package in CALLING_IN_PYTHON or (package == "pydantic" and not validated):
            continue
        for argument in (*call.args, *(keyword.value for keyword in call.keywords)):
            if gives_something_else(_meant(argument, module)):
                yield Handed(ast.unparse(argument), ast.unparse(call.func), argument.lineno)


def _calls(node: ast.AST) -> Iterator[ast.Call]:
    """The calls outside of functions' bodies."""
    for field, value in ast.iter_fields(node):
        if field == "body" and isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)):
            continue
        for child in value if isinstance(value, list) else [value]:
            if isinstance(child, ast.Call):
                yield child
            if isinstance(child, ast.AST):
                yield from _calls(child)


def _meant(node: ast.expr, module: ModuleType) -> Any:
    """What a dotted name at the top of a module means; None for anything else."""
    if isinstance(node, ast.Name):
        return vars(module).get(node.id)
    if isinstance(node, ast.Attribute):
        owner = _meant(node.value, module)
        if isinstance(owner, (ModuleType, type)):
            return getattr(owner, node.attr, None)
    return None
