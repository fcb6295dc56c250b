"""Names of exposed ports, and heads as they are read and written."""

from __future__ import annotations

import time

import pytest

from aenv.api.gateway.exposed import Exposed, Names
from aenv.api.gateway.failures import BadRequest, Expired, NotExpected
from aenv.api.gateway.heads import Address, Answer, Head
from aenv.errors import Forbidden, Invalid

KEY = b"k" * 32
SOON = float(int(time.time()) + 10**6)  # whenever this is run


def host(url: str) -> bytes:
    return url.split("/")[2].encode()


@pytest.mark.parametrize("id", ["one", "my-env-0a1b2c", "My_Env.1", "x--y", "-", "a" * 63, "ä", "a.b", "1"])
@pytest.mark.parametrize("port", [1, 8000, 65535])
def test_a_name_leads_back_to_what_it_was_made_for(id: str, port: int) -> None:
    names = Names(KEY, "localhost")
    url = names.url(id, port, SOON, 8081)
    name = host(url)
    assert url.startswith("http://")
    assert url.endswith(".localhost:8081/")
    assert all(0 < len(label) <= 63 for label in name.partition(b":")[0].split(b"."))
    assert name == name.lower()
    assert names.matches(name)
    assert names.read(name, time.time()) == Exposed(id, port)
    assert names.read(name.upper(), time.time()) == Exposed(id, port)


def test_a_name_is_good_for_nothing_else() -> None:
    names = Names(KEY, "localhost")
    name = host(names.url("one", 8000, SOON, 8081))
    label, _, rest = name.partition(b".")
    port, expiry, signature = label.split(b"-")
    forged = [
        b"8001-%b-%b.%b" % (expiry, signature, rest),
        b"08000-%b-%b.%b" % (expiry, signature, rest),
        b"%b-%b1-%b.%b" % (port, expiry, signature, rest),
        b"%b.%b" % (label, rest.replace(b"one", b"two")),
        b"%b-%b-%b.%b" % (port, expiry, b"a" * 32, rest),
        b"x.%b" % name,
        b"%b..localhost" % label,
        b"x.localhost",
        b".localhost",
        host(Names(b"other" * 8, "localhost").url("one", 8000, SOON, 8081)),
    ]
    for each in forged:
        with pytest.raises(Forbidden):
            names.read(each, time.time())
    with pytest.raises(Expired):
        names.read(name, SOON + 1)
    for plain in (b"localhost", b"localhost:8081", b"127.0.0.1:8081", b"evil.com", b"", b"notlocalhost"):
        assert not names.matches(plain)


def test_tls_may_end_in_front_of_us() -> None:
    url = Names(KEY, "https://ports.example.com").url("one", 80, SOON, 8081)
    assert url.startswith("https://80-")
    assert url.endswith(".one.ports.example.com/")
    assert Names(KEY, "https://ports.example.com:444").url("one", 80, SOON, 1).endswith(".example.com:444/")


@pytest.mark.parametrize(("id", "port"), [("one", 0), ("one", 65536), ("one", -1), ("A" * 50, 80)])
def test_what_cannot_be_named(id: str, port: int) -> None:
    with pytest.raises(Invalid):
        Names(KEY, "localhost").url(id, port, SOON, 8081)
    with pytest.raises(Invalid):
        Names(KEY, "")


def read(*headers: tuple[bytes, bytes], method: bytes = b"GET", url: bytes = b"/", version: str = "1.1") -> Head:
    return Head(method, url, [(b"Host", b"localhost"), *headers], version=version, keep_alive=True)


@pytest.mark.parametrize(
    "headers",
    [
        [(b"Content-Length", b"1"), (b"Transfer-Encoding", b"chunked")],
        [(b"Content-Length", b"1"), (b"content-length", b"1")],
        [(b"Content-Length", b"\xb2")],
        [(b"Content-Length", b"1_0")],
        [(b"Transfer-Encoding", b"identity")],
        [(b"X", b"a\nb")],
        [(b"X", b"a\rb")],
        [(b"X", b"a\0b")],
        [(b"Authorization", b"a"), (b"authorization", b"b")],
    ],
)
def test_a_parser_that_lets_something_through_is_not_enough(headers: list[tuple[bytes, bytes]]) -> None:
    with pytest.raises(BadRequest):
        read(*headers)


def test_expectations() -> None:
    with pytest.raises(NotExpected):
        read((b"Expect", b"miracles"))
    expecting = ((b"Expect", b"100-continue"), (b"Content-Length", b"3"))
    assert b"Expect: 100-continue" in read(*expecting).to_sandbox("", None)
    assert b"Expect" not in read(*expecting, version="1.0").to_sandbox("", None)


def test_a_prefix_stays_in_front() -> None:
    found = read(url=b"/env-instance/one/mcp?x=/../")
    assert found.address() == Address("one")
    assert found.to_sandbox("/base", "secret").startswith(b"GET /base/mcp?x=/../ HTTP/1.1\r\nHost: localhost\r\n")
    bare = read(url=b"/env-instance/one")
    assert (bare.address(), bare.path) == (Address("one"), b"/")
    service = read(url=b"/env-service/one/mcp")
    assert (service.address(), service.path) == (Address("one", is_service=True), b"/mcp")


@pytest.mark.parametrize(
    "headers",
    [
        [(b"Content-Length", b"1"), (b"Content-Length", b"1")],
        [(b"Content-Length", b"1"), (b"Transfer-Encoding", b"chunked")],
        [(b"Transfer-Encoding", b"gzip, chunked")],
        [(b"X", b"a\r\nSet-Cookie: x")],
    ],
)
def test_answers_that_could_mean_two_things(headers: list[tuple[bytes, bytes]]) -> None:
    with pytest.raises(ValueError, match="."):
        Answer(200, b"OK", headers)
