"""Schemas and validation from a signature: every kind of argument and result, and what is said of a wrong one."""

# ruff: noqa: UP007, UP045, B008 - every way of writing a type and a default is an author's

from __future__ import annotations

import dataclasses
import datetime
import decimal
import enum
import functools
import json
import math
import pathlib
import typing
import uuid
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any, Literal, NamedTuple, Optional, Union

import jsonschema
import numpy as np
import pytest
import typing_extensions
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel, Field, RootModel, computed_field, field_validator

from aenv.errors import AuthorError, Invalid, StartFailed
from aenv.models import Image, ToolResult
from aenv.runtime import docstrings
from aenv.runtime.context import Context
from aenv.runtime.schema import Arguments, Result


class Colour(enum.Enum):
    RED = "red"
    GREEN = "green"


class Level(enum.IntEnum):
    LOW = 1


class Item(BaseModel):
    name: str
    price: float = Field(0, ge=0)


class Tree(BaseModel):
    value: int
    left: Tree | None = None


class Aliased(BaseModel):
    my_name: str = Field(alias="myName")


class Written(BaseModel):
    side: int

    @computed_field  # type: ignore[prop-decorator]
    @property
    def area(self) -> int:
        return self.side**2


class Numbers(RootModel[list[int]]):
    pass


class Picky(BaseModel):
    name: str

    @field_validator("name")
    @classmethod
    def known(cls, name: str) -> str:
        return {"a": "A"}[name]


@dataclasses.dataclass
class Point:
    x: int
    y: float = 0.0


@dataclasses.dataclass
class Line:
    start: Point
    points: list[Point] = dataclasses.field(default_factory=list)
    item: Item | None = None


LINE = {"start": {"x": 1, "y": 0.0}, "points": [{"x": 2, "y": 0.0}], "item": None}
"""A line of two points, as JSON."""


class Movie(typing_extensions.TypedDict, total=False):
    title: str


class Film(typing.TypedDict):
    """A film."""

    title: str
    year: typing.NotRequired[int]


class Series(Film, total=False):
    parts: list[Film]
    spin_off: Series


class Pair(NamedTuple):
    first: int
    second: str = "b"


class Unknown:
    """JSON has no form for this."""


def arguments(function: Callable[..., Any]) -> Arguments:
    found = Arguments(function, docstrings.parse(function.__doc__))
    jsonschema.Draft202012Validator.check_schema(found.schema)
    json.dumps(found.schema, allow_nan=False)
    return found


def taking(hint: Any, *default: Any) -> Callable[..., Any]:
    """A function with one parameter ``value`` of that type."""

    def function(value: Any) -> None: ...

    function.__annotations__ = {"value": hint}
    function.__defaults__ = default
    return function


def returning(hint: Any) -> Callable[[], Any]:
    def function() -> Any: ...

    function.__annotations__ = {"return": hint}
    return function


def decode(function: Callable[..., Any], **given: Any) -> dict[str, Any]:
    return arguments(function).decode(json.dumps(given).encode())


def refusal(function: Callable[..., Any], body: bytes) -> str:
    with pytest.raises(Invalid) as caught:
        arguments(function).decode(body)
    return caught.value.message


# Arguments in.


