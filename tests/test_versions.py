"""Versions: the order of the standard, what a reference admits, and which version it means."""

from __future__ import annotations

import re
from itertools import pairwise, permutations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aenv.errors import Invalid, NotFound
from aenv.models import RANGE, VERSION, EnvRef
from aenv.project.versions import admits, is_prerelease, newest, order, resolve

STANDARD = re.compile(
    r"(0|[1-9]\d*)\.(0|[1-9]\d*)\.(0|[1-9]\d*)"
    r"(?:-((?:0|[1-9]\d*|\d*[a-zA-Z-][0-9a-zA-Z-]*)(?:\.(?:0|[1-9]\d*|\d*[a-zA-Z-][0-9a-zA-Z-]*))*))?"
    r"(?:\+([0-9a-zA-Z-]+(?:\.[0-9a-zA-Z-]+)*))?",
    re.ASCII,
)
"""The expression that semver.org suggests."""
NUMBERS = st.integers(0, 3) | st.integers(9, 11) | st.integers(0)
IDENTIFIERS = NUMBERS.map(str) | st.sampled_from(["alpha", "beta", "rc", "a-b", "-", "--1", "A", "Z", "a", "0a", "1-0"])


@st.composite
def versions(draw: st.DrawFn) -> str:
    """A version of the standard, near to others."""
    text = ".".join(str(draw(NUMBERS)) for _ in range(3))
    pre = draw(st.lists(IDENTIFIERS, max_size=3))
    build = draw(st.sampled_from(["", "", "+1", "+build.5", "+a-b"]))
    return text + ("-" + ".".join(pre) if pre else "") + build


LAX = versions() | st.from_regex(VERSION, fullmatch=True)
"""What config.json lets pass."""
REFS = st.builds(EnvRef, st.just("x"), st.none() | versions().map("^{}".format) | st.from_regex(RANGE, fullmatch=True))


def standard(left: str, right: str) -> int:
    """Precedence as section 11 of the standard words it: -1, 0 or 1."""
    one, two = STANDARD.fullmatch(left), STANDARD.fullmatch(right)
    assert one
    assert two
    for a, b in zip(one.groups()[:3], two.groups()[:3], strict=True):
        if int(a) != int(b):
            return -1 if int(a) < int(b) else 1
    if one[4] is None or two[4] is None:
        return (one[4] is None) - (two[4] is None)
    first, second = one[4].split("."), two[4].split(".")
    for a, b in zip(first, second, strict=False):
        if a == b:
            continue
        if a.isdigit() and b.isdigit():
            return -1 if int(a) < int(b) else 1
        if a.isdigit() != b.isdigit():
            return -1 if a.isdigit() else 1
        return -1 if a < b else 1
    return (len(first) > len(second)) - (len(first) < len(second))


# Order


@pytest.mark.parametrize(
    "rising",
    [
        "1.9.0 1.10.0 1.11.0",
        "1.0.0 2.0.0 2.1.0 2.1.1",
        "1.0.0-alpha 1.0.0",
        "1.0.0-alpha 1.0.0-alpha.1 1.0.0-alpha.beta 1.0.0-beta 1.0.0-beta.2 1.0.0-beta.11 1.0.0-rc.1 1.0.0",
        "1.0.0-0.3.7 1.0.0-1 1.0.0-alpha 1.0.0-x.7.z.92 1.0.0-x-y-z.-- 1.0.0 1.0.1-0",
        "1.0.0-9 1.0.0-10 1.0.0--1 1.0.0-A 1.0.0-a",
        "0.0.0-0 0.0.0 9007199254740993.0.0 99999999999999999999999999.0.0",
    ],
)
def test_the_order_of_the_standard(rising: str) -> None:
    for lower, higher in pairwise(rising.split()):
        assert order(lower) < order(higher)


@pytest.mark.parametrize(
    ("left", "right"),
    [
        ("1.0.0+20130313144700", "1.0.0"),
        ("1.0.0-alpha+001", "1.0.0-alpha"),
        ("1.0.0-beta+exp.sha.5114f85", "1.0.0-beta+other"),
        ("1.0.0+21AF26D3----117B344092BD", "1.0.0+a-b"),
    ],
)
def test_build_metadata_has_no_place_in_the_order(left: str, right: str) -> None:
    assert order(left) == order(right)


