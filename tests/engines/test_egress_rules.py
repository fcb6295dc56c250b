"""What an allow-list admits, in every spelling, and which heads have one meaning."""

import contextlib
from ipaddress import ip_address

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aenv.engines.egress.messages import read_answer, read_chunk_size, read_request
from aenv.engines.egress.rules import Rules, is_public, parse
from aenv.errors import Invalid

LOOPBACKS = [
    "127.0.0.1",
    "127.0.0.1.",
    "127.1",
    "127.0.1",
    "0x7f.1",
    "0x7F.0.0.0x1",
    "0x7f000001",
    "2130706433",
    "017700000001",
    "0177.0.0.01",
    "[::ffff:127.0.0.1]",
    "[::ffff:7f00:1]",
    "[0:0:0:0:0:FFFF:7F00:0001]",
]


@pytest.mark.parametrize("spelling", LOOPBACKS)
def test_every_spelling_of_an_address_is_that_address(spelling):
    assert parse(f"{spelling}:80") == parse("127.0.0.1:80")
    assert Rules(["127.0.0.1:80"]).admits(parse(f"{spelling}:80"))
    assert Rules([f"{spelling}:80"]).admits(parse("127.0.0.1:80"))
    assert not Rules(["*.example.org:80", "localhost:80"]).admits(parse(f"{spelling}:80"))


@pytest.mark.parametrize(
    "text",
    [
        "",
        ":80",
        "example.org",
        "example.org:",
        "example.org:0",
        "example.org:65536",
        "example.org:+80",
        "example.org:80 ",
        " example.org:80",
        "example.org:80\n",
        "exa mple.org:80",
        "user@example.org:80",
        "example..org:80",
        ".example.org:80",
        "example.org..:80",
        "-example.org:80",
        "example-.org:80",
        f"{'a' * 64}.org:80",
        f"{'a.' * 127}org:80",
        "ex%61mple.org:80",
        "example.org\\.evil.org:80",
        "ex\u00e4mple.org:80",
        "\uff11\uff12\uff17.0.0.1:80",
        "::1:80",
        "[::1:80",
        "[::1]80",
        "[::1%lo]:80",
        "[fe80::1%25eth0]:80",
        "[127.0.0.1]:80",
        "[example.org]:80",
        "[::ffff:0x7f.1]:80",
        "256.1.1.1:80",
        "1.2.3.4.5:80",
        "1.2.3.0x:80",
        "0xffffffffff:80",
        "example.08:80",
        "foo.0x7f:80",
        "*.example.org:80",
    ],
)
def test_what_is_no_address_is_refused(text):
    with pytest.raises(ValueError, match=r"."):
        parse(text)


def test_names_are_compared_in_one_spelling():
    rules = Rules(["Example.ORG.:443", "b\u00fccher.example:443", "my_bucket.example:443"])
    for name in ("example.org", "EXAMPLE.org.", "xn--bcher-kva.example", "XN--BCHER-KVA.example", "my_bucket.example"):
        assert rules.admits(parse(f"{name}:443")), name
    for name in ("www.example.org", "example.org.evil.org", "notexample.org", "bcher.example"):
        assert not rules.admits(parse(f"{name}:443")), name
    assert not rules.admits(parse("example.org:80"))
    assert not rules.admits(parse("example.org:4430"))


def test_a_wildcard_stands_for_names_below_and_not_for_the_name_itself():
    rules = Rules(["*.example.org:443", "*.org.uk:80"])
    for name in ("a.example.org", "a.b.example.org", "A.EXAMPLE.ORG."):
        assert rules.admits(parse(f"{name}:443")), name
    for name in ("example.org", "aexample.org", "example.org.evil.org", "org", "10.0.0.1"):
        assert not rules.admits(parse(f"{name}:443")), name
    assert not rules.admits(parse("a.example.org:80"))


@pytest.mark.parametrize(
    "entry",
    [
        "example.org",
        "*:443",
        "*.*.org:443",
        "a.*.org:443",
        "*.0.0.1:80",
        "*.[::1]:80",
        "10.0.0.0/8:443",
        "http://example.org:80",
        "example.org:https",
        "stra\u00dfe.example:443",
        "\u2100.example:443",
    ],
)
def test_an_entry_that_means_nothing_is_refused_by_name(entry):
    with pytest.raises(Invalid) as caught:
        Rules(["example.org:443", entry])
    assert repr(entry) in caught.value.message
    assert "host:port" in (caught.value.hint or "")