@pytest.mark.parametrize(
    ("hint", "schema"),
    [
        (str, {"type": "string"}),
        (int, {"type": "integer"}),
        (float, {"type": "number"}),
        (bool, {"type": "boolean"}),
        (list, {"type": "array", "items": {}}),
        (list[int], {"type": "array", "items": {"type": "integer"}}),
        (dict, {"type": "object", "additionalProperties": True}),
        (dict[str, int], {"type": "object", "additionalProperties": {"type": "integer"}}),
        (Optional[int], {"anyOf": [{"type": "integer"}, {"type": "null"}]}),
        (int | None, {"anyOf": [{"type": "integer"}, {"type": "null"}]}),
        (Union[int, str], {"anyOf": [{"type": "integer"}, {"type": "string"}]}),
        (Literal["a", "b"], {"enum": ["a", "b"], "type": "string"}),
        (Literal["a"], {"const": "a", "type": "string"}),
        (datetime.datetime, {"type": "string", "format": "date-time"}),
        (datetime.date, {"type": "string", "format": "date"}),
        (datetime.timedelta, {"type": "string", "format": "duration"}),
        (pathlib.Path, {"type": "string", "format": "path"}),
        (uuid.UUID, {"type": "string", "format": "uuid"}),
        (Annotated[int, Field(ge=1, le=9)], {"type": "integer", "minimum": 1, "maximum": 9}),
        (Annotated[str, Field(pattern="^a", description="d")], {"type": "string", "pattern": "^a", "description": "d"}),
        (Any, {}),
        (object, {}),
        (typing.TypeVar("T"), {}),
        (set[int], {"type": "array", "items": {"type": "integer"}, "uniqueItems": True}),
    ],
)  # fmt: skip
def test_the_schema_of_a_type(hint: Any, schema: dict[str, Any]) -> None:
    found = arguments(taking(hint)).schema
    assert found == {
        "type": "object",
        "properties": {"value": schema},
        "required": ["value"],
        "additionalProperties": False,
    }


@pytest.mark.parametrize(
    ("hint", "given", "received"),
    [
        (str, "a", "a"),
        (int, 5, 5),
        (int, "5", 5),
        (int, 5.0, 5),
        (int, 10**30, 10**30),
        (float, 1, 1.0),
        (float, "1.5", 1.5),
        (bool, "true", True),
        (bool, 0, False),
        (list[int], ["1", 2], [1, 2]),
        (list[Item], [{"name": "a"}], [Item(name="a")]),
        (dict[str, Point], {"a": {"x": 1}}, {"a": Point(1)}),
        (Optional[int], None, None),
        (Union[int, str], "5", "5"),
        (Union[Item, Tree], {"value": 1}, Tree(value=1)),
        (Literal["a", 1], 1, 1),
        (Colour, "red", Colour.RED),
        (Level, 1, Level.LOW),
        (Item, {"name": "a", "price": "1.5"}, Item(name="a", price=1.5)),
        (Tree, {"value": 1, "left": {"value": 2}}, Tree(value=1, left=Tree(value=2))),
        (Line, {"start": {"x": 1}, "points": [{"x": 2, "y": 3}]}, Line(Point(1), [Point(2, 3.0)])),
        (Movie, {}, {}),
        (Film, {"title": "a"}, {"title": "a"}),
        (Film, {"title": "a", "year": "1999"}, {"title": "a", "year": 1999}),
        (Optional[Film], None, None),
        (list[Annotated[Film, "x"]], [{"title": "a"}], [{"title": "a"}]),
        (Series, {"title": "a", "parts": [{"title": "b"}]}, {"title": "a", "parts": [{"title": "b"}]}),
        (Series, {"title": "a", "spin_off": {"title": "b"}}, {"title": "a", "spin_off": {"title": "b"}}),
        (Pair, [1], Pair(1)),
        (Pair, {"first": 1, "second": "c"}, Pair(1, "c")),
        (tuple[int, str], [1, "a"], (1, "a")),
        (pathlib.Path, "/a", pathlib.Path("/a")),
        (uuid.UUID, str(uuid.UUID(int=5)), uuid.UUID(int=5)),
        (decimal.Decimal, "1.50", decimal.Decimal("1.50")),
        (datetime.date, "2024-02-29", datetime.date(2024, 2, 29)),
        (Annotated[int, Field(ge=1)], 1, 1),
        (Any, {"a": [None]}, {"a": [None]}),
    ],
)
def test_what_a_function_receives(hint: Any, given: Any, received: Any) -> None:
    found = arguments(taking(hint)).decode(json.dumps({"value": given}).encode())["value"]
    assert found == received
    assert type(found) is type(received)


