"""Gymnasium's spaces and their members as JSON carries them, and two spaces of what models say."""

from __future__ import annotations

import base64
import functools
import string
from collections.abc import Mapping, Sequence
from typing import Any

import numpy
from gymnasium import spaces

from aenv.errors import Invalid
from aenv.models import NOT_JSON, to_json

MOST_LISTED = 64
"""Numbers of an array that are written one by one. More of them are written as their bytes, and so are odd ones."""
MOST_TEXT = 1_000_000
_PRINTABLE = frozenset(string.printable)
Space = spaces.Space[Any]


class Words(spaces.Text):
    """Text in any script, which Gymnasium's own space of text is not for."""

    def __init__(self, max_length: int = MOST_TEXT, *, seed: Any = None) -> None:
        super().__init__(max_length, min_length=0, charset=_PRINTABLE, seed=seed)

    def contains(self, x: Any) -> bool:
        return isinstance(x, str) and len(x) <= self.max_length

    def sample(self, mask: Any = None, probability: Any = None) -> str:
        """Something short."""
        return "".join(self.np_random.choice(sorted(string.ascii_letters), size=int(self.np_random.integers(1, 16))))

    def __hash__(self) -> int:
        return hash((Words, self.max_length))

    def __repr__(self) -> str:
        return f"Words({self.max_length})"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Words) and other.max_length == self.max_length


class ToolCalls(spaces.Space[Any]):
    """Calls of tools: ``{"name": ..., "arguments": {...}}``."""

    def __init__(self, names: Sequence[str], *, seed: Any = None) -> None:
        self.names = tuple(names)
        super().__init__(seed=seed)

    @property
    def is_np_flattenable(self) -> bool:
        return False

    def contains(self, x: Any) -> bool:
        return isinstance(x, Mapping) and isinstance(x.get("name"), str) and isinstance(x.get("arguments", {}), Mapping)

    def sample(self, mask: Any = None, probability: Any = None) -> dict[str, Any]:
        """A call of any of them, without arguments."""
        return {"name": self.names[int(self.np_random.integers(len(self.names)))], "arguments": {}}

    def __hash__(self) -> int:
        return hash((ToolCalls, self.names))

    def __repr__(self) -> str:
        return f"ToolCalls({list(self.names)})"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ToolCalls) and other.names == self.names


# Spaces


@functools.singledispatch
def told(space: Space) -> dict[str, Any]:
    """A space, for who is to make it again with ``made``."""
    raise Invalid(f"{space!r} cannot be told as JSON", hint="wrap the environment so that it is made of other spaces")


@told.register
def _(space: spaces.Box) -> dict[str, Any]:
    bounds = {"low": _array_written(space.low), "high": _array_written(space.high)}
    return {"type": "box", "shape": list(space.shape), "dtype": str(space.dtype), **bounds}


@told.register
def _(space: spaces.Discrete) -> dict[str, Any]:
    return {"type": "discrete", "n": int(space.n), "start": int(space.start), "dtype": str(space.dtype)}


@told.register
def _(space: spaces.MultiDiscrete) -> dict[str, Any]:
    about = {"nvec": space.nvec.tolist(), "start": space.start.tolist(), "dtype": str(space.dtype)}
    return {"type": "multi_discrete", **about}


@told.register
def _(space: spaces.MultiBinary) -> dict[str, Any]:
    return {"type": "multi_binary", "n": space.n if isinstance(space.n, int) else [int(size) for size in space.shape]}


@told.register
def _(space: spaces.Text) -> dict[str, Any]:
    lengths = {"min_length": space.min_length, "max_length": space.max_length}
    return {"type": "text", **lengths, "characters": "".join(sorted(space.character_set))}


@told.register
def _(space: Words) -> dict[str, Any]:
    return {"type": "words", "max_length": space.max_length}


@told.register
def _(space: spaces.Dict) -> dict[str, Any]:
    return {"type": "dict", "spaces": [[name, told(inner)] for name, inner in space.items()]}


@told.register(spaces.Tuple)
def _(space: spaces.Tuple[Any]) -> dict[str, Any]:
    return {"type": "tuple", "spaces": [told(inner) for inner in space]}


