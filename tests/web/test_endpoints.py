"""Handlers taken apart, and paths told apart: what is wrong with a table is said when it is made."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Annotated, Any

import msgspec
import pytest

from aenv.errors import AEnvError, Invalid, NotServed
from aenv.web.endpoints import Endpoint
from aenv.web.routes import Call, Header, Paged, Query, Route, Streamed, Upload
from aenv.web.table import Match, Table, WrongMethod
from tests.web.shop import Item, Note, Shop


class Bad:
    def sync(self, call: Call) -> None: ...

    async def no_call(self) -> None: ...

    async def other_first(self, name: str, call: Call) -> None: ...

    async def nothing_said(self, call: Call): ...  # type: ignore[no-untyped-def]

    async def bare(self, call: Call, x) -> None: ...  # type: ignore[no-untyped-def]

    async def starred(self, call: Call, *names: str) -> None: ...

    async def unknown(self, call: Call, x: Nowhere) -> None: ...  # type: ignore[name-defined]  # noqa: F821

    async def no_json(self, call: Call, x: Shop) -> None: ...

    async def no_json_back(self, call: Call) -> AsyncIterator[bytes]: ...  # type: ignore[empty-body]

    async def number(self, call: Call, name: int) -> None: ...

    async def unpaged(self, call: Call, limit: int = 1) -> Paged[Item]: ...  # type: ignore[empty-body]

    async def good(self, call: Call, name: str) -> None: ...

    async def plain(self, call: Call) -> None: ...

    async def taking(self, call: Call, body: Note) -> None: ...


@pytest.mark.parametrize(
    ("method", "path", "handler", "complaint"),
    [
        ("GET", "/x", "sync", "is not an async function"),
        ("GET", "/x", "no_call", "does not take a Call first"),
        ("GET", "/x", "other_first", "does not take a Call first"),
        ("GET", "/x", "nothing_said", "does not say what it returns"),
        ("GET", "/x", "bare", "does not say what 'x' is"),
        ("GET", "/x", "starred", "has no name to be found by"),
        ("GET", "/x", "unknown", "cannot be looked up"),
        ("GET", "/x", "no_json", "takes 'x' of a type that has no JSON"),
        ("GET", "/x", "no_json_back", "returns of a type that has no JSON"),
        ("GET", "/x/{name}", "number", "must take 'name'"),
        ("GET", "/x/{name}", "plain", "does not take name"),
        ("GET", "/x", "unpaged", "does not take limit and offset"),
        ("GET", "/x", "taking", "which a GET does not bring"),
        ("GET", "x/{name}", "good", "a path that is none"),
        ("GET", "/x/a{name}", "good", "a path that is none"),
        ("GET", "/x/{name", "good", "cannot be told"),
        ("GET", "/x/{name}/{name}", "good", "cannot be told"),
    ],
)
def test_a_bad_handler_is_refused_when_the_table_is_made(method: str, path: str, handler: str, complaint: str) -> None:
    with pytest.raises(TypeError, match=complaint) as caught:
        Endpoint(Route(method, path, getattr(Bad(), handler)))
    assert f"Bad.{handler}, the handler of {method} {path}" in str(caught.value)


def test_two_routes_at_one_place_are_refused() -> None:
    shop = Shop()
    with pytest.raises(TypeError, match="at the same place"):
        Table([Route("GET", "/a/{name}", shop.get_item), Route("GET", "/a/{name}/", shop.get_item)])


async def _taking(
    call: Call,
    name: str,
    body: Upload,
    n: Annotated[int, msgspec.Meta(ge=0, description="How many.")],
    names: tuple[str, ...] = (),
    sizes: list[int] | None = None,
    f: float = 0.5,
    on: Annotated[bool | None, Query("isOn", "Whether.")] = None,
    text: str | None = None,
    key: Annotated[str | None, Header("X-Key")] = None,
) -> Annotated[Streamed, "text/plain"] | dict[str, Any]:
    """Many parameters."""
    return {}


TAKING = Endpoint(Route("PUT", "/x/{name}", _taking))


def test_arguments_come_from_the_path_the_query_and_the_headers() -> None:
    query = b"n=7&names=a&names=%C3%A4+b&sizes=3&f=1e3&isOn=true&text=null&other=ignored"
    assert TAKING.arguments(["a b"], query, {b"x-key": b"k"}) == {
        "name": "a b",
        "n": 7,
        "names": ("a", "ä b"),
        "sizes": [3],
        "f": 1000.0,
        "on": True,
        "text": "null",
        "key": "k",
    }
    defaults = TAKING.arguments(["a"], b"n=0", {})
    assert defaults == {
        "name": "a", "n": 0, "names": (), "sizes": None, "f": 0.5, "on": None, "text": None, "key": None
    }  # fmt: skip
    assert TAKING.upload
    assert TAKING.streams
    assert TAKING.content_type == "text/plain"
    assert [(found.key, found.about) for found in TAKING.parameters if found.about] == [
        ("n", "How many."),
        ("isOn", "Whether."),
    ]


@pytest.mark.parametrize(
    ("path", "query", "complaint"),
    [
        ("a", b"", "query parameter 'n' is missing"),
        ("a", b"n=", "query parameter 'n': expected an integer, found ''"),
        ("a", b"n=x", "query parameter 'n': expected an integer, found 'x'"),
        ("a", b"n=-1", "query parameter 'n': expected `int` >= 0, found '-1'"),
        ("a", b"n=1.5", "query parameter 'n': expected an integer, found '1.5'"),
        ("a", b"n=1&n=2", "query parameter 'n' is given 2 times"),
        ("a", b"n=" + b"9" * 30, "query parameter 'n': out of range"),
        ("a", b"n=" + b"9" * 5000, "query parameter 'n': integer value out of range"),
        ("a", b"n=1&f=nan", "query parameter 'f': out of range"),
        ("a", b"n=1&f=1e999", "query parameter 'f': "),
        ("a", b"n=1&isOn=maybe", "query parameter 'isOn': expected true or false, found 'maybe'"),
        ("a", b"n=1&sizes=1&sizes=x", r"query parameter 'sizes': expected `int`, got `str` - at `\$\[1\]`"),
        ("a", b"n=1&text=%00", "query parameter 'text' has a NUL character in it"),
        ("a", b"n=1&text=%FF", "the query is not UTF-8"),
        ("a", b"n=1&text=%ED%A0%80", "the query is not UTF-8"),
        ("a", b"n=1&text=\xff", "the query is not UTF-8"),
        ("a", b"n=1&" + b"&".join([b"x=1"] * 1001), "the query has over 1000 parameters"),
        ("a/b", b"n=1", "path parameter 'name' has a slash or a control character in it"),
        ("a\x00", b"n=1", "path parameter 'name' has a slash or a control character in it"),
        ("a\n", b"n=1", "path parameter 'name' has a slash or a control character in it"),
    ],
)
def test_a_wrong_argument_is_named(path: str, query: bytes, complaint: str) -> None:
    with pytest.raises(Invalid, match=complaint):
        TAKING.arguments([path], query, {})


@pytest.mark.parametrize(
    ("body", "complaint"),
    [
        (b"", "missing required field `name`"),
        (b"[]", "expected `object`, got `array`"),
        (b"{", "truncated"),
        (b"nonsense", "the body is wrong: JSON is malformed"),
        (b'{"name": 1}', "at name: expected `str`, got `int`"),
        (b'{"name": "a", "parts": [{"size": 1}, {"size": "x"}]}', r"at parts\[1\].size: expected `int`"),
        (b'{"name": "a", "labels": {"x": 1}}', r"at labels\[...\]: expected `str`"),
        (b'{"name": "a", "priceNow": 1e999}', "at priceNow: number out of range"),
        (b'{"name": "\xff"}', "wrong"),
        (b'{"name": "\xed\xa0\x80"}', "wrong"),
        (b'{"name": "\\ud800"}', "wrong"),
        (b'{"name": "a\\u0000"}', "at name: there is a NUL character"),
        (b'{"name": "a", "extra": {"x": ["\\u0000"]}}', "at extra.x.0: there is a NUL character"),
        (b'{"name": "a", "extra": {"\\u0000": 1}}', "at extra: there is a NUL character in a name"),
        (b'{"name": "a", "extra": {"x": 1' + b"0" * 30 + b"}}", "at extra.x: the number is too large"),
        (b'{"name": "a", "extra": {"x": 1' + b"0" * 6000 + b"}}", "out of range"),
        (b'{"name": "a", "extra": {"x": ' + b"[" * 200 + b"]" * 200 + b"}}", "nested too deeply"),
        (b'{"name": "a", "extra": {"x": ' + b"[" * 90_000, "nested too deeply"),
        (b"[" * 90_000, "wrong"),
    ],
)
def test_a_wrong_body_is_told_where(body: bytes, complaint: str) -> None:
    with pytest.raises(Invalid, match=complaint):
        Endpoint(Route("POST", "/x", Shop().create_item)).decode(body)


def test_a_body_may_say_more_than_is_asked_and_hold_what_only_looks_bad() -> None:
    endpoint = Endpoint(Route("POST", "/x", Shop().create_item))
    body = b'{"name": "\\\\u0000 \\ud83d\\ude00", "new": 1, "extra": {"n": 18446744073709551615, "l": [%b[]]}}'
    found = endpoint.decode(body % (b"[]," * 200))
    assert found.name == "\\u0000 \U0001f600"
    assert found.extra["n"] == 2**64 - 1
    note = Endpoint(Route("PUT", "/x/{name}", Shop().note))
    assert note.decode(b"") is None
    assert note.decode(b"null") is None
    assert note.decode(b"{}") == Note()


TABLE = Table(Shop().routes())


@pytest.mark.parametrize(
    ("method", "path", "action", "values"),
    [
        ("GET", b"/item", "GET /item/", []),
        ("HEAD", b"/item/", "GET /item/", []),
        ("POST", b"/item/", "POST /item/", []),
        ("GET", b"/item/newest", "GET /item/newest", []),
        ("GET", b"/%69tem/newest/", "GET /item/newest", []),
        ("GET", b"/item/ne%2Fw", "GET /item/{name}", ["ne/w"]),
        ("GET", b"/item/a%20%C3%A4@1.0", "GET /item/{name}", ["a ä@1.0"]),
        ("GET", b"/item/*", "GET /item/{name}", ["*"]),
        ("DELETE", b"/item/newest", "DELETE /item/{name}", ["newest"]),
        ("GET", b"/item/newest/picture", "GET /item/{name}/picture", ["newest"]),
    ],
)
def test_a_path_finds_its_endpoint(method: str, path: bytes, action: str, values: list[str]) -> None:
    found = TABLE.find(method, path)
    assert isinstance(found, Match)
    assert (found.endpoint.action, found.values) == (action, values)


@pytest.mark.parametrize(
    ("method", "path", "kind", "said"),
    [
        ("GET", b"/", NotServed, "/docs"),
        ("GET", b"/itm", NotServed, "did you mean /item/?"),
        ("GET", b"//item", NotServed, "did you mean"),
        ("GET", b"/item//picture", NotServed, "did you mean"),
        ("GET", b"/item/a/b/c/" + b"d/" * 20_000, NotServed, None),
        ("PATCH", b"/item/newest", WrongMethod, "use DELETE, GET, HEAD"),
        ("OPTIONS", b"/item", WrongMethod, "use GET, HEAD, POST"),
        ("GET", b"/item/%FF", Invalid, None),
        ("GET", b"/item/%ED%A0%80", Invalid, None),
        ("GET", b"/item/\xff", Invalid, None),
    ],
)
def test_a_path_that_is_not_served(method: str, path: bytes, kind: type[AEnvError], said: str | None) -> None:
    found = TABLE.find(method, path)
    assert type(found) is kind
    assert isinstance(found, AEnvError)
    assert len(found.message) < 300
    if said is not None:
        assert found.hint is not None
        assert said in found.hint