@pytest.mark.parametrize(
    ("hint", "given", "where", "expected"),
    [
        (int, "x", "'value'", "valid integer"),
        (int, 1.5, "'value'", "valid integer"),
        (int, None, "'value'", "valid integer"),
        (str, 5, "'value'", "valid string"),
        (bool, "maybe", "'value'", "valid boolean"),
        (list[int], [1, "x"], "'value.1'", "valid integer"),
        (list[int], "1", "'value'", "valid array"),
        (dict[str, int], {"k": "x"}, "'value.k'", "valid integer"),
        (Literal["a", "b"], "c", "'value'", "'a' or 'b'"),
        (Colour, "blue", "'value'", "'red' or 'green'"),
        (Item, {"price": 1}, "'value.name'", "is missing"),
        (Item, {"name": "a", "price": -1}, "'value.price'", "greater than or equal to 0"),
        (Tree, {"value": 1, "left": {"value": "x"}}, "'value.left.value'", "valid integer"),
        (Line, {"start": {"x": 1}, "points": [{"x": "q"}]}, "'value.points.0.x'", "valid integer"),
        (Film, {"title": "a", "year": "x"}, "'value.year'", "valid integer"),
        (Film, {}, "'value.title'", "is missing"),
        (Union[int, list[int]], "x", "'value.int'", "valid integer"),
        (Annotated[int, Field(ge=3)], 1, "'value'", "greater than or equal to 3"),
        (datetime.datetime, "soon", "'value'", "valid datetime"),
        (uuid.UUID, "x", "'value'", "valid UUID"),
        (Picky, {"name": "zz"}, "function", "KeyError: 'zz'"),
    ],
)
def test_a_refusal_names_the_argument_and_what_was_expected(hint: Any, given: Any, where: str, expected: str) -> None:
    message = refusal(taking(hint), json.dumps({"value": given}).encode())
    assert message.startswith("function: ")
    assert where in message
    assert expected in message


def test_several_faults_are_told_at_once() -> None:
    def buy(item: Item, count: int, colour: Colour = Colour.RED) -> None: ...

    message = refusal(buy, b'{"item": {"price": "x"}, "colour": "blue", "colur": 1}')
    for part in (
        "argument 'item.name' is missing",
        "argument 'item.price': input should be a valid number",
        "found 'x'",
        "argument 'count' is missing",
        "argument 'colour': input should be 'red' or 'green', found 'blue'",
        "there is no argument 'colur'",
    ):
        assert part in message


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        (b"", "Invalid JSON"),
        (b"{", "Invalid JSON"),
        (b"\xff", "Invalid JSON"),
        (b'{"value": "\\ud800"}', "Invalid JSON"),
        (b"[" * 10_000, "Invalid JSON"),
        (b'{"value": %s}' % (b"9" * 5000), "Invalid JSON"),
        (b"[]", "should be an object"),
        (b"null", "should be an object"),
        (b'"text"', "should be an object"),
    ],
)
def test_a_body_that_is_no_object(body: bytes, expected: str) -> None:
    assert expected in refusal(taking(int), body)


def test_a_refusal_stays_short_whatever_was_sent() -> None:
    many = json.dumps({"value": ["x"] * 5000, "k" * 5000: 1}).encode()
    message = refusal(taking(list[int]), many)
    assert len(message) < 2000
    assert "and 4991 more" in message
    assert len(refusal(taking(int), json.dumps({"value": "x" * 5000}).encode())) < 300


def test_names_that_other_tools_reserve_are_ordinary_here() -> None:
    def function(
        schema: int, json: str, self: int, cls: int, copy: bool, _private: int, model_x: float, validate: int,
        items: int, keys: int, fields: int, type: str, return_: int,
    ) -> None: ...  # fmt: skip

    given: dict[str, Any] = {
        "schema": 1, "json": "a", "self": 2, "cls": 3, "copy": True, "_private": 4, "model_x": 0.5, "validate": 5,
        "items": 6, "keys": 7, "fields": 8, "type": "t", "return_": 9,
    }  # fmt: skip
    assert set(arguments(function).schema["properties"]) == set(given)
    assert decode(function, **given) == given


