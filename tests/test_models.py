"""The values that cross a process boundary, and what is read into them."""

from __future__ import annotations

import base64
import math
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from aenv.errors import Invalid, ToolError
from aenv.models import (
    NAME,
    NOT_JSON,
    VERSION,
    Audio,
    EnvRef,
    Image,
    Sandbox,
    SandboxSpec,
    ToolResult,
    parse_duration,
    to_json,
)


@pytest.mark.parametrize(
    ("value", "seconds"),
    [
        ("90s", 90),
        ("30m", 1800),
        ("1h30m", 5400),
        ("24h", 86400),
        ("1d", 86400),
        ("1d2h3m4s", 93784),
        ("0h5s", 5),
        (" 1H ", 3600),
        ("90", 90),
        ("1.5", 1.5),
        (".5", 0.5),
        ("1.", 1),
        (90, 90),
        (0.25, 0.25),
        (1e9, 1e9),
    ],
)
def test_lengths_of_time(value: str | float, seconds: float) -> None:
    found = parse_duration(value)
    assert found == seconds
    assert type(found) is float


@pytest.mark.parametrize(
    "value",
    [
        "", " ", "0", "0s", "-1", "-1s", "s", "h", ".", "..", "1.5h", "1s1m", "1h1h", "1 h", "1w", "1e3", "inf", "nan",
        "soon", "²", "1²", "\u0663", "1_000", "+5", "9" * 400, "9" * 400 + "d", "9" * 5000 + "s", 0, -1,
        math.inf, -math.inf, math.nan, 10**400, True, False, None, [], b"90s",
    ],
    ids=lambda value: repr(value)[:20],
)  # fmt: skip
def test_what_is_no_length_of_time(value: Any) -> None:
    with pytest.raises(Invalid, match="timeouts.call .* is not a length of time") as caught:
        parse_duration(value, "timeouts.call")
    assert "1h30m" in (caught.value.hint or "")


@given(st.text() | st.from_regex(r"[0-9.dhms]{0,12}", fullmatch=True) | st.integers() | st.floats())
def test_a_length_of_time_is_positive_or_refused(value: str | float) -> None:
    try:
        found = parse_duration(value)
    except Invalid:
        return
    assert 0 < found < math.inf


@pytest.mark.parametrize(
    ("text", "name", "version"),
    [
        ("shop", "shop", None),
        ("shop@1.0.1", "shop", "1.0.1"),
        ("shop@1", "shop", "1"),
        ("shop@1.0", "shop", "1.0"),
        ("shop@^1.0", "shop", "^1.0"),
        ("shop@~1.0.3", "shop", "~1.0.3"),
        ("shop@latest", "shop", "latest"),
        ("shop@*", "shop", "*"),
        ("shop@1.0.0-rc.1+build.5", "shop", "1.0.0-rc.1+build.5"),
        ("Mini_Shop-2.x@1.0.0", "Mini_Shop-2.x", "1.0.0"),
        ("0" * 63, "0" * 63, None),
    ],
)
def test_references(text: str, name: str, version: str | None) -> None:
    found = EnvRef.parse(text)
    assert found == EnvRef(name, version)
    assert str(found) == text
    assert EnvRef.parse(str(found)) == found


@pytest.mark.parametrize(
    "text",
    ["", "@", "@1.0.0", "shop@", "shop@ ", "shop @1", "shop@1.0.0@2", "shop@v1", "shop@1.0.0.0", "shop@^", "shop@1.x",
     "-shop", ".shop", "_shop", "sh op", "sh/op", "../shop", "shop\n", "shop@1.0.0\n", "söp", "shop@\u0661.0.0",
     "a" * 64, "a" * 100_000, "shop@" + "x" * 100_000],
)  # fmt: skip
def test_what_is_no_reference(text: str) -> None:
    with pytest.raises(Invalid, match="is not (an environment name|a version)") as caught:
        EnvRef.parse(text)
    assert caught.value.hint
    assert len(caught.value.message) < 300


@given(st.from_regex(NAME, fullmatch=True), st.none() | st.from_regex(VERSION, fullmatch=True))
def test_every_reference_reads_itself_back(name: str, version: str | None) -> None:
    assert EnvRef.parse(str(EnvRef(name, version))) == EnvRef(name, version)


EXAMPLES = [
    EnvRef("shop", "^1.0"),
    SandboxSpec(env=EnvRef("shop")),
    SandboxSpec(
        env=EnvRef("shop", "1.0.0"),
        datasource="/data",
        ttl=60.0,
        environment_variables={"A": "b"},
        arguments=["--x"],
        owner="me",
        labels={"l": "1"},
        seed=7,
        resources={"cpu": "1"},
    ),
    Sandbox(url="unix:/tmp/s"),
    Sandbox(url="http://h:1", id="i-1", token="t", attached=True),
    Image(b"\x00\xff", "image/gif"),
    Audio(b""),
    ToolResult(content=[{"type": "text", "text": "a"}], is_error=True, structured={"a": [1]}),
]


@pytest.mark.parametrize("value", EXAMPLES, ids=lambda value: type(value).__name__)
def test_a_value_survives_the_wire(value: Any) -> None:
    assert msgspec.json.decode(to_json(value), type=type(value)) == value


@pytest.mark.parametrize("value", EXAMPLES, ids=lambda value: type(value).__name__)
def test_a_value_does_not_change(value: Any) -> None:
    with pytest.raises(AttributeError):
        setattr(value, value.__struct_fields__[0], "changed")


def test_specs_do_not_share_what_can_change() -> None:
    first, second = SandboxSpec(env=EnvRef("a")), SandboxSpec(env=EnvRef("a"))
    first.labels["x"] = "1"
    first.arguments.append("y")
    assert (second.labels, second.arguments) == ({}, [])


@pytest.mark.parametrize(("kind", "name"), [(Image, "image"), (Audio, "audio")])
def test_blocks(kind: Any, name: str) -> None:
    block = kind(b"\x00\xff", "x/y").block()
    assert block == {"type": name, "data": base64.b64encode(b"\x00\xff").decode(), "mimeType": "x/y"}


def test_the_text_of_a_result_is_that_of_its_text_blocks() -> None:
    result = ToolResult(content=[{"type": "text", "text": "a"}, Image(b"").block(), {"type": "text", "text": "b"}])
    assert result.text == "a\nb"
    assert ToolResult(content=[]).text == ""
    assert result.raise_for_error() is result


@pytest.mark.parametrize(
    ("content", "message"),
    [([{"type": "text", "text": "no such file"}], "no such file"), ([], "the tool failed without a message")],
)
def test_a_failed_result_raises_what_the_tool_said(content: list[dict[str, Any]], message: str) -> None:
    with pytest.raises(ToolError) as caught:
        ToolResult(content=content, is_error=True).raise_for_error()
    assert caught.value.message == message


def test_a_result_shows_its_structure_only_when_there_is_one() -> None:
    assert repr(ToolResult(content=[])) == "ToolResult(content=[], is_error=False)"
    assert repr(ToolResult(content=[], structured=0)) == "ToolResult(content=[], is_error=False, structured=0)"


@pytest.mark.parametrize(
    "value",
    [object(), {"a": object()}, 1j, {(1,): 1}, "\ud800", 10**5000],
    ids=["object", "nested", "complex", "key", "surrogate", "digits"],
)
def test_what_has_no_json_form_raises_what_is_announced(value: Any) -> None:
    with pytest.raises(NOT_JSON):
        to_json(value)
