"""From a project on disk to its functions: import the modules, gather the marks, check that they fit together."""

from __future__ import annotations

import contextlib
import importlib
import os
import re
import sys
import traceback
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

from aenv.errors import StartFailed
from aenv.project import Project
from aenv.runtime import registry, trusted
from aenv.runtime.agents import Agent
from aenv.runtime.conversations import Conversations
from aenv.runtime.foreign import Foreign
from aenv.runtime.functions import Function
from aenv.runtime.registry import Mark

RESERVED = (
    *("/mcp", "/health", "/task", "/functions", "/tools", "/reset", "/reseed", "/calls", "/info"),
    *(
        "/state",
        "/files",
        "/exec",
        "/history",
        "/ports",
        "/shell",
        "/specialise",
        "/delivery",
        "/openenv",
        "/children",
        "/a2a",
        "/.well-known",
    ),
)
"""First path segments that a function's own endpoint may not take."""
_AGENT = re.compile(r"[A-Za-z0-9_-]{1,64}")
_IMPORTING = ("<frozen importlib", importlib.__file__, __file__)
"""Where the frames of an import are that are not the author's."""


class Loaded:
    """An author's functions by what they are for."""

    def __init__(self, marks: Iterable[Mark], servers: Iterable[Any] = ()) -> None:
        self.tools: dict[str, Function] = {}
        self.agents: dict[str, Function] = {}
        """The tool by which each agent is talked to, by the agent's name."""
        self._agents: dict[str, Mark] = {}
        self.rewards: dict[str, Function] = {}
        self.functions: dict[str, Function] = {}
        self.endpoints: dict[tuple[str, str], Function] = {}
        """Functions with a path of their own, by method and path."""
        self.setups: list[Function] = []
        self.teardowns: list[Function] = []
        self.health: Function | None = None
        self.reset: Function | None = None
        self.turn: Function | None = None
        self.save: Function | None = None
        self.load: Function | None = None
        """Says where the environment is, and goes on from there. Both or none."""
        found = list(servers)
        if len(found) > 1:
            raise StartFailed(
                f"the project has {len(found)} MCP servers, and one sandbox serves one", hint="mount them"
            )
        self.server: Any = found[0] if found else None
        """An MCP server object of the author's own, FastMCP's or the official SDK's."""
        self.conversations = Conversations()
        for mark in marks:
            self._add(mark)
        self._add_agents()
        self._check_pair()
        self.players = self._players()
        """The names of several agents on one instance, where there are any."""

    def _players(self) -> tuple[str, ...]:
        found: dict[str, None] = {}
        for tool in self.tools.values():
            given = tool.mark.options.get("agents", ())
            if isinstance(given, str) or not all(isinstance(name, str) and _AGENT.fullmatch(name) for name in given):
                raise StartFailed(
                    f"{tool.mark.place}: agents of {tool.name}() are {given!r}",
                    hint="list names of letters, digits, '-' and '_'",
                )
            found.update(dict.fromkeys(given))
        if found and self.server is not None:
            raise StartFailed("the tools of an MCP server of your own cannot be those of several agents")
        if self.turn is not None and not found:
            raise StartFailed(
                f"{self.turn.mark.place}: {self.turn.name}() has @register_turn, and no tool has agents",
                hint="say whose tools they are: @register_tool(agents=[...])",
            )
        return tuple(found)

    def _add(self, mark: Mark) -> None:
        if mark.kind == "agent":
            if taken := self._agents.get(mark.name):
                raise _twice(mark.name, taken, mark)
            self._agents[mark.name] = mark
            return
        function = self._foreign(mark) if "listed" in mark.options else Function(mark)
        if mark.kind == "tool":
            _put(self.tools, function)
        elif mark.kind == "reward":
            _put(self.rewards, function)
        elif mark.kind == "function":
            if function.name == "list":
                raise StartFailed(f"{mark.place}: /functions/list is the runtime's own", hint="give it another name=")
            _put(self.functions, function)
            if endpoint := mark.options.get("endpoint"):
                self._add_endpoint(function, str(endpoint))
        elif mark.kind == "setup":
            self.setups.append(function)
        elif mark.kind == "teardown":
            self.teardowns.append(function)
        elif mark.kind == "health":
            self.health = _only(self.health, function)
        elif mark.kind == "turn":
            self.turn = _only(self.turn, function)
        elif mark.kind == "save":
            self.save = _only(self.save, function)
        elif mark.kind == "load":
            self.load = _only(self.load, function)
        else:
            self.reset = _only(self.reset, function)

    def _foreign(self, mark: Mark) -> Foreign:
        if self.server is not None:
            raise StartFailed(
                f"the project has an MCP server, and tool {mark.name!r} of another", hint="make a project of each"
            )
        return Foreign(mark)

    def _add_agents(self) -> None:
        for name, mark in self._agents.items():
            agent = Agent(mark, self.conversations)
            tools = list(agent.tools("" if len(self._agents) == 1 else f"{name}_"))
            self.agents[name] = tools[0]
            for function in tools:
                _put(self.tools, function)

    def _check_pair(self) -> None:
        if (self.save is None) != (self.load is None):
            one, other = ("save", "load") if self.load is None else ("load", "save")
            alone = self.save or self.load
            assert alone is not None
            raise StartFailed(
                f"{alone.mark.place}: {alone.name}() has @register_{one}, and nothing has @register_{other}",
                hint="what is saved must be loaded: register both",
            )
        if self.save is not None and self.save.arguments.schema.get("required"):
            raise StartFailed(
                f"{self.save.mark.place}: {self.save.name}() takes an argument",
                hint="it is given none, and may have a Context",
            )
        if self.load is not None and len(self.load.arguments.schema["properties"]) > 1:
            raise StartFailed(
                f"{self.load.mark.place}: {self.load.name}() takes more than one argument",
                hint="it is given what was saved, and may have a Context",
            )

    def _add_endpoint(self, function: Function, endpoint: str) -> None:
        path = "/" + endpoint.strip("/")
        if any(path == taken or path.startswith(taken + "/") for taken in RESERVED) or path == "/":
            raise StartFailed(
                f"{function.mark.place}: endpoint {path!r} of {function.name}() belongs to the runtime",
                hint=f"choose a path that does not begin with {', '.join(RESERVED)}",
            )
        key = (str(function.mark.options["method"]).upper(), path)
        if taken := self.endpoints.get(key):
            raise _twice(" ".join(key), taken.mark, function.mark)
        self.endpoints[key] = function