@pytest.mark.parametrize(
    ("hint", "default", "shown"),
    [
        (int, 3, 3),
        (list[int], [], []),
        (dict, {"a": 1}, {"a": 1}),
        (Optional[int], None, None),
        (int, None, None),
        (Colour, Colour.GREEN, "green"),
        (Item, Item(name="a"), {"name": "a", "price": 0.0}),
        (Point, Point(1), {"x": 1, "y": 0.0}),
        (pathlib.Path, pathlib.Path("/a"), "/a"),
        (Aliased, Aliased(myName="a"), {"myName": "a"}),
    ],
)
def test_a_default_is_shown_and_left_to_the_function(hint: Any, default: Any, shown: Any) -> None:
    found = arguments(taking(hint, default))
    assert "required" not in found.schema
    assert found.schema["properties"]["value"]["default"] == shown
    assert found.decode(b"{}") == {}


@pytest.mark.parametrize("default", [math.nan, math.inf, [1.0, -math.inf], Unknown(), b"\xff"])
def test_a_default_without_a_json_form_is_not_shown(default: Any) -> None:
    found = arguments(taking(Any, default))
    assert found.schema["properties"] == {"value": {}}
    assert found.decode(b"{}") == {}


def test_pydantic_fields_as_defaults() -> None:
    def function(
        count: int = Field(3, ge=1),
        names: list[str] = Field(default_factory=list),
        shared: list[str] = Field([]),
        needed: str = Field(description="say what"),
        dotted: int = Field(..., le=5),
        renamed: int = Field(7, alias="re-named"),
    ) -> None:
        """Do.

        Args:
            count: how many
        """

    found = arguments(function)
    assert set(found.schema["required"]) == {"needed", "dotted"}
    count = found.schema["properties"]["count"]
    assert count == {"type": "integer", "minimum": 1, "default": 3, "description": "how many"}
    assert found.schema["properties"]["needed"] == {"type": "string", "description": "say what"}
    assert found.schema["properties"]["re-named"]["default"] == 7
    first = found.decode(b'{"needed": "a", "dotted": "5"}')
    assert first == {"count": 3, "names": [], "shared": [], "needed": "a", "dotted": 5, "renamed": 7}
    first["names"].append("kept")
    first["shared"].append("kept")
    second = found.decode(b'{"needed": "a", "dotted": 5, "re-named": 8}')
    assert (second["names"], second["shared"], second["renamed"]) == ([], [], 8)
    assert "'count'" in refusal(function, b'{"needed": "a", "dotted": 1, "count": 0}')


def test_descriptions_come_from_the_docstring() -> None:
    def function(plain: int, told: Annotated[int, Field(description="in the annotation")], item: Item) -> None:
        """Do.

        Args:
            plain: in the docstring
            item: a thing
        """

    properties = arguments(function).schema["properties"]
    assert properties["plain"]["description"] == "in the docstring"
    assert properties["told"]["description"] == "in the annotation"
    assert properties["item"]["description"] == "a thing"


@pytest.mark.parametrize(
    ("hint", "names"),
    [
        (Item, {"Item"}),
        (list[Tree], {"Tree"}),
        (Line, {"Line", "Point", "Item"}),
        (Film, {"Film"}),
        (Series, {"Series", "Film"}),
    ],
)
def test_nested_types_are_definitions(hint: Any, names: set[str]) -> None:
    assert set(arguments(taking(hint)).schema["$defs"]) == names


def test_a_typed_dict_keeps_what_it_requires_and_says() -> None:
    definitions = arguments(taking(Series)).schema["$defs"]
    assert definitions["Film"]["required"] == ["title"]
    assert definitions["Film"]["description"] == "A film."
    assert definitions["Series"]["required"] == ["title"]


def test_no_annotation_takes_anything() -> None:
    def function(value, *, named=None): ...  # type: ignore[no-untyped-def]

    assert decode(function, value=[1], named={"a": 1}) == {"value": [1], "named": {"a": 1}}


def test_keyword_arguments_beyond_the_named_ones() -> None:
    def function(first: int, **rest: Any) -> None: ...

    found = arguments(function)
    assert found.schema["additionalProperties"] is True
    assert set(found.schema["properties"]) == {"first"}
    assert found.decode(b'{"first": "1", "other": [2]}') == {"first": 1, "other": [2]}


