"""What goes on the wire for what a function returned; nothing is turned into ``str()`` in silence."""

# ruff: noqa: UP045 - both ways of writing a type are an author's

from __future__ import annotations

import base64
import dataclasses
import datetime
import decimal
import enum
import json
import math
import pathlib
import types
import uuid
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterator
from typing import Any, Optional

import jsonschema
import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel, Field, field_serializer

from aenv.errors import AuthorError
from aenv.models import Audio, Image, ToolResult
from aenv.runtime.content import encode, plain, tool_result
from aenv.runtime.schema import Result

PNG = b"\x89PNG\r\n\x1a\n" + b"pixels"
WAV = b"RIFF\x00\x00\x00\x00WAVEfmt "


class Colour(enum.Enum):
    RED = "red"


class Word(str):
    """As parsers of HTML return it."""


class Grade(enum.StrEnum):
    A = "a"


class Count(int):
    pass


class Ratio(float):
    pass


class Shop(BaseModel):
    name: str
    open_at: datetime.time | None = Field(None, alias="openAt")


class Stubborn(BaseModel):
    name: str

    @field_serializer("name")
    def refuse(self, name: str) -> str:
        raise KeyError(name)


@dataclasses.dataclass
class Point:
    x: int


class Record(msgspec.Struct):
    x: int


class PillowLike:
    """What Pillow's images have in common, as far as we care."""

    def getbands(self) -> tuple[str, ...]:
        return ("R", "G", "B")

    def save(self, file: Any, format: str) -> None:
        assert format == "PNG"
        file.write(PNG)


class UnsavablePillowLike(PillowLike):
    def save(self, file: Any, format: str) -> None:
        raise OSError("cannot write mode F as PNG")


def result(hint: Any = Any) -> Result:
    def function() -> Any: ...

    function.__annotations__ = {"return": hint}
    return Result(function)


def wire(value: Any, hint: Any = Any) -> dict[str, Any]:
    """The result of ``tools/call`` as a client reads it."""
    found: dict[str, Any] = json.loads(msgspec.json.encode(tool_result(value, result(hint), "function")))
    return found


def text(value: Any, hint: Any = Any) -> str:
    found = wire(value, hint)
    assert found["isError"] is False
    assert [block["type"] for block in found["content"]] == ["text"]
    return str(found["content"][0]["text"])


def over_http(value: Any, hint: Any = Any) -> Any:
    return json.loads(msgspec.json.encode(plain(value, result(hint), "function")))


def both_refuse(value: Any, hint: Any = Any) -> AuthorError:
    with pytest.raises(AuthorError, match=r"^function\(\) "):
        plain(value, result(hint), "function")
    with pytest.raises(AuthorError, match=r"^function\(\) ") as caught:
        tool_result(value, result(hint), "function")
    return caught.value


@pytest.mark.parametrize("value", ["", "text", "two\nlines", "ünï ✓ \U0001f600", "\x00", '"quoted"', "{}"])
@pytest.mark.parametrize("hint", [Any, str, Optional[str]])
def test_text_is_sent_as_it_is(value: str, hint: Any) -> None:
    assert text(value, hint) == value
    assert over_http(value, hint) == value


@pytest.mark.parametrize(
    ("value", "data"),
    [
        (True, True),
        (0, 0),
        (1.5, 1.5),
        (10**30, 10**30),
        (-(2**63) - 1, -(2**63) - 1),
        ([], []),
        ([1, "a", None, [2]], [1, "a", None, [2]]),
        ((1, 2), [1, 2]),
        ({1}, [1]),
        (frozenset(["a"]), ["a"]),
        (datetime.datetime(2024, 2, 29, 1, 2, 3), "2024-02-29T01:02:03"),
        (datetime.date(2024, 2, 29), "2024-02-29"),
        (datetime.timedelta(days=1), "P1D"),
        (uuid.UUID(int=5), str(uuid.UUID(int=5))),
        (decimal.Decimal("1.50"), "1.50"),
        (Colour.RED, "red"),
        ([Colour.RED, Grade.A], ["red", "a"]),
        (Count(3), 3),
        (Ratio(0.5), 0.5),
        ([Word("w"), Count(3), Ratio(0.5)], ["w", 3, 0.5]),
        (np.int64(3), 3),
        (np.float32(0.5), 0.5),
        (np.bool_(True), True),
        (np.array([[1, 2], [3, 4]]), [[1, 2], [3, 4]]),
        (np.array(5), 5),
        (np.array([]), []),
        ([np.int8(1)], [1]),
        (math.nan, None),
        ([math.inf, np.float64("nan")], [None, None]),
    ],
)
def test_data_is_sent_as_json(value: Any, data: Any) -> None:
    assert json.loads(text(value)) == data
    assert "structuredContent" not in wire(value)
    assert over_http(value) == data


