"""What is no record, page or tag, for every store: the bounds of ``base``, with what is wrong and where."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from aenv.errors import Conflict, Invalid, TooLarge
from aenv.store.base import LARGEST, LARGEST_PAGE, LONGEST, MOST_NUMBERS, MOST_TAGS, Add, Change, Delete, Full, Put

Wanted = list[tuple[str, tuple[str, ...]]]
"""Tags to find: each name with the values of which a record bears one."""

_FARTHEST = 2**53
_HUGE = 1e100
"""More than is ever added, and so little that no sum leaves what a number can be."""


def name(kind: str, key: str) -> None:
    """A kind and a key."""
    _text(kind, "a kind", LONGEST, empty=False)
    _text(key, f"a key of {_shown(kind)}", LONGEST, empty=False)


def kind(kind: str) -> None:
    _text(kind, "a kind", LONGEST, empty=False)


def changes(changes: Sequence[Change]) -> None:
    """What is to be changed together."""
    seen = set()
    for change in changes:
        name(change.kind, change.key)
        where = f"{_shown(change.kind)} {_shown(change.key)}"
        if isinstance(change, Add):
            _numbers(change, where)
            continue
        if (change.kind, change.key) in seen:
            raise Invalid(f"{where} occurs twice in one change")
        seen.add((change.kind, change.key))
        if change.expect is not None and change.expect < 0:
            raise Invalid(f"{where}: {change.expect} is no revision", hint="0 means that there must be no such record")
        if isinstance(change, Put):
            _record(change, where)


def expected(change: Put | Delete, revision: int) -> None:
    """``Conflict`` when a change expects another revision than there is; 0 is none."""
    if change.expect is None or change.expect == revision:
        return
    there = f"is at revision {revision}" if revision else "is not there"
    wanted = f"not at {change.expect}" if change.expect else "and was not to be there"
    raise Conflict(
        f"{_shown(change.kind)} {_shown(change.key)} {there}, {wanted}", hint="read it again, then change it"
    )


def added(add: Add, numbers: Mapping[str, float]) -> dict[str, float]:
    """The numbers after they were added to, without those that are 0; ``Full`` when one may not grow so far."""
    found = dict(numbers)
    for name in {**add.amounts, **add.floors}:
        amount = float(add.amounts.get(name, 0.0))
        before = found.pop(name, 0.0)
        after = max(before, float(add.floors.get(name, before))) + amount
        if amount > 0 and after > add.most.get(name, math.inf):
            raise Full(add.kind, add.key, name)
        if after:
            found[name] = after
    return found


def query(
    kind: str, tags: Mapping[str, str | Sequence[str]] | None, containing: str, limit: int, offset: int
) -> Wanted:
    """What is to be found, with each tag's values as a tuple."""
    _text(kind, "a kind", LONGEST, empty=False)
    where = f"a search for {_shown(kind)}"
    _text(containing, f"{where}: the text", LONGEST)
    if not 0 <= limit <= LARGEST_PAGE:
        raise Invalid(f"{where}: a page of {limit} records; it may have from 0 to {LARGEST_PAGE}")
    if not 0 <= offset <= _FARTHEST:
        raise Invalid(f"{where}: there is no offset of {offset}")
    wanted = [(name, _values(values)) for name, values in (tags or {}).items()]
    _tags(wanted, where)
    return wanted


def _record(put: Put, where: str) -> None:
    _text(put.search, f"{where}: the text to search", LARGEST)
    size = len(put.value) + len(put.search.encode())
    if size > LARGEST:
        raise TooLarge(f"{where} has {size} bytes; {LARGEST} is the most")
    if not math.isfinite(put.order):
        raise Invalid(f"{where}: {put.order} is no order", hint="give a finite number")
    if any(isinstance(values, str) for values in put.tags.values()):
        raise Invalid(f"{where}: a tag has one text where its values belong", hint="give a list of texts")
    _tags([(name, tuple(values)) for name, values in put.tags.items()], where)
    if put.expires_at is not None:
        if put.tags:
            raise Invalid(f"{where} has tags, so it cannot expire")
        if not math.isfinite(put.expires_at):
            raise Invalid(f"{where}: {put.expires_at} is no time", hint="give seconds since the epoch, or None")


def _numbers(add: Add, where: str) -> None:
    names = {**add.amounts, **add.floors, **add.most}
    if len(names) > MOST_NUMBERS:
        raise TooLarge(f"{where} has {len(names)} numbers; {MOST_NUMBERS} is the most")
    for name in names:
        _text(name, f"{where}: a number's name", LONGEST, empty=False)
        for number in (add.amounts.get(name, 0), add.floors.get(name, 0), add.most.get(name, 0)):
            if not -_HUGE <= number <= _HUGE:
                raise Invalid(f"{where}: {_shown(name)} is given what is no number", hint="give a finite number")


def _tags(tags: Wanted, where: str) -> None:
    if (count := sum(len(values) or 1 for _, values in tags)) > MOST_TAGS:
        raise TooLarge(f"{where} has {count} tags; {MOST_TAGS} is the most")
    for name, values in tags:
        _text(name, f"{where}: a tag's name", LONGEST, empty=False)
        for value in values:
            _text(value, f"{where}: a value of tag {_shown(name)}", LONGEST)


def _values(values: str | Sequence[str]) -> tuple[str, ...]:
    return (values,) if isinstance(values, str) else tuple(dict.fromkeys(values))


def _text(text: str, what: str, most: int, *, empty: bool = True) -> None:
    if len(text) > most:
        raise TooLarge(f"{what} has {len(text)} characters; {most} is the most")
    if "\0" in text:
        raise Invalid(f"{what} has a NUL character: {_shown(text)}")
    if not text and not empty:
        raise Invalid(f"{what} is empty")
    if not text.isascii():
        try:
            text.encode()
        except UnicodeEncodeError:
            raise Invalid(f"{what} has half a character: {_shown(text)}") from None


def _shown(text: str) -> str:
    return ascii(text if len(text) <= 64 else text[:61] + "...")