# Context.


@pytest.mark.parametrize(
    "hint",
    [Context, Optional[Context], Context | None, Annotated[Context, "x"], Annotated[Context | None, "x"], "Context"],
)
def test_a_context_is_not_an_argument(hint: Any) -> None:
    found = arguments(taking(hint, None))
    assert found.context == "value"
    assert found.schema["properties"] == {}
    assert "there is no argument 'value'" in refusal(taking(hint, None), b'{"value": 1}')


def test_a_context_may_be_keyword_only() -> None:
    def function(x: int, *, ctx: Context) -> None: ...

    found = arguments(function)
    assert (found.context, found.schema["required"]) == ("ctx", ["x"])


def test_two_contexts_are_one_too_many() -> None:
    def function(one: Context, two: Context) -> None: ...

    with pytest.raises(StartFailed, match=r"function\(\): both 'one' and 'two'"):
        arguments(function)


# What can be registered.


def add(a: int, b: int = 1) -> int:
    """Add."""
    return a + b


class Adder:
    unrelated: str = "an annotation of the class"

    def __call__(self, a: int, b: int = 1) -> int:
        return a + b

    def method(self, a: int, b: int = 1) -> int:
        return a + b

    @classmethod
    def of_class(cls, a: int, b: int = 1) -> int:
        return a + b

    @staticmethod
    def of_nobody(a: int, b: int = 1) -> int:
        return a + b


class Made:
    def __init__(self, a: int, b: int = 1) -> None:
        self.sum = a + b


def loud(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs)

    return wrapper


@pytest.mark.parametrize(
    "function",
    [
        add,
        loud(add),
        loud(loud(add)),
        functools.lru_cache(add),
        functools.partial(add),
        functools.partial(add, b=1),
        functools.partial(functools.partial(add), b=1),
        functools.partial(lambda c, a, b=1: a, 0),
        Adder(),
        functools.partial(Adder()),
        Adder().method,
        Adder.of_class,
        Adder.of_nobody,
        Adder.__dict__["of_nobody"],
        Made,
    ],
    ids=lambda function: type(function).__name__,
)
def test_whatever_can_be_called_can_be_described(function: Callable[..., Any]) -> None:
    found = Arguments(function, docstrings.parse(None))
    jsonschema.Draft202012Validator.check_schema(found.schema)
    assert list(found.schema["properties"]) == ["a", "b"]
    assert found.schema["required"] == ["a"]
    assert found.schema["properties"]["b"]["default"] == 1
    assert found.decode(b'{"a": 2}') == {"a": 2}
    assert function(**found.decode(b'{"a": 2, "b": 3}')) is not None


@pytest.mark.parametrize(
    "function",
    [add, loud(add), functools.partial(add), Adder(), Adder().method, Adder.__dict__["of_nobody"], Made],
    ids=lambda function: type(function).__name__,
)
def test_arguments_are_validated_whatever_is_called(function: Callable[..., Any]) -> None:
    with pytest.raises(Invalid, match="argument 'a': input should be a valid integer"):
        Arguments(function, docstrings.parse(None)).decode(b'{"a": "x"}')


def positional_only(value: int, /) -> None: ...


def variadic(*values: int) -> None: ...


def context_by_position(ctx: Context, /) -> None: ...


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (taking(Unknown), r"function\(\): parameter 'value' .*Unknown"),
        (taking(list[Unknown]), r"function\(\): parameter 'value' .*Unknown"),
        (taking(Unknown, None), r"function\(\): parameter 'value' .*Unknown"),
        (taking(list[Context]), r"function\(\): parameter 'value' .*Context"),
        (taking(Callable[[int], int]), r"function\(\): parameter 'value' "),
        (taking(type), r"function\(\): parameter 'value' "),
        (taking(typing.Iterator[int]), r"function\(\): parameter 'value' "),
        (taking("AnUnknownName"), r"annotations of function\(\) .*AnUnknownName"),
        (taking("no such syntax"), r"annotations of function\(\) "),
        (taking("math.no_such_attribute"), r"annotations of function\(\) .*no_such_attribute"),
        (functools.partial(taking("AnUnknownName")), r"annotations of function\(\) "),
        (positional_only, r"positional_only\(\): parameter 'value' can only be given by position"),
        (variadic, r"variadic\(\): parameter 'values' can only be given by position"),
        (context_by_position, r"context_by_position\(\): parameter 'ctx' can only be given by position"),
        (int, r"int\(\): its parameters cannot be read"),
    ],
)
def test_what_cannot_be_served_fails_the_start(function: Callable[..., Any], message: str) -> None:
    with pytest.raises(StartFailed, match=message) as caught:
        Arguments(function, docstrings.parse(None))
    assert caught.value.hint
    assert "\n" not in caught.value.message