@pytest.mark.parametrize(
    ("value", "data"),
    [
        ({}, {}),
        ({"a": {"b": [1, None]}}, {"a": {"b": [1, None]}}),
        ({1: "a", 1.5: "b"}, {"1": "a", "1.5": "b"}),
        ({Colour.RED: 1, uuid.UUID(int=5): 2}, {"red": 1, str(uuid.UUID(int=5)): 2}),
        ({Word("k"): 1}, {"k": 1}),
        (OrderedDict(a=1), {"a": 1}),
        (defaultdict(list, a=[1]), {"a": [1]}),
        (Shop(name="s", openAt=datetime.time(9)), {"name": "s", "openAt": "09:00:00"}),
        ({"shop": Shop(name="s")}, {"shop": {"name": "s", "openAt": None}}),
        (Point(1), {"x": 1}),
        ({"points": [Point(1)]}, {"points": [{"x": 1}]}),
        (Record(1), {"x": 1}),
        ({"score": np.float32(0.5), "grid": np.zeros((1, 2), int)}, {"score": 0.5, "grid": [[0, 0]]}),
        ({"nan": math.nan}, {"nan": None}),
        ({"raw": b"ab"}, {"raw": base64.b64encode(b"ab").decode()}),
        (msgspec.Raw(b'{\n "a": 1}'), {"a": 1}),
    ],
)
def test_objects_are_structured_content_too(value: Any, data: Any) -> None:
    assert json.loads(text(value)) == data
    assert "\n" not in text(value)
    assert wire(value)["structuredContent"] == data
    assert over_http(value) == data


@pytest.mark.parametrize("value", [Word("w"), Grade.A, np.str_("w")])
def test_kinds_of_str_are_text(value: Any) -> None:
    assert over_http(value, str) == str.__str__(value)
    assert json.loads(text(value)) == str.__str__(value)


def test_nothing_is_no_content() -> None:
    for hint in (Any, None, Optional[Image]):
        assert wire(None, hint) == {"content": [], "isError": False}
        assert over_http(None, hint) is None


@pytest.mark.parametrize(
    ("data", "kind", "mime"),
    [
        (PNG, "image", "image/png"),
        (b"\xff\xd8\xff\xe0", "image", "image/jpeg"),
        (b"GIF89a", "image", "image/gif"),
        (b"RIFF\x00\x00\x00\x00WEBPVP8 ", "image", "image/webp"),
        (WAV, "audio", "audio/wav"),
        (b"OggS", "audio", "audio/ogg"),
        (b"ID3\x03", "audio", "audio/mpeg"),
    ],
)
@pytest.mark.parametrize("make", [bytes, bytearray, memoryview])
def test_bytes_are_known_by_their_first_ones(data: bytes, kind: str, mime: str, make: Callable[[bytes], Any]) -> None:
    block = {"type": kind, "data": base64.b64encode(data).decode(), "mimeType": mime}
    assert wire(make(data)) == {"content": [block], "isError": False}
    assert wire(make(data), bytes) == {"content": [block], "isError": False}
    assert over_http(make(data)) == block


@pytest.mark.parametrize("data", [b"", b"RIFF", b"RIFF\x00\x00\x00\x00AVI ", b"\x00\xff", b"plain text", b"\x89PN"])
def test_other_bytes_are_a_resource(data: bytes) -> None:
    (block,) = wire(data)["content"]
    assert block["type"] == "resource"
    assert base64.b64decode(block["resource"]["blob"]) == data
    assert block["resource"]["mimeType"] == "application/octet-stream"


