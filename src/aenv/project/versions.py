"""Versions: how they are ordered, which of them a reference admits, and which one it means.

The order is that of Semantic Versioning 2.0.0. What ``config.json`` lets pass beyond the standard, such as leading
zeros, has its place in it too.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Sequence

from aenv.errors import Invalid, NotFound
from aenv.models import RANGE, VERSION, EnvRef

_ANY = ("latest", "*")
_Number = tuple[int, str]
"""Digits, compared as the number they are, however many there are."""
Order = tuple[tuple[_Number, ...], bool, tuple[tuple[bool, _Number], ...]]
"""The numbers, whether it is a release, and the identifiers of a pre-release."""


def order(version: str) -> Order:
    """The place of a version among others. Build metadata does not count: two versions may have one place."""
    if not VERSION.fullmatch(version):
        raise Invalid(f"{version!r} is not a semantic version", hint="use three numbers, for example 1.0.0")
    numbers, dash, pre = version.partition("+")[0].partition("-")
    return _numbers(numbers), not dash, tuple(_identifier(part) for part in pre.split("."))


def is_prerelease(version: str) -> bool:
    return "-" in version.partition("+")[0]


def admits(ref: EnvRef, version: str) -> bool:
    """Whether a version is one that is asked for: ``^1.2`` up to 2, ``~1.2`` up to 1.3, ``1.2`` any 1.2.x.

    The pre-releases of a version are admitted where it is, except those before the one that a range names:
    ``^1.0`` admits 1.0.0-rc.1, and ``^1.0.0-rc.2`` does not.
    """
    wanted = ref.version
    if wanted is None or wanted in _ANY or wanted == version:
        return True
    operator, numbers, rest = _parts(wanted)
    least, found = _numbers(numbers), order(version)
    if operator == "^":
        fixed = next((place for place, (digits, _) in enumerate(least, 1) if digits), len(least))
    elif operator == "~":
        fixed = min(len(least), 2)
    else:
        fixed = len(least)
        if fixed == 3:  # exact, and it is another one
            return False
    if found[0][:fixed] != least[:fixed] or found[0] < least:
        return False
    return not (len(least) == 3 and is_prerelease(rest)) or found >= order(numbers + rest)


def newest(versions: Iterable[str], ref: EnvRef) -> str | None:
    """The newest version that is asked for; None when there is none. What is no version is passed over.

    A pre-release is meant only where the reference names one of the same three numbers, or where nothing else is
    admitted.
    """
    admitted = [version for version in versions if VERSION.fullmatch(version) and admits(ref, version)]
    named = _named(ref)
    meant = [version for version in admitted if not is_prerelease(version) or order(version)[0] == named]
    return max(meant or admitted, key=_rank, default=None)


def resolve(ref: EnvRef, versions: Iterable[str]) -> str:
    """The newest version that is asked for. ``NotFound`` says which ones are near."""
    known = sorted({version for version in versions if VERSION.fullmatch(version)}, key=_rank)
    found = newest(known, ref)
    if found is not None:
        return found
    if ref.version is None or not known:
        raise NotFound(f"there is no version of {ref.name!r}")
    near = ", ".join(_around(ref.version, known))
    raise NotFound(f"no version of {ref.name!r} is {ref.version}", hint=f"the nearest: {near}; the newest: {known[-1]}")


def _around(wanted: str, known: Sequence[str]) -> Sequence[str]:
    """Up to two versions on each side of where the wanted one would be."""
    _, numbers, rest = _parts(wanted)
    whole = numbers + ".0" * (2 - numbers.count(".")) + rest
    place = bisect_left(known, order(whole), key=order)
    return known[max(place - 2, 0) : place + 2]


def _named(ref: EnvRef) -> tuple[_Number, ...] | None:
    """The numbers of the pre-release that a reference names, if it names one."""
    if ref.version is None or not is_prerelease(ref.version):
        return None
    return _numbers(_parts(ref.version)[1])


def _parts(wanted: str) -> tuple[str, str, str]:
    """Operator, numbers and what follows them."""
    match = RANGE.fullmatch(wanted)
    if match is None or match["numbers"] is None:
        raise Invalid(f"{wanted!r} is not a version", hint="use 1.0.1, ^1.0, ~1.0, 1.0 or latest")
    return match["operator"], match["numbers"], match["rest"] or ""


def _rank(version: str) -> tuple[Order, str]:
    """One place for each version: those that differ in build metadata alone go by their text."""
    return order(version), version


def _numbers(text: str) -> tuple[_Number, ...]:
    return tuple(_number(part) for part in text.split("."))


def _number(digits: str) -> _Number:
    significant = digits.lstrip("0")
    return len(significant), significant


def _identifier(text: str) -> tuple[bool, _Number]:
    """Numbers come before words; words go by their ASCII text."""
    return (False, _number(text)) if text.isdigit() else (True, (0, text))