# Text, as in the query of a GET.


def search(q: str, limit: int = 5, exact: bool = False, ratio: float | None = None, colour: Colour | None = None): ...


@pytest.mark.parametrize(
    ("given", "received"),
    [
        ({"q": "5"}, {"q": "5"}),
        ({"q": "", "limit": "7"}, {"q": "", "limit": 7}),
        ({"q": "a", "exact": "true"}, {"q": "a", "exact": True}),
        ({"q": "a", "exact": "0"}, {"q": "a", "exact": False}),
        ({"q": "a", "ratio": "0.5"}, {"q": "a", "ratio": 0.5}),
        ({"q": "a", "colour": "red"}, {"q": "a", "colour": Colour.RED}),
    ],
)
def test_text_is_coerced(given: dict[str, str], received: dict[str, Any]) -> None:
    assert arguments(search).decode(given, text=True) == received


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({}, "argument 'q' is missing"),
        ({"q": "a", "limit": "many"}, "argument 'limit': input should be a valid integer"),
        ({"q": "a", "limit": ""}, "argument 'limit'"),
        ({"q": "a", "exact": "perhaps"}, "argument 'exact': input should be a valid boolean"),
        ({"q": "a", "page": "1"}, "there is no argument 'page'"),
    ],
)
def test_text_that_does_not_fit(given: dict[str, str], message: str) -> None:
    with pytest.raises(Invalid) as caught:
        arguments(search).decode(given, text=True)
    assert message in caught.value.message


# Values come through as they are.

_TEXT = st.text(st.characters(exclude_categories=["Cs"]))
_SIMPLE: dict[Any, st.SearchStrategy[Any]] = {
    str: _TEXT,
    int: st.integers(),
    float: st.floats(allow_nan=False, allow_infinity=False),
    bool: st.booleans(),
    list[int]: st.lists(st.integers()),
    list[str]: st.lists(_TEXT),
    dict[str, float]: st.dictionaries(_TEXT, st.floats(allow_nan=False, allow_infinity=False)),
    Optional[int]: st.none() | st.integers(),
    Literal["a", "b"]: st.sampled_from(["a", "b"]),
    tuple[int, str]: st.tuples(st.integers(), _TEXT),
}
_READY = {hint: arguments(taking(hint)) for hint in _SIMPLE}


@given(st.sampled_from(list(_SIMPLE)).flatmap(lambda hint: st.tuples(st.just(hint), _SIMPLE[hint])))
def test_values_of_simple_types_come_through_unchanged(case: tuple[Any, Any]) -> None:
    hint, value = case
    found = _READY[hint]
    body = json.dumps({"value": value})
    jsonschema.validate(json.loads(body), found.schema, cls=jsonschema.Draft202012Validator)
    received = found.decode(body.encode())["value"]
    assert received == value
    assert type(received) is type(value)


# Results out.


def published(result: Result, value: Any) -> Any:
    """What a client would get as structured content."""
    returned = result.check(value)
    raw = json.loads(returned.json) if returned.json else returned.value
    return {"result": raw} if result.wrapped else raw