@pytest.mark.parametrize(
    ("value", "block"),
    [
        (Image(b"x"), {"type": "image", "data": "eA==", "mimeType": "image/png"}),
        (Image(b"x", "image/svg+xml"), {"type": "image", "data": "eA==", "mimeType": "image/svg+xml"}),
        (Audio(b"x"), {"type": "audio", "data": "eA==", "mimeType": "audio/wav"}),
        (PillowLike(), {"type": "image", "data": base64.b64encode(PNG).decode(), "mimeType": "image/png"}),
    ],
)
def test_pictures_and_sounds(value: Any, block: dict[str, Any]) -> None:
    assert wire(value) == {"content": [block], "isError": False}
    assert wire([value])["content"] == [block]
    assert over_http(value) == block
    assert over_http([value]) == [block]


def test_a_list_may_mix_content_and_data() -> None:
    value = ["caption", Image(b"x"), {"a": 1}, Point(1), None, 5, PNG]
    blocks = wire(value)["content"]
    assert [block["type"] for block in blocks] == ["text", "image", "text", "text", "text", "text", "image"]
    assert [block["text"] for block in blocks if block["type"] == "text"] == [
        "caption", '{"a":1}', '{"x":1}', "null", "5",
    ]  # fmt: skip
    assert over_http(tuple(value)) == blocks


@pytest.mark.parametrize("hint", [list, tuple, list[Any]])
def test_content_in_a_list_that_is_declared_as_such_fits_its_schema(hint: Any) -> None:
    found = wire(["caption", Image(b"x")], hint)
    schema = result(hint).schema
    assert schema is not None
    assert [block["type"] for block in found["content"]] == ["text", "image"]
    jsonschema.validate(found["structuredContent"], schema, cls=jsonschema.Draft202012Validator)


@pytest.mark.parametrize(
    ("hint", "value", "content", "structured"),
    [
        (int, 5, "5", {"result": 5}),
        (Optional[int], None, "null", {"result": None}),
        (list[int], [1], "[1]", {"result": [1]}),
        (dict, {"a": 1}, '{"a":1}', {"a": 1}),
        (Shop, Shop(name="s"), '{"name":"s","openAt":null}', {"name": "s", "openAt": None}),
        (Optional[Shop], None, "null", {"result": None}),
        (Colour, Colour.RED, '"red"', {"result": "red"}),
    ],
)
def test_a_declared_result_is_text_and_structure(hint: Any, value: Any, content: str, structured: Any) -> None:
    schema = result(hint).schema
    assert schema is not None
    assert text(value, hint) == content
    assert wire(value, hint)["structuredContent"] == structured
    jsonschema.validate(structured, schema, cls=jsonschema.Draft202012Validator)


@pytest.mark.parametrize(
    ("hint", "value"),
    [(int, None), (dict, None), (str, None), (Shop, None), (int, PNG), (dict, Image(b"x")), (str, PNG),
     (list[int], [Image(b"x")]), (int, PillowLike())],
)  # fmt: skip
def test_content_does_not_get_round_a_declared_type(hint: Any, value: Any) -> None:
    error = both_refuse(value, hint)
    assert type(value).__name__ in error.message


def test_a_tool_result_is_sent_as_it_is() -> None:
    value = ToolResult(content=[{"type": "text", "text": "no"}], is_error=True, structured={"at": uuid.UUID(int=5)})
    assert wire(value) == {
        "content": [{"type": "text", "text": "no"}],
        "isError": True,
        "structuredContent": {"at": str(uuid.UUID(int=5))},
    }
    assert wire(value, int)["isError"] is True
    assert over_http(value) == {"content": [{"type": "text", "text": "no"}], "is_error": True}
    assert "structuredContent" not in wire(ToolResult(content=[]))


