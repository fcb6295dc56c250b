"""Spaces and their members on their way through JSON."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy
import pytest
from gymnasium import spaces

from aenv.errors import Invalid
from aenv.integrations.gymnasium import ToolCalls, Words
from aenv.integrations.gymnasium.spaces import made, read, taken, told, written

SPACES = [
    spaces.Box(-1, 1, (3,), numpy.float32),
    spaces.Box(-numpy.inf, numpy.inf, (), numpy.float64),
    spaces.Box(numpy.array([0, -5]), numpy.array([1, 5]), dtype=numpy.int16),
    spaces.Box(0, 255, (32, 32, 3), numpy.uint8),
    spaces.Discrete(4),
    spaces.Discrete(3, start=-7),
    spaces.MultiDiscrete([2, 3, 4]),
    spaces.MultiDiscrete([[2, 3], [4, 5]], start=[[1, 1], [0, 0]]),
    spaces.MultiDiscrete([5] * 100, dtype=numpy.int32),
    spaces.Discrete(3, dtype=numpy.int8),
    spaces.MultiBinary(6),
    spaces.MultiBinary([2, 3]),
    spaces.Text(12, min_length=2, charset="äb\\"),
    Words(50),
    spaces.Dict({"b": spaces.Discrete(2), "a": spaces.Tuple([spaces.Text(3), spaces.Box(0, 1, (2, 2))])}),
]


def through_json(value: Any) -> Any:
    return msgspec.json.decode(msgspec.json.encode(value))


@pytest.mark.parametrize("space", SPACES, ids=str)
def test_a_space_is_the_same_again(space: Any) -> None:
    again = made(through_json(told(space)))
    assert again == space
    space.seed(3)
    for _ in range(20):
        member = space.sample()
        found = read(again, through_json(written(space, member)))
        assert space.contains(found)
        for one, other in zip(leaves(member), leaves(found), strict=True):
            assert numpy.array_equal(one, other)
            assert numpy.asarray(one).dtype == numpy.asarray(other).dtype


def leaves(member: Any) -> list[Any]:
    if isinstance(member, dict):
        return [leaf for name in sorted(member) for leaf in leaves(member[name])]
    return [leaf for inner in member for leaf in leaves(inner)] if isinstance(member, tuple) else [member]


@pytest.mark.parametrize("odd", [numpy.inf, -numpy.inf, numpy.nan])
def test_numbers_that_json_has_not(odd: float) -> None:
    space = spaces.Box(-numpy.inf, numpy.inf, (2,), numpy.float32)
    member = numpy.array([odd, 0.1], numpy.float32)
    assert numpy.array_equal(read(space, through_json(written(space, member))), member, equal_nan=True)


@pytest.mark.parametrize(
    ("space", "given"),
    [
        (SPACES[0], [0, 0]),
        (SPACES[0], "not base64!"),
        (SPACES[0], "AAAA"),
        (SPACES[0], None),
        (SPACES[2], [0.5, 0]),
        (SPACES[4], 4),
        (SPACES[4], "1"),
        (SPACES[4], 1.5),
        (SPACES[4], 10**30),
        (SPACES[12], "xyz"),
        (SPACES[13], 3),
        (SPACES[14], {"b": 1}),
        (SPACES[14], [1]),
    ],
    ids=str,
)
def test_what_is_no_member(space: Any, given: Any) -> None:
    with pytest.raises(Invalid, match="is no member of"):
        taken(space, given)


def test_what_is_out_of_bounds_is_left_to_the_environment() -> None:
    assert taken(SPACES[0], [0, 0, 2]).tolist() == [0, 0, 2]


def test_what_cannot_be_told() -> None:
    with pytest.raises(Invalid, match="cannot be told"):
        told(spaces.Sequence(spaces.Discrete(2)))
    with pytest.raises(Invalid, match="'other' is not known"):
        made({"type": "other"})


def test_words_and_calls() -> None:
    assert all(found in Words(5) for found in ("", "größe", "日本"))
    assert "too long" not in Words(5)
    calls = ToolCalls(["add", "submit"], seed=1)
    assert calls.sample() in calls
    assert {"name": "add"} in calls
    assert "add" not in calls
    assert calls == ToolCalls(["add", "submit"])
    assert calls != ToolCalls(["add"])