@pytest.mark.parametrize(
    ("version", "expected"), [("1.0.0-a", True), ("1.0.0-a+b", True), ("1.0.0", False), ("1.0.0+a-b", False)]
)
def test_what_is_a_pre_release(version: str, expected: bool) -> None:
    assert is_prerelease(version) is expected


@given(versions(), versions())
def test_the_order_is_what_the_standard_words(left: str, right: str) -> None:
    assert (order(left) > order(right)) - (order(left) < order(right)) == standard(left, right)


@given(LAX, LAX, LAX)
def test_the_order_is_total(one: str, two: str, three: str) -> None:
    for a, b, c in permutations((order(one), order(two), order(three))):
        assert (a < b) + (a == b) + (a > b) == 1
        assert not (a <= b <= c) or a <= c


def test_numbers_may_be_longer_than_python_reads() -> None:
    huge = "9" * 5000
    assert order(f"1.0.{huge}") < order(f"1.0.1{huge}")
    assert admits(EnvRef("x", f"^1.0.{huge}"), f"1.1.{huge}")


@pytest.mark.parametrize("text", ["", "1", "1.0", "1.0.0.0", "v1.0.0", "1.0.0-", "1.0.0\n", "1.\u0660.0", "latest"])
def test_what_is_no_version_has_no_place(text: str) -> None:
    with pytest.raises(Invalid, match="is not a semantic version"):
        order(text)


# What a reference admits


@pytest.mark.parametrize(
    ("wanted", "admitted", "refused"),
    [
        (None, ["0.0.1", "9.9.9"], []),
        ("latest", ["1.0.0"], []),
        ("*", ["1.0.0-rc.1"], []),
        ("1.2.3", ["1.2.3"], ["1.2.4", "1.2.30", "1.2.3-rc.1", "1.2.3+build"]),
        ("1.2.3-rc.1", ["1.2.3-rc.1"], ["1.2.3-rc.2", "1.2.3"]),
        ("1.2", ["1.2.0", "1.2.9"], ["1.3.0", "2.2.0"]),
        ("1", ["1.0.0", "1.9.9"], ["2.0.0", "10.0.0"]),
        ("^1.2", ["1.2.0", "1.9.0", "1.10.0"], ["1.1.9", "2.0.0", "2.0.0-rc.1"]),
        ("^0.2.3", ["0.2.3", "0.2.9"], ["0.2.2", "0.3.0", "1.0.0"]),
        ("^0.0.3", ["0.0.3"], ["0.0.2", "0.0.4"]),
        ("^0.0", ["0.0.0", "0.0.9"], ["0.1.0"]),
        ("^0", ["0.0.0", "0.9.0"], ["1.0.0"]),
        ("^1.0.0-rc.2", ["1.0.0-rc.2", "1.0.0-rc.10", "1.0.0", "1.1.0"], ["1.0.0-rc.1", "1.0.0-beta", "2.0.0"]),
        ("^1.0.0+build-1", ["1.0.0", "1.0.0-rc.1"], ["0.9.0"]),
        ("~1.2.3", ["1.2.3", "1.2.9"], ["1.2.2", "1.3.0"]),
        ("~1.2.3-b", ["1.2.3-b", "1.2.3"], ["1.2.3-a", "1.3.0"]),
        ("~1.2", ["1.2.0", "1.2.9"], ["1.3.0"]),
        ("~1", ["1.0.0", "1.9.0"], ["2.0.0"]),
    ],
)
def test_which_versions_a_reference_admits(wanted: str | None, admitted: list[str], refused: list[str]) -> None:
    ref = EnvRef("x", wanted)
    assert [version for version in admitted + refused if admits(ref, version)] == admitted


@pytest.mark.parametrize("wanted", ["", "newest", ">=1.0", "1.0.0.0", "^", "^latest", "-"])
def test_a_reference_that_nobody_parsed_is_refused(wanted: str) -> None:
    with pytest.raises(Invalid, match="is not a version"):
        admits(EnvRef("x", wanted), "1.0.0")