@pytest.mark.parametrize(
    "value",
    [
        ToolResult(content=[{"type": "text", "text": object()}]),
        ToolResult(content=[{"type": "text", "text": "\ud800"}]),
        ToolResult(content="text"),  # type: ignore[arg-type]
        ToolResult(content=["text"]),  # type: ignore[list-item]
    ],
    ids=["object", "surrogate", "text", "list of text"],
)
def test_a_tool_result_that_cannot_be_sent(value: ToolResult) -> None:
    assert both_refuse(value).hint


def test_a_tool_result_whose_structure_cannot_be_sent() -> None:
    with pytest.raises(AuthorError, match="object"):
        tool_result(ToolResult(content=[], structured={"a": object()}), result(), "function")


def endless_list() -> list[Any]:
    value: list[Any] = []
    value.append(value)
    return value


def endless_dict() -> dict[str, Any]:
    value: dict[str, Any] = {}
    value["self"] = value
    return value


def numbers() -> Iterator[int]:
    yield 1


@pytest.mark.parametrize(
    ("value", "what"),
    [
        (object(), "object"),
        ({"a": [object()]}, "object"),
        (len, "builtin_function_or_method"),
        (Point, "type"),
        (numbers(), "generator"),
        (range(3), "range"),
        (1j, "complex"),
        (np.array([1j]), "complex"),
        (deque([1]), "deque"),
        (types.SimpleNamespace(a=1), "SimpleNamespace"),
        (pathlib.PurePosixPath("/a"), "PurePosixPath"),
        (ValueError("x"), "ValueError"),
        ({(1, 2): 3}, "tuple"),
        ({None: 1}, "NoneType"),
        (Stubborn(name="s"), "KeyError"),
        ([Image(b"x"), object()], "object"),
        (Image("text"), "bytes-like"),  # type: ignore[arg-type]
        (Audio(None), "bytes-like"),  # type: ignore[arg-type]
        (UnsavablePillowLike(), "mode F"),
        (endless_list(), "recursion"),
        (endless_dict(), "recursion"),
        (10**5000, "4300 digits"),
        ("\ud800", "surrogates"),
        ("fine until \udfff", "surrogates"),
        (["\ud800"], "surrogates"),
        ({"\ud800": 1}, "surrogates"),
        ([Image(b"x"), "\ud800"], "surrogates"),
        (Word("\ud800"), "surrogates"),
        (msgspec.Raw(b"{not json"), "malformed"),
        (msgspec.Raw(b""), "truncated"),
    ],
    ids=lambda value: value if isinstance(value, str) and value.isascii() else type(value).__name__,
)
def test_what_cannot_be_sent_is_told_with_a_way_out(value: Any, what: str) -> None:
    error = both_refuse(value)
    assert what in error.message
    assert error.hint
    error.message.encode()


@pytest.mark.parametrize("hint", [str, Optional[str], list[str], dict, dict[str, str], Shop], ids=str)
def test_half_a_surrogate_pair_is_the_authors_error_whatever_is_declared(hint: Any) -> None:
    half = "\ud800"
    values: dict[Any, Any] = {list[str]: [half], dict: {"a": half}, dict[str, str]: {"a": half}}
    value = Shop.model_construct(name=half, open_at=None) if hint is Shop else values.get(hint, half)
    assert both_refuse(value, hint).message.encode()


def test_encode_names_the_function() -> None:
    assert encode({"a": 1}, "dig") == b'{"a":1}'
    with pytest.raises(AuthorError, match=r"^dig\(\) returned something that cannot be sent") as caught:
        encode(object(), "dig")
    assert "aenv.Image" in (caught.value.hint or "")


_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=12,
)


@given(_JSON)
def test_json_comes_through_unchanged_or_is_refused(value: Any) -> None:
    try:
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        assert "surrogates" in both_refuse(value).message
        return
    found = wire(value)
    if value is None:
        assert found["content"] == []
    elif isinstance(value, str):
        assert found["content"][0]["text"] == value
    else:
        assert json.loads(found["content"][0]["text"]) == value
        assert found.get("structuredContent") == (value if isinstance(value, dict) else None)
    assert over_http(value) == value


@given(st.binary())
def test_bytes_come_through_unchanged(data: bytes) -> None:
    (block,) = wire(data)["content"]
    assert base64.b64decode(block.get("data") or block.get("resource", {}).get("blob", "")) == data
