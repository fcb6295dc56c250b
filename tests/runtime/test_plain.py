"""Plain types, which are read without pydantic: there must be no telling that they are."""

# ruff: noqa: UP006, UP035, UP045 - every way of writing a type is an author's

from __future__ import annotations

import inspect
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, Dict, List, Optional

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from aenv.errors import Invalid
from aenv.runtime import docstrings, plain, signatures
from aenv.runtime.schema import Arguments
from aenv.runtime.validation import Checker, Declared
from tests.test_exports import python

PLAIN = [
    *(str, int, float, bool, list, dict, Any, List[int], list[str], list[Any], list[list[float]], dict[str, Any]),
    *(dict[str, int], dict[str, list[str]], Dict[str, bool], Optional[str], int | None, float | None, list[int] | None),
    *(dict[str, Any] | None, list[int | None], dict[str, str | None]),
]
OTHER = [
    *(bytes, tuple, set, object, None, List, Dict, complex, dict[int, str], dict[Any, Any], int | str),
    *(int | str | None, Any | None, list[bytes], dict[str, bytes], list[bytes] | None),
]
DEFAULTS = [inspect.Parameter.empty, None, True, 0, -7, 10**30, 1.5, "", "text", "Grüße"]
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.sampled_from(["1", "true", "2.0", "null"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=5,
)


def taking(hint: Any, default: Any = inspect.Parameter.empty, *, about: str = "") -> Callable[..., Any]:
    """A function with an argument of that type."""

    def function(**given: Any) -> None: ...

    keyword = inspect.Parameter.KEYWORD_ONLY
    parameters = [inspect.Parameter("value", keyword, default=default), inspect.Parameter("other", keyword, default=0)]
    function.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    function.__annotations__ = {"value": hint, "other": int}
    function.__doc__ = f"Take it.\n\nArgs:\n    value: {about}\n" if about else None
    return function


def signature(function: Callable[..., Any]) -> signatures.Signature:
    return signatures.read(function, docstrings.parse(inspect.getdoc(function)))


@pytest.mark.parametrize("about", ["", "what it is"])
@pytest.mark.parametrize("default", DEFAULTS)
@pytest.mark.parametrize("hint", PLAIN)
def test_a_schema_is_the_one_that_pydantic_writes(hint: Any, default: Any, about: str) -> None:
    read = signature(taking(hint, default, about=about))
    assert json.dumps(plain.arguments(read)) == json.dumps(Checker(read).schema)


@pytest.mark.parametrize("hint", PLAIN)
def test_the_schema_of_a_result_is_the_one_that_pydantic_writes(hint: Any) -> None:
    declared = Declared.of(hint)
    assert declared is not None
    assert json.dumps(plain.schema(hint)) == json.dumps(declared.schema)


def test_a_function_without_arguments_has_the_schema_that_pydantic_writes() -> None:
    def function() -> None: ...

    assert plain.arguments(signature(function)) == Checker(signature(function)).schema


@pytest.mark.parametrize("hint", OTHER)
def test_other_types_are_for_pydantic(hint: Any) -> None:
    assert plain.schema(hint) is None


@pytest.mark.parametrize("default", [float("nan"), float("inf"), "\ud800", [], {}, b"", object(), 1j])
def test_other_defaults_are_for_pydantic(default: Any) -> None:
    assert plain.arguments(signature(taking(int, default))) is None


def test_other_signatures_are_for_pydantic() -> None:
    def takes_all(a: int, **more: int) -> None: ...

    def hides(_a: int) -> None: ...

    assert plain.arguments(signature(takes_all)) is None
    assert plain.arguments(signature(hides)) is None


@settings(max_examples=40)
@given(value=VALUES, more=st.dictionaries(st.sampled_from(["other", "unknown"]), VALUES, max_size=1))
@pytest.mark.parametrize("default", [inspect.Parameter.empty, None])
@pytest.mark.parametrize("hint", PLAIN)
def test_arguments_are_read_as_pydantic_reads_them(hint: Any, default: Any, value: Any, more: dict[str, Any]) -> None:
    function = taking(hint, default)
    body = json.dumps({"value": value, **more}).encode()
    assert outcome(Arguments(function, docstrings.parse(None)), body) == outcome(Checker(signature(function)), body)


@pytest.mark.parametrize(
    "body",
    [
        *(b"", b"{}", b"[]", b"null", b"{", b'{"value": 1} ', b'{"value": 1}x', b'{"value": 1, "value": 2}'),
        *(b'{"value": 1e2}', b'{"value": 1e400}', b'{"value": -0}', b'{"value": -0.0}', b'{"value": 01}'),
        *(b'{"value": "\\ud800"}', b'{"value": "\xff"}', b'{"value": "a\x01"}', b'{"value": "\\u0000"}'),
        *(b'{"value": "x", "value": 1}', b'{"value": 1, "value": "x"}', b'{"value": [1, [2, {"a": 1e999}]]}'),
        *(b'{"value": 123456789012345678901234567890}', b'{"value": 18446744073709551616.0}', b'{"value": 0.1e-7}'),
        *(b'\xef\xbb\xbf{"value": 1}', b'{"value": ' + b"[" * 5000 + b"]" * 5000 + b"}"),
    ],
)
@pytest.mark.parametrize("hint", [str, int, float, Any, list, Optional[int]])
def test_strange_bodies_are_read_as_pydantic_reads_them(hint: Any, body: bytes) -> None:
    function = taking(hint, 0)
    assert outcome(Arguments(function, docstrings.parse(None)), body) == outcome(Checker(signature(function)), body)


def outcome(reads: Arguments | Checker, body: bytes) -> str:
    try:
        return repr(reads.decode(body))
    except Invalid as exc:
        return f"refused: {exc}"


def test_a_project_of_plain_types_is_loaded_without_pydantic(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"name": "light", "version": "1.0.0"}')
    (tmp_path / "src").mkdir()
    (tmp_path / "src" / "light.py").write_text(
        "from aenv import Context, register_health, register_reward, register_tool\n"
        "@register_tool\ndef search(ctx: Context, query: str, limit: int = 10, tags: list[str] | None = None):\n"
        "    'Search.'\n    return {}\n"
        "@register_reward\ndef score() -> float:\n    return 1.0\n"
        "@register_health\ndef health() -> dict:\n    return {}\n"
    )
    code = (
        "import sys, aenv.runtime.__main__\nfrom pathlib import Path\n"
        "from aenv import project\nfrom aenv.runtime import loader\n"
        f"loaded = loader.load(project.read(Path({str(tmp_path)!r})))\n"
        """assert loaded.tools["search"].decode(b'{"query": "x"}') == {"query": "x"}\n"""
        "assert loaded.health.decode({}, text=True) == {}\n"
        "print('pydantic' in sys.modules)\n"
        """assert loaded.tools["search"].decode(b'{"query": "x", "limit": "3"}') == {"query": "x", "limit": 3}\n"""
    )
    assert python(code).split() == ["False"]