def _put(table: dict[str, Function], function: Function) -> None:
    if taken := table.get(function.name):
        raise _twice(function.name, taken.mark, function.mark)
    table[function.name] = function


def _only(taken: Function | None, function: Function) -> Function:
    if taken:
        raise _twice(function.name, taken.mark, function.mark)
    return function


def _twice(name: str, first: Mark, second: Mark) -> StartFailed:
    kind = second.kind
    hint = f"rename one, or give one a name: @register_{kind}(name=...)"
    if first.place == second.place:
        hint = "the file is imported under two names; import it the same way everywhere"
    elif kind in ("health", "reset", "save", "load", "turn"):
        hint = "keep one"
    return StartFailed(f"{kind} {name!r} is registered twice: {first.place} and {second.place}", hint=hint)


def load(project: Project) -> Loaded:
    """Import a project's modules and return what they registered. The author's traceback is in the error."""
    root = str(project.source)
    if root not in sys.path:
        sys.path.insert(0, root)
    trusted.leave_out(project.source, project.root)
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
    theirs = [
        (name, module)
        for name, module in sys.modules.items()
        if Path(_file_of(module) or _folder_of(module)).is_relative_to(project.source)
    ]
    for name, module in theirs:
        del sys.modules[name]
        # Bytecode is told from stale by the second and the size; an edit may change neither.
        if cached := getattr(module, "__cached__", None):
            with contextlib.suppress(OSError):
                os.unlink(cached)
    with contextlib.suppress(ValueError):
        sys.path.remove(str(project.source))
    trusted.take_back(project.source, project.root)


def _file_of(module: ModuleType) -> str:
    return getattr(module, "__file__", None) or ""


def _folder_of(module: ModuleType) -> str:
    """The first folder of a package without ``__init__.py``."""
    with contextlib.suppress(KeyError):  # its parent is no longer imported
        return next(iter(getattr(module, "__path__", ())), "")
    return ""


def source_files(source: Path) -> Iterator[Path]:
    """The modules of a project, in a stable order; tests and names that begin with '_' or '.' are not theirs."""
    for path in sorted(source.iterdir()):
        name = path.name if path.is_dir() else path.stem
        if name.startswith(("_", ".")) or not name.isidentifier():
            continue
        if path.is_dir():
            if name not in ("test", "tests"):
                package = path / "__init__.py"
                if package.is_file():
                    yield package
                yield from source_files(path)
        elif path.suffix == ".py" and not name.startswith("test_") and name not in ("conftest", "setup"):
            yield path


def _module_names(source: Path) -> Iterator[str]:
    if not source.is_dir():
        raise StartFailed(f"{source} is not a directory", hint="give the path of a project, as 'aenv init' makes it")
    for path in source_files(source):
        path = path.parent if path.stem == "__init__" else path.with_suffix("")  # noqa: PLW2901
        yield ".".join(path.relative_to(source).parts)


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
    trace = exc.__traceback__
    while trace and trace.tb_frame.f_code.co_filename.startswith(_IMPORTING):
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
