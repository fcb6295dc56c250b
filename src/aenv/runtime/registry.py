"""The decorators an author writes. They only mark: importing a project starts nothing and needs no server.

``collect`` gathers the marks made while a project is imported; ``runtime.loader`` makes them callable.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Literal, NamedTuple, TypeVar, overload

Kind = Literal["tool", "reward", "function", "health", "setup", "teardown", "reset", "save", "load", "turn", "agent"]
F = TypeVar("F", bound=Callable[..., Any])
A = TypeVar("A")


class Mark(NamedTuple):
    """One use of a decorator."""

    kind: Kind
    function: Callable[..., Any]
    name: str
    options: Mapping[str, Any]

    @property
    def place(self) -> str:
        """Where the function is written, as ``file:line``."""
        target: Any = self.function
        while inner := getattr(target, "__wrapped__", None) or getattr(target, "func", None):
            target = inner  # what a decorator wrapped, or a partial calls
        code = getattr(target, "__code__", None) or getattr(type(target).__call__, "__code__", None)
        return f"{code.co_filename}:{code.co_firstlineno}" if code else repr(self.function)


_marks: list[Mark] = []


def marks() -> list[Mark]:
    """Every mark made so far in this process."""
    return list(_marks)


@contextmanager
def collect() -> Iterator[list[Mark]]:
    """The marks made inside the block, complete when it ends; they are not left behind in ``marks()``."""
    global _marks
    outer, _marks = _marks, []
    try:
        yield _marks
    finally:
        _marks = outer


_stopping = False
"""Whether a script is being imported for its functions alone."""


class _Used(BaseException):
    """A script got to where it uses an environment: its functions are all marked by then."""


def stop_script() -> None:
    """Called where a script begins to use an environment. Ends its import when only its functions are wanted."""
    if _stopping:
        raise _Used


def load_script(path: str, name: str) -> None:
    """Import a script of the project for the functions it registers, up to where it uses an environment itself."""
    import sys
    from importlib.util import module_from_spec, spec_from_file_location
    from pathlib import Path

    global _stopping
    file = Path(sys._getframe(1).f_code.co_filename).parent.parent / path
    spec = spec_from_file_location(name, file)
    assert spec is not None
    assert spec.loader is not None
    module = module_from_spec(spec)
    sys.modules[name] = module
    sys.path.append(str(file.parent))
    _stopping = True
    try:
        spec.loader.exec_module(module)
    except _Used:
        pass
    finally:
        _stopping = False


def _mark(kind: Kind, function: F | None, name: str | None, **options: Any) -> F | Callable[[F], F]:
    def apply(target: F) -> F:
        if not callable(target) and not (kind == "agent" and name):
            raise TypeError(f"@register_{kind} goes on a function, not on {target!r}")
        found = name or getattr(target, "__name__", None)
        if not found or found == "<lambda>":
            raise TypeError(f"@register_{kind}: {target!r} has no name of its own, give one with name=")
        given = {key: value for key, value in options.items() if value is not None}
        _marks.append(Mark(kind, target, found, given))
        return target

    return apply if function is None else apply(function)


@overload
def register_tool(function: F, /) -> F: ...
@overload
def register_tool(
    *,
    name: str | None = None,
    title: str | None = None,
    description: str | None = None,
    annotations: Mapping[str, Any] | None = None,
    input_schema: Mapping[str, Any] | None = None,
    agents: Sequence[str] | None = None,
    anytime: bool | None = None,
) -> Callable[[F], F]: ...
def register_tool(
    function: F | None = None,
    /,
    *,
    name: str | None = None,
    title: str | None = None,
    description: str | None = None,
    annotations: Mapping[str, Any] | None = None,
    input_schema: Mapping[str, Any] | None = None,
    agents: Sequence[str] | None = None,
    anytime: bool | None = None,
) -> F | Callable[[F], F]:
    """Offer a function to the model as an MCP tool. Its signature and docstring become the schema.

    ``annotations`` are MCP's hints (``readOnlyHint``, ...). ``input_schema`` replaces the published schema;
    arguments are still validated against the signature. ``agents`` are those of several that have the tool, and it is
    only theirs; ``anytime`` lets them call it when it is not their turn.
    """
    return _mark(
        "tool",
        function,
        name,
        title=title,
        description=description,
        annotations=annotations,
        input_schema=input_schema,
        agents=agents,
        anytime=anytime,
    )


def register_foreign(listed: Mapping[str, Any], run: Callable[..., Any]) -> None:
    """Offer somebody else's tool, as MCP lists it. ``run`` is given the arguments as they came, and a ``Context``."""
    _marks.append(Mark("tool", run, str(listed["name"]), {"listed": dict(listed)}))


@overload
def register_agent(agent: A, /, *, name: str | None = None, description: str | None = None) -> A: ...
@overload
def register_agent(*, name: str | None = None, description: str | None = None) -> Callable[[A], A]: ...
def register_agent(agent: Any = None, /, *, name: str | None = None, description: str | None = None) -> Any:
    """Offer an agent to others: by MCP as the tool ``chat``, by A2A, and to a reward what was said.

    It is a function of a message that returns the answer, or yields its pieces as an async generator. Or an agent of
    OpenAI Agents, pydantic-ai, LangGraph or CAMEL: ``register_agent(agent, name="support")``.
    """
    return _mark("agent", agent, name, description=description)


@overload
def register_reward(function: F, /) -> F: ...
@overload
def register_reward(*, name: str | None = None) -> Callable[[F], F]: ...
def register_reward(function: F | None = None, /, *, name: str | None = None) -> F | Callable[[F], F]:
    """Score an episode: return a number, or a dict with ``score`` and whatever else is worth keeping."""
    return _mark("reward", function, name)


@overload
def register_function(function: F, /) -> F: ...
@overload
def register_function(
    *, name: str | None = None, endpoint: str | None = None, method: str = "POST"
) -> Callable[[F], F]: ...
def register_function(
    function: F | None = None,
    /,
    *,
    name: str | None = None,
    endpoint: str | None = None,
    method: str = "POST",
) -> F | Callable[[F], F]:
    """Serve a function over HTTP at ``/functions/<name>``, and at ``endpoint`` too when one is given."""
    return _mark("function", function, name, endpoint=endpoint, method=method)


def register_health(function: F) -> F:
    """Replace the default health check. Unhealthy: raise, return False, or a dict whose ``status`` says so."""
    _mark("health", function, None)
    return function


def register_setup(function: F) -> F:
    """Run once before the sandbox is ready. When it fails, the start fails."""
    _mark("setup", function, None)
    return function


def register_teardown(function: F) -> F:
    """Run once when the sandbox stops in good order."""
    _mark("teardown", function, None)
    return function


def register_reset(function: F) -> F:
    """Put the environment back to its beginning, or that of a task, for ``Environment.reset``. It may take ``seed``,
    and whatever else a task says in its ``reset``."""
    _mark("reset", function, None)
    return function


def register_turn(function: F) -> F:
    """Say whose turn it is of several agents: a name, several, or None. What the others call fails,
    and says whose turn it is."""
    _mark("turn", function, None)
    return function


def register_save(function: F) -> F:
    """Say what another sandbox must know to go on in the place of this one, beside the files: whatever JSON can carry,
    or bytes. It raises ``Unsupported`` where nothing that it could say would do."""
    _mark("save", function, None)
    return function


def register_load(function: F) -> F:
    """Go on from what the function of ``register_save`` returned, its one argument. The files are in place by then."""
    _mark("load", function, None)
    return function