@pytest.mark.parametrize(
    ("hint", "value", "structured"),
    [
        (int, 5, {"result": 5}),
        (int, Level.LOW, {"result": 1}),
        (int, np.int64(5), {"result": 5}),
        (int, 10**30, {"result": 10**30}),
        (float, 1, {"result": 1}),
        (float, 0.5, {"result": 0.5}),
        (float, np.float32(0.5), {"result": 0.5}),
        (bool, True, {"result": True}),
        (bool, np.bool_(False), {"result": False}),
        (dict, {}, {}),
        (dict, {"a": [1]}, {"a": [1]}),
        (dict[str, Any], {"a": 1}, {"a": 1}),
        (dict[str, int], {"a": "1"}, {"a": 1}),
        (dict[str, Item], {"a": Item(name="x")}, {"a": {"name": "x", "price": 0.0}}),
        (dict[str, float], {"a": np.float32(0.5)}, {"a": 0.5}),
        (dict[int, int], {1: 2}, {"1": 2}),
        (list, [1, "a"], {"result": [1, "a"]}),
        (list, np.array([1, 2]), {"result": [1, 2]}),
        (list[int], [1], {"result": [1]}),
        (list[int], (1,), {"result": [1]}),
        (list[int], np.array([1]), {"result": [1]}),
        (list[Item], [{"name": "x"}], {"result": [{"name": "x", "price": 0.0}]}),
        (tuple, [1, "a"], {"result": [1, "a"]}),
        (tuple[int, str], (1, "a"), {"result": [1, "a"]}),
        (Pair, Pair(1), {"result": [1, "b"]}),
        (set[int], {1}, {"result": [1]}),
        (Item, Item(name="x"), {"name": "x", "price": 0.0}),
        (Item, {"name": "x"}, {"name": "x", "price": 0.0}),
        (Aliased, Aliased(myName="x"), {"myName": "x"}),
        (Written, Written(side=3), {"side": 3, "area": 9}),
        (Numbers, Numbers([1]), {"result": [1]}),
        (Tree, Tree(value=1, left=Tree(value=2)), {"value": 1, "left": {"value": 2, "left": None}}),
        (Point, Point(1), {"x": 1, "y": 0.0}),
        (Point, Point(1, 2), {"x": 1, "y": 2.0}),
        (Point, Point("1"), {"x": 1, "y": 0.0}),  # type: ignore[arg-type]
        (Line, Line(Point(1), (Point(2),)), LINE),  # type: ignore[arg-type]
        (Movie, {"title": "a"}, {"title": "a"}),
        (Film, {"title": "a"}, {"title": "a"}),
        (Series, {"title": "a", "parts": [{"title": "b"}]}, {"title": "a", "parts": [{"title": "b"}]}),
        (Optional[Item], Item(name="x"), {"result": {"name": "x", "price": 0.0}}),
        (Optional[Item], None, {"result": None}),
        (Optional[str], None, {"result": None}),
        (Optional[str], "a", {"result": "a"}),
        (Union[Item, Tree], Tree(value=1), {"result": {"value": 1, "left": None}}),
        (Union[Item, Tree], Item(name="x"), {"result": {"name": "x", "price": 0.0}}),
        (Union[int, str], "5", {"result": "5"}),
        (Colour, Colour.RED, {"result": "red"}),
        (Level, Level.LOW, {"result": 1}),
        (Literal["a", "b"], "a", {"result": "a"}),
        (Annotated[int, Field(ge=3)], 3, {"result": 3}),
        (datetime.date, datetime.date(2024, 2, 29), {"result": "2024-02-29"}),
        (uuid.UUID, uuid.UUID(int=5), {"result": str(uuid.UUID(int=5))}),
        (pathlib.Path, pathlib.Path("/a"), {"result": "/a"}),
        (decimal.Decimal, decimal.Decimal("1.50"), {"result": "1.50"}),
        (Sequence[int], (1, 2), {"result": [1, 2]}),
        (Mapping[str, int], {"a": 1}, {"a": 1}),
    ],
)  # fmt: skip
def test_what_is_sent_fits_the_published_schema(hint: Any, value: Any, structured: Any) -> None:
    result = Result(returning(hint))
    assert result.schema is not None
    assert result.schema["type"] == "object"
    jsonschema.Draft202012Validator.check_schema(result.schema)
    found = published(result, value)
    assert found == structured
    jsonschema.validate(found, result.schema, cls=jsonschema.Draft202012Validator)