@given(REFS, LAX)
def test_whatever_parses_is_answered(ref: EnvRef, version: str) -> None:
    assert EnvRef.parse(str(ref)) == ref
    assert admits(ref, version) in (True, False)


@given(LAX)
def test_a_version_is_admitted_by_itself_and_by_ranges_from_it(version: str) -> None:
    for prefix in ("", "^", "~"):
        assert admits(EnvRef("x", prefix + version), version)


# Which one is meant


@pytest.mark.parametrize(
    ("known", "wanted", "found"),
    [
        ("1.9.0 1.10.0 2.0.0-rc.1 2.0.0", None, "2.0.0"),
        ("1.9.0 1.10.0 2.0.0-rc.1", None, "1.10.0"),
        ("1.9.0 2.0.0-rc.1", "latest", "1.9.0"),
        ("1.0.0-rc.2 1.0.0-rc.10", None, "1.0.0-rc.10"),
        ("1.0.0-rc.1 0.9.0", "^1.0", "1.0.0-rc.1"),
        ("1.0.0 1.1.0-rc.1", "^1.0", "1.0.0"),
        ("1.1.0-rc.1 1.1.0-rc.2 1.0.0", "^1.1.0-rc.1", "1.1.0-rc.2"),
        ("1.1.0 1.2.0-rc.1", "^1.1.0-rc.1", "1.1.0"),
        ("1.1.0-rc.1 1.1.0", "1.1.0-rc.1", "1.1.0-rc.1"),
        ("1.0.0 1.0.0+a 1.0.0+b", None, "1.0.0+b"),
        ("notes .tmp 1.0 1.0.0", None, "1.0.0"),
        ("1.0.0", "^2.0", None),
        ("notes", None, None),
        ("", None, None),
    ],
)
def test_the_newest_that_is_meant(known: str, wanted: str | None, found: str | None) -> None:
    for listing in permutations(known.split()):
        assert newest(listing, EnvRef("x", wanted)) == found


@given(st.lists(LAX), REFS)
def test_the_newest_is_there_admitted_and_not_surpassed(known: list[str], ref: EnvRef) -> None:
    admitted = [version for version in known if admits(ref, version)]
    found = newest(iter(known), ref)
    assert found == newest(reversed(known), ref)
    if found is None:
        assert not admitted
        return
    assert found in admitted
    assert all(order(version) <= order(found) or is_prerelease(version) for version in admitted)
    if is_prerelease(found) and not is_prerelease(ref.version or ""):
        assert all(is_prerelease(version) for version in admitted)


@given(st.lists(LAX), REFS)
def test_a_reference_is_resolved_or_answered_with_what_there_is(known: list[str], ref: EnvRef) -> None:
    try:
        assert resolve(ref, iter(known)) == newest(known, ref)
    except NotFound as error:
        assert newest(known, ref) is None
        near = re.findall(r"[^\s,;]+", (error.hint or "").partition(": ")[2].replace("the newest:", ""))
        assert set(near) <= set(known)
        assert bool(near) is bool(known)


@pytest.mark.parametrize(
    ("wanted", "hint"),
    [
        ("1.4.0", "the nearest: 1.2.0, 1.3.0, 2.0.0, 2.1.0; the newest: 3.0.0"),
        ("~1.4", "the nearest: 1.2.0, 1.3.0, 2.0.0, 2.1.0; the newest: 3.0.0"),
        ("^9.0", "the nearest: 2.1.0, 3.0.0; the newest: 3.0.0"),
        ("0.1", "the nearest: 1.2.0, 1.3.0; the newest: 3.0.0"),
    ],
)
def test_a_miss_names_the_nearest(wanted: str, hint: str) -> None:
    known = ["3.0.0", "1.2.0", "2.0.0", "1.3.0", "2.1.0", "notes"]
    with pytest.raises(NotFound) as caught:
        resolve(EnvRef("tool", wanted), known)
    assert caught.value.message == f"no version of 'tool' is {wanted}"
    assert caught.value.hint == hint


@pytest.mark.parametrize("wanted", [None, "latest", "1.0.0"])
def test_a_miss_where_there_is_nothing(wanted: str | None) -> None:
    with pytest.raises(NotFound, match="there is no version of 'tool'"):
        resolve(EnvRef("tool", wanted), ["notes"])
