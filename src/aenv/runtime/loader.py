"""From a project on disk to its functions: import the modules, gather the marks, check that they fit together."""

from __future__ import annotations

import importlib
import importlib.util
import sys
import traceback
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

from aenv.errors import StartFailed
from aenv.project import Project
from aenv.runtime import registry
from aenv.runtime.functions import Function
from aenv.runtime.registry import Mark

RESERVED = ("/mcp", "/health", "/task", "/functions", "/tools", "/reset", "/calls")
"""First path segments that a function's own endpoint may not take."""


class Loaded:
    """An author's functions by what they are for."""

    def __init__(self, marks: Iterable[Mark], servers: Iterable[Any] = ()) -> None:
        self.tools: dict[str, Function] = {}
        self.rewards: dict[str, Function] = {}
        self.functions: dict[str, Function] = {}
        self.endpoints: dict[tuple[str, str], Function] = {}
        """Functions with a path of their own, by method and path."""
        self.setups: list[Function] = []
        self.teardowns: list[Function] = []
        self.health: Function | None = None
        self.reset: Function | None = None
        found = list(servers)
        if len(found) > 1:
            raise StartFailed(
                f"the project has {len(found)} MCP servers, and one sandbox serves one", hint="mount them"
            )
        self.server: Any = found[0] if found else None
        """An MCP server object of the author's own, FastMCP's or the official SDK's."""
        for mark in marks:
            self._add(mark)

    def _add(self, mark: Mark) -> None:
        function = Function(mark)
        if mark.kind in ("tool", "agent"):
            _put(self.tools, function)
        elif mark.kind == "reward":
            _put(self.rewards, function)
        elif mark.kind == "function":
            _put(self.functions, function)
            if endpoint := mark.options.get("endpoint"):
                self._add_endpoint(function, str(endpoint))
        elif mark.kind == "setup":
            self.setups.append(function)
        elif mark.kind == "teardown":
            self.teardowns.append(function)
        elif mark.kind == "health":
            self.health = _only(self.health, function)
        else:
            self.reset = _only(self.reset, function)

    def _add_endpoint(self, function: Function, endpoint: str) -> None:
        path = "/" + endpoint.strip("/")
        if any(path == taken or path.startswith(taken + "/") for taken in RESERVED) or path == "/":
            raise StartFailed(
                f"{function.mark.place}: endpoint {path!r} of {function.name}() belongs to the runtime",
                hint=f"choose a path that does not begin with {', '.join(RESERVED)}",
            )
        key = (str(function.mark.options["method"]).upper(), path)
        if taken := self.endpoints.get(key):
            raise _twice(" ".join(key), taken, function)
        self.endpoints[key] = function


def _put(table: dict[str, Function], function: Function) -> None:
    if taken := table.get(function.name):
        raise _twice(function.name, taken, function)
    table[function.name] = function


def _only(taken: Function | None, function: Function) -> Function:
    if taken:
        raise _twice(function.name, taken, function)
    return function


def _twice(name: str, first: Function, second: Function) -> StartFailed:
    kind = second.mark.kind
    return StartFailed(
        f"{kind} {name!r} is registered twice: {first.mark.place} and {second.mark.place}",
        hint=f"rename one, or give one a name: @register_{kind}(name=...)",
    )


def load(project: Project) -> Loaded:
    """Import a project's modules and return what they registered. The author's traceback is in the error."""
    root = str(project.source)
    if root not in sys.path:
        sys.path.insert(0, root)
    importlib.invalidate_caches()
    with registry.collect() as marks:
        modules = [_import(name, project.source) for name in _module_names(project.source)]
    loaded = Loaded(marks, {id(value): value for module in modules for value in _servers(module)}.values())
    if not (loaded.tools or loaded.functions or loaded.rewards or loaded.server):
        raise StartFailed(
            f"nothing is registered under {project.source}",
            hint="decorate a function with @register_tool in a .py file there",
        )
    return loaded


def unload(project: Project) -> None:
    """Forget a project's modules, so that ``load`` reads them again."""
    for name, module in list(sys.modules.items()):
        if _file_of(module) and Path(_file_of(module)).is_relative_to(project.source):
            del sys.modules[name]


def _file_of(module: ModuleType) -> str:
    return getattr(module, "__file__", None) or ""


def source_files(source: Path) -> Iterator[Path]:
    """The modules of a project, in a stable order; tests and names that begin with '_' or '.' are not theirs."""
    for path in sorted(source.iterdir()):
        if path.name.startswith(("_", ".")) or not path.stem.isidentifier():
            continue
        if path.is_dir():
            if path.name not in ("test", "tests"):
                yield from source_files(path)
        elif (
            path.suffix == ".py" and not path.name.startswith("test_") and path.name not in ("conftest.py", "setup.py")
        ):
            yield path


def _module_names(source: Path) -> Iterator[str]:
    if not source.is_dir():
        raise StartFailed(f"{source} is not a directory", hint="give the path of a project, as 'aenv init' makes it")
    for path in source_files(source):
        yield ".".join(path.relative_to(source).with_suffix("").parts)


def _import(name: str, source: Path) -> ModuleType:
    try:
        module = importlib.import_module(name)
    except (Exception, SystemExit) as exc:
        raise StartFailed(f"{name} failed to import:\n{_traceback(exc)}") from exc
    if not Path(_file_of(module)).is_relative_to(source):
        raise StartFailed(
            f"{source / name.replace('.', '/')}.py is hidden by another module of the same name ({_file_of(module)})",
            hint="rename the file",
        )
    return module


def _traceback(exc: BaseException) -> str:
    """The traceback from the author's own first line on."""
    if isinstance(exc, SyntaxError):
        return "".join(traceback.format_exception_only(exc)).rstrip()
    trace = exc.__traceback__
    while trace and ("importlib" in trace.tb_frame.f_code.co_filename or trace.tb_frame.f_code.co_filename == __file__):
        trace = trace.tb_next
    return "".join(traceback.format_exception(type(exc), exc, trace)).rstrip()


def _servers(module: ModuleType) -> Iterator[Any]:
    for value in vars(module).values():
        for cls in type(value).__mro__:
            if cls.__name__ in ("FastMCP", "MCPServer") and cls.__module__.split(".")[0] in (
                "mcp",
                "fastmcp",
            ):
                yield value
                break
