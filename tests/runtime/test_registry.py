"""The decorators: they mark and change nothing."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

import pytest

from aenv.runtime import registry

WITH_OPTIONS = {
    "tool": (registry.register_tool, {"name": "n", "title": "t", "description": "d", "annotations": {"x": 1}}),
    "agent": (registry.register_agent, {"name": "n", "description": "d"}),
    "reward": (registry.register_reward, {"name": "n"}),
    "function": (registry.register_function, {"name": "n", "endpoint": "/e", "method": "GET"}),
}
BARE = {
    **{kind: decorator for kind, (decorator, _) in WITH_OPTIONS.items()},
    "health": registry.register_health,
    "setup": registry.register_setup,
    "teardown": registry.register_teardown,
    "reset": registry.register_reset,
}


def work(a: int, b: int = 2) -> int:
    """Add."""
    return a + b


LINE = inspect.getsourcelines(work)[1]


@pytest.mark.parametrize("kind", BARE)
def test_bare(kind: str) -> None:
    with registry.collect() as marks:
        marked = BARE[kind](work)
    assert marked is work
    assert marked(1) == 3
    assert [(mark.kind, mark.function, mark.name) for mark in marks] == [(kind, work, "work")]


@pytest.mark.parametrize("kind", WITH_OPTIONS)
def test_with_options(kind: str) -> None:
    decorator, options = WITH_OPTIONS[kind]
    with registry.collect() as marks:
        marked = decorator(**options)(work)  # type: ignore[operator]
    assert marked is work
    (mark,) = marks
    assert mark.name == "n"
    assert mark.options == {key: value for key, value in options.items() if key != "name"}


@pytest.mark.parametrize("kind", WITH_OPTIONS)
def test_with_no_options(kind: str) -> None:
    with registry.collect() as marks:
        assert WITH_OPTIONS[kind][0]()(work) is work  # type: ignore[operator]
    assert marks[0].name == "work"


async def later() -> str:
    return "later"


async def test_an_async_function_stays_one() -> None:
    with registry.collect():
        assert await registry.register_tool(later)() == "later"


def test_one_function_may_have_two_names() -> None:
    with registry.collect() as marks:
        registry.register_tool(name="b")(registry.register_tool(name="a")(work))
    assert [mark.name for mark in marks] == ["a", "b"]


def test_collect_leaves_nothing_behind_even_when_it_fails() -> None:
    before = registry.marks()
    with registry.collect() as marks:
        registry.register_tool(work)
        with pytest.raises(TypeError), registry.collect():
            registry.register_tool(name="inner")(5)  # type: ignore[type-var]
        registry.register_tool(name="after")(work)
    assert registry.marks() == before
    assert [mark.name for mark in marks] == ["work", "after"]


def test_outside_of_collect_marks_are_kept() -> None:
    with registry.collect() as marks:
        registry.register_tool(work)
        assert registry.marks() == marks
        assert registry.marks() is not marks


@pytest.mark.parametrize("kind", BARE)
@pytest.mark.parametrize("target", ["name", 5, {}, classmethod(work)], ids=lambda value: type(value).__name__)
def test_on_something_that_cannot_be_called(kind: str, target: Any) -> None:
    with registry.collect() as marks, pytest.raises(TypeError, match=f"@register_{kind} goes on a function"):
        BARE[kind](target)
    assert marks == []


@pytest.mark.parametrize("target", [functools.partial(work), lambda: 1], ids=["partial", "lambda"])
def test_without_a_name_of_its_own(target: Callable[..., Any]) -> None:
    with registry.collect() as marks:
        with pytest.raises(TypeError, match="give one with name="):
            registry.register_tool(target)
        assert registry.register_tool(name="given")(target) is target
    assert [mark.name for mark in marks] == ["given"]


def loud(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs)

    return wrapper


class Worker:
    def __call__(self) -> None: ...


@pytest.mark.parametrize(
    ("function", "line"),
    [
        (work, LINE),
        (loud(work), LINE),
        (loud(loud(work)), LINE),
        (functools.partial(work), LINE),
        (functools.partial(loud(work)), LINE),
        (functools.lru_cache(work), LINE),
        (staticmethod(work), LINE),
        (Worker(), inspect.getsourcelines(Worker.__call__)[1]),
        (Worker().__call__, inspect.getsourcelines(Worker.__call__)[1]),
    ],
    ids=lambda value: type(value).__name__,
)
def test_the_place_is_where_the_author_wrote_it(function: Callable[..., Any], line: int) -> None:
    assert registry.Mark("tool", function, "n", {}).place == f"{__file__}:{line}"


def test_the_place_of_something_not_written_in_python() -> None:
    assert registry.Mark("tool", len, "n", {}).place == repr(len)