@pytest.mark.parametrize(
    "text",
    [
        "0.0.0.0",
        "10.1.2.3",
        "100.64.0.1",
        "127.0.0.1",
        "127.255.255.254",
        "169.254.169.254",
        "172.16.0.1",
        "172.31.255.255",
        "192.0.0.8",
        "192.0.2.1",
        "192.88.99.1",
        "192.168.1.1",
        "198.18.0.1",
        "198.51.100.1",
        "203.0.113.1",
        "224.0.0.1",
        "239.255.255.255",
        "240.0.0.1",
        "255.255.255.255",
        "::",
        "::1",
        "::7f00:1",
        "::ffff:10.0.0.1",
        "::ffff:0:127.0.0.1",
        "64:ff9b::169.254.169.254",
        "64:ff9b:1::1",
        "100::1",
        "2001::1",
        "2001:db8::1",
        "2002:7f00:1::",
        "3fff::1",
        "5f00::1",
        "fc00::1",
        "fd00:ec2::254",
        "fe80::1",
        "fec0::1",
        "ff02::1",
    ],
)
def test_addresses_that_are_not_public(text):
    assert not is_public(ip_address(text))
    assert not Rules(["name.example:80", "8.8.8.8:80"]).reaches(ip_address(text), 80)


@pytest.mark.parametrize(
    "text", ["1.1.1.1", "8.8.8.8", "172.32.0.1", "192.0.1.1", "2606:4700::1111", "::ffff:8.8.8.8", "64:ff9b::8.8.8.8"]
)
def test_addresses_that_are_public(text):
    assert is_public(ip_address(text))


def test_a_name_may_lead_to_a_private_address_that_the_list_names_with_that_port():
    rules = Rules(["db.corp:5432", "10.0.0.5:5432", "[fd00::5]:5432"])
    assert rules.reaches(ip_address("10.0.0.5"), 5432)
    assert rules.reaches(ip_address("::ffff:10.0.0.5"), 5432)
    assert rules.reaches(ip_address("fd00::5"), 5432)
    assert not rules.reaches(ip_address("10.0.0.5"), 80)
    assert not rules.reaches(ip_address("10.0.0.6"), 5432)


HEADS = st.one_of(
    st.binary(max_size=200),
    st.builds(
        lambda first, fields: b"\r\n".join([first, *fields]),
        st.sampled_from([b"GET http://example.org/ HTTP/1.1", b"CONNECT a:1 HTTP/1.0", b"HTTP/1.1 200 OK", b""])
        | st.binary(max_size=30),
        st.lists(
            st.builds(
                lambda name, value: name + b":" + value,
                st.sampled_from([b"Host", b"Content-Length", b"Transfer-Encoding", b"Connection"]) | st.binary(),
                st.sampled_from([b"example.org", b"3", b"chunked", b"close, host"]) | st.binary(),
            ),
            max_size=5,
        ),
    ),
)


@given(HEADS)
def test_a_head_is_read_or_refused_and_what_leaves_is_one_head(head):
    request = None
    with contextlib.suppress(ValueError):
        request = read_request(head)
    if request is None:
        request = read_request(b"GET http://example.org/ HTTP/1.1\r\nHost: example.org")
    else:
        lines = request.head.split(b"\r\n")
        assert request.tunnel or lines[-2:] == [b"", b""]
        assert not any(b"\r" in line or b"\n" in line for line in lines)
        assert sum(line.lower().startswith((b"host:", b"host ")) for line in lines) == (0 if request.tunnel else 1)
        assert sum(line.lower().startswith((b"content-length", b"transfer-encoding")) for line in lines) <= 1
    try:
        answer = read_answer(head, request)
    except ValueError:
        return
    assert answer.head.endswith(b"\r\n\r\n")
    assert b"\r\n\r\n" not in answer.head[:-4]


@given(st.text() | st.from_regex(r"\[?[0-9a-fx:.]{1,20}\]?:[0-9]{1,5}", fullmatch=True))
def test_an_address_is_read_or_refused_and_reads_the_same_when_written(text):
    try:
        address = parse(text)
    except ValueError:
        return
    assert parse(str(address)) == address
    assert str(address).isascii()


@given(st.binary(max_size=24))
def test_the_size_of_a_chunk_is_read_or_refused(line):
    with contextlib.suppress(ValueError):
        assert 0 <= read_chunk_size(line) < 16**15