@pytest.mark.parametrize(
    ("hint", "value", "declared", "returned"),
    [
        (int, "5", "int", "str"),
        (int, 1.5, "int", "float"),
        (int, True, "int", "bool"),
        (int, False, "int", "bool"),
        (int, None, "int", "NoneType"),
        (float, False, "float", "bool"),
        (float, "1", "float", "str"),
        (bool, 1, "bool", "int"),
        (str, 5, "str", "int"),
        (str, None, "str", "NoneType"),
        (dict, [], "dict", "list"),
        (dict[str, Any], None, "dict[str, Any]", "NoneType"),
        (list, {1}, "list", "set"),
        (list[int], ["x"], "list[int]", "list"),
        (list[str], "abc", "list[str]", "str"),
        (dict[str, int], {"a": "x"}, "dict[str, int]", "dict"),
        (Item, Tree(value=1), "Item", "Tree"),
        (Item, {}, "Item", "dict"),
        (Item, None, "Item", "NoneType"),
        (Item, Item.model_construct(name=5), "Item", "Item"),
        (Picky, {"name": "zz"}, "Picky", "dict"),
        (Point, Point("x"), "Point", "Point"),  # type: ignore[arg-type]
        (Film, {"year": 1}, "Film", "dict"),
        (Colour, "blue", "Colour", "str"),
        (Literal["a", "b"], "c", "Literal['a', 'b']", "str"),
        (Annotated[int, Field(ge=3)], 1, "(int)", "int"),
        (Optional[int], "x", "Optional[int]", "str"),
        (Union[Item, Tree], 5, "Union", "int"),
        (tuple[int, str], (1,), "tuple[int, str]", "tuple"),
    ],
)
def test_a_wrong_result_names_both_types(hint: Any, value: Any, declared: str, returned: str) -> None:
    with pytest.raises(AuthorError, match=r"^function\(\) ") as caught:
        Result(returning(hint)).check(value)
    assert declared in caught.value.message
    assert returned in caught.value.message


@pytest.mark.parametrize(
    ("hint", "value"),
    [
        (float, math.nan),
        (float, math.inf),
        (float, np.float64("nan")),
        (list[float], [1.0, math.nan]),
        (dict[str, float], {"a": -math.inf}),
        (Point, Point(1, math.nan)),
    ],
)
def test_a_number_that_json_does_not_have_is_the_authors_error(hint: Any, value: Any) -> None:
    with pytest.raises(AuthorError, match="not finite") as caught:
        Result(returning(hint)).check(value)
    assert "NaN" in (caught.value.hint or "")


def test_a_result_that_contains_itself_is_the_authors_error() -> None:
    tree = Tree(value=1)
    tree.left = tree
    with pytest.raises(AuthorError, match="Tree"):
        Result(returning(Tree)).check(tree)


@pytest.mark.parametrize(
    "hint",
    [Any, None, object, BaseModel, bytes, Image, ToolResult, list[Image], Optional[Image], dict[str, bytes], Unknown,
     typing.Iterator[int], np.ndarray],
)  # fmt: skip
def test_some_results_promise_nothing(hint: Any) -> None:
    result = Result(returning(hint))
    value = object()
    assert result.schema is None
    assert not result.declared
    assert result.check(value).value is value


def test_text_is_checked_though_it_has_no_schema() -> None:
    result = Result(returning(str))
    assert result.schema is None
    assert result.declared
    assert result.check("a").value == "a"


@given(st.recursive(st.none() | st.booleans() | st.integers() | _TEXT, lambda inner: st.lists(inner, max_size=3)))
def test_any_value_for_any_type_is_sent_as_declared_or_refused(value: Any) -> None:
    for hint in (int, float, bool, dict, list, list[int], Item, Optional[int], Union[int, str], Colour):
        result = Result(returning(hint))
        try:
            found = published(result, value)
        except AuthorError:
            continue
        assert result.schema is not None
        jsonschema.validate(found, result.schema, cls=jsonschema.Draft202012Validator)