def made(given: Mapping[str, Any]) -> Space:
    """The space that was told."""
    kind = given.get("type")
    if kind == "box":
        dtype, shape = numpy.dtype(given["dtype"]), tuple(given["shape"])
        low, high = (_array_read(given[name], dtype, shape) for name in ("low", "high"))
        return spaces.Box(low, high, shape, dtype.type)
    if kind == "discrete":
        dtype = {} if given["dtype"] == "int64" else {"dtype": numpy.dtype(given["dtype"]).type}
        return spaces.Discrete(given["n"], start=given["start"], **dtype)
    if kind == "multi_discrete":
        return spaces.MultiDiscrete(given["nvec"], dtype=numpy.dtype(given["dtype"]).type, start=given["start"])
    if kind == "multi_binary":
        return spaces.MultiBinary(given["n"])
    if kind == "text":
        return spaces.Text(given["max_length"], min_length=given["min_length"], charset=given["characters"])
    if kind == "words":
        return Words(given["max_length"])
    if kind == "dict":
        return spaces.Dict({name: made(inner) for name, inner in given["spaces"]})
    if kind == "tuple":
        return spaces.Tuple([made(inner) for inner in given["spaces"]])
    raise Invalid(f"a space of type {kind!r} is not known here")


# Members


def written(space: Space, member: Any) -> Any:
    """A member of a space as JSON carries it."""
    if isinstance(space, spaces.Dict):
        return {name: written(inner, member[name]) for name, inner in space.items()}
    if isinstance(space, spaces.Tuple):
        return [written(inner, found) for inner, found in zip(space, member, strict=True)]
    if isinstance(space, spaces.Discrete):
        return int(member)
    if isinstance(space, (spaces.Box, spaces.MultiDiscrete, spaces.MultiBinary)):
        return _array_written(numpy.asarray(member, dtype=space.dtype))
    return member


def read(space: Space, given: Any) -> Any:
    """The member that was written."""
    if isinstance(space, spaces.Dict):
        return {name: read(inner, given[name]) for name, inner in space.items()}
    if isinstance(space, spaces.Tuple):
        return tuple(read(inner, found) for inner, found in zip(space, given, strict=True))
    if isinstance(space, spaces.Discrete):
        if type(given) is not int:
            raise TypeError(f"{given!r} is no whole number")
        return numpy.dtype(space.dtype).type(given)
    if isinstance(space, (spaces.Box, spaces.MultiDiscrete, spaces.MultiBinary)):
        return _array_read(given, numpy.dtype(space.dtype), space.shape)
    return given


def taken(space: Space, given: Any) -> Any:
    """The action that somebody wrote, if it is one."""
    try:
        return action(space, read(space, given))
    except (TypeError, ValueError, KeyError, IndexError, OverflowError) as exc:
        raise Invalid(f"{str(given)[:200]} is no member of {space}") from exc


def action(space: Space, given: Any) -> Any:
    """An action as the space has it. What is out of bounds is left to the environment, as Gymnasium does."""
    try:
        if isinstance(space, spaces.Dict):
            return {name: action(inner, given[name]) for name, inner in space.items()}
        if isinstance(space, spaces.Tuple):
            return tuple(action(inner, found) for inner, found in zip(space, given, strict=True))
        if isinstance(space, spaces.Box):
            array = numpy.asarray(given, space.dtype)
            if array.shape == space.shape:
                return array
        elif space.contains(given):
            return given
    except (TypeError, ValueError, KeyError, IndexError, OverflowError):
        pass
    raise Invalid(f"{str(given)[:200]} is no member of {space}")


def plain(info: dict[str, Any]) -> dict[str, Any]:
    """Of what an environment tells beside, all that JSON can carry."""
    found = {}
    for name, value in info.items():
        given = value.tolist() if hasattr(value, "tolist") else value
        try:
            to_json(given)
        except NOT_JSON:
            continue
        found[str(name)] = given
    return found


def _array_written(array: Any) -> Any:
    if array.size <= MOST_LISTED and numpy.isfinite(array).all():
        return array.tolist()
    return base64.b64encode(numpy.ascontiguousarray(array).tobytes()).decode()


def _array_read(given: Any, dtype: numpy.dtype[Any], shape: Sequence[int] | None) -> Any:
    if isinstance(given, str):
        return numpy.frombuffer(base64.b64decode(given, validate=True), dtype).reshape(shape or ()).copy()
    found = numpy.asarray(given)
    array = found.astype(dtype)
    if array.shape != tuple(shape or ()) or (numpy.issubdtype(dtype, numpy.integer) and (array != found).any()):
        raise ValueError(f"{given!r} is no array of {dtype} with the shape {shape}")
    return array
