"""What every store promises, on each of them."""

from __future__ import annotations

import asyncio
import random
import sys
import time
from pathlib import Path

import pytest

from aenv.errors import Conflict, Invalid, NetworkError, TooLarge, Unsupported
from aenv.store import Delete, Page, Put, Record, Store, open_store
from aenv.store.base import LARGEST, LARGEST_PAGE, LONGEST, MOST_TAGS, PAGE
from tests.support import until

STRANGE = "Ünï:{c}ö∂é \n\"'%_* 🎈"
SOON = 0.2


def keys(page: Page) -> list[str]:
    return [record.key for record in page.records]


async def fill(store: Store, count: int, kind: str = "k") -> None:
    """Records 0000, 0001, ... of which the last has the largest order."""
    puts = [Put(kind, f"{number:04}", b"%d" % number, order=number, tags={"all": ["yes"]}) for number in range(count)]
    for start in range(0, count, 500):
        await store.change(*puts[start : start + 500])


# A record


async def test_what_was_put_is_what_is_got(store: Store) -> None:
    put = Put(
        "env", "a", b'{"x": 1}', tags={"owner": ["me"], "label": ["x", "y"], "none": []}, order=1.1, search="Some Text"
    )
    [revision] = await store.change(put)
    assert await store.get("env", "a") == Record(
        "env", "a", b'{"x": 1}', revision, put.tags, order=1.1, search="Some Text", expires_at=None
    )


async def test_there_is_no_record_that_nobody_put(store: Store) -> None:
    await store.change(Put("env", "a", b"1"))
    assert await store.get("env", "b") is None
    assert await store.get("other", "a") is None
    assert await store.find("other") == Page([], 0)
    assert [record async for record in store.scan("other")] == []


async def test_a_put_replaces_everything(store: Store) -> None:
    await store.change(Put("k", "a", b"1", tags={"t": ["1", "2"]}, order=5, search="old"))
    [revision] = await store.change(Put("k", "a", b"2", tags={"t": ["2"], "u": ["3"]}, order=6, search="new"))
    assert await store.get("k", "a") == Record("k", "a", b"2", revision, {"t": ["2"], "u": ["3"]}, 6.0, "new")
    assert keys(await store.find("k", {"t": "1"})) == []
    assert keys(await store.find("k", {"t": "2"})) == ["a"]
    assert keys(await store.find("k", {"u": "3"})) == ["a"]
    assert keys(await store.find("k", containing="old")) == []
    assert (await store.find("k")).total == 1


async def test_the_same_key_in_two_kinds_is_two_records(store: Store) -> None:
    await store.change(Put("a", "x", b"1", tags={"t": ["1"]}), Put("b", "x", b"2", tags={"t": ["1"]}))
    await store.change(Delete("a", "x"))
    assert await store.get("a", "x") is None
    assert [record.value for record in (await store.find("b", {"t": "1"})).records] == [b"2"]


async def test_any_character_but_nul_is_kept(store: Store) -> None:
    put = Put(STRANGE, STRANGE, '"🎈"'.encode(), tags={STRANGE: [STRANGE, ""]}, search=STRANGE)
    [revision] = await store.change(put)
    record = Record(STRANGE, STRANGE, '"🎈"'.encode(), revision, {STRANGE: [STRANGE, ""]}, search=STRANGE)
    assert await store.get(STRANGE, STRANGE) == record
    assert (await store.find(STRANGE, {STRANGE: STRANGE})).records == [record]
    assert (await store.find(STRANGE, {STRANGE: ""}, containing=STRANGE)).records == [record]
    assert [found async for found in store.scan(STRANGE)] == [record]
    assert await store.kinds() == [STRANGE]


async def test_names_that_look_alike_are_not_taken_for_each_other(store: Store) -> None:
    await store.change(
        Put("a:b", "c", b"1", tags={"x:y": ["z"]}),
        Put("a", "b:c", b"2", tags={"x": ["y:z"]}),
        Put("A", "b:c", b"3", tags={"X": ["y:z"]}),
    )
    assert (await store.find("a:b", {"x": "y:z"})).total == 0
    assert [record.value for record in (await store.find("a", {"x": "y:z"})).records] == [b"2"]
    assert (await store.find("a", {"X": "y:z"})).total == 0
    assert await store.get("a", "b") is None


async def test_any_bytes_up_to_the_largest_are_kept(store: Store) -> None:
    value = bytes(range(256)) * (LARGEST // 256)
    await store.change(Put("k", "a", value))
    record = await store.get("k", "a")
    assert record is not None
    assert record.value == value
    assert (await store.find("k")).records == [record]


async def test_a_record_outlives_the_store_that_wrote_it(url: str) -> None:
    async with await open_store(url) as store:
        [revision] = await store.change(Put("k", "a", b"1", tags={"t": ["v"]}, search="Text"))
    async with await open_store(url) as store:
        assert await store.get("k", "a") == Record("k", "a", b"1", revision, {"t": ["v"]}, search="Text")
        assert keys(await store.find("k", {"t": "v"}, containing="text")) == ["a"]


# Revisions, and what a change expects


async def test_a_revision_grows_and_is_never_used_again(url: str) -> None:
    seen = []
    async with await open_store(url) as store:
        seen += await store.change(Put("k", "a", b"1"))
        seen += await store.change(Put("k", "a", b"1"))
        seen += await store.change(Put("k", "b", b"1"), Put("k", "c", b"1"))
        await store.change(Delete("k", "a"), Delete("k", "c"))
    async with await open_store(url) as store:
        seen += await store.change(Put("k", "a", b"1"))
        assert await store.change(Delete("k", "a")) == [0]
        seen += await store.change(Put("k", "a", b"1"))
        record = await store.get("k", "a")
    assert seen == sorted(set(seen))
    assert seen[0] > 0
    assert record is not None
    assert record.revision == seen[-1]


async def test_a_record_that_must_be_new(store: Store) -> None:
    await store.change(Put("k", "a", b"1", expect=0))
    with pytest.raises(Conflict, match="'k' 'a' is at revision"):
        await store.change(Put("k", "a", b"2", expect=0))
    await store.change(Delete("k", "a"))
    await store.change(Put("k", "a", b"3", expect=0))


@pytest.mark.parametrize("change", [Put("k", "a", b"2"), Delete("k", "a")], ids=["put", "delete"])
async def test_a_revision_that_is_expected(store: Store, change: Put | Delete) -> None:
    from msgspec.structs import replace

    with pytest.raises(Conflict, match="'k' 'a' is not there"):
        await store.change(replace(change, expect=1))
    [revision] = await store.change(Put("k", "a", b"1"))
    for wrong in (0, revision - 1, revision + 1, 2**60):
        if wrong != revision:
            with pytest.raises(Conflict, match=f"is at revision {revision}"):
                await store.change(replace(change, expect=wrong))
    record = await store.get("k", "a")
    assert record is not None
    assert (record.value, record.revision) == (b"1", revision)
    await store.change(replace(change, expect=revision))
    with pytest.raises(Conflict):
        await store.change(replace(change, expect=revision))


async def test_what_is_not_there_is_deleted_already(store: Store) -> None:
    assert await store.change(Delete("k", "a"), Delete("k", "b", expect=0)) == [0, 0]


async def test_changes_are_made_together_or_not_at_all(store: Store) -> None:
    await store.change(Put("k", "kept", b"1", tags={"t": ["old"]}), Put("k", "gone", b"1", tags={"t": ["old"]}))
    before = [record async for record in store.scan("k")]
    with pytest.raises(Conflict, match="'last'"):
        await store.change(
            Put("k", "kept", b"2", tags={"t": ["new"]}),
            Put("k", "new", b"2", tags={"t": ["new"]}),
            Delete("k", "gone"),
            Put("k", "last", b"2", expect=7),
        )
    assert [record async for record in store.scan("k")] == before
    assert (await store.find("k", {"t": "new"})).total == 0
    assert keys(await store.find("k", {"t": "old"})) == ["gone", "kept"]


async def test_each_change_is_answered_with_its_revision(store: Store) -> None:
    await store.change(Put("k", "b", b"1"))
    first, second, third = await store.change(Put("k", "a", b"1"), Delete("k", "b"), Put("l", "a", b"1"))
    assert second == 0
    for kind, revision in (("k", first), ("l", third)):
        record = await store.get(kind, "a")
        assert record is not None
        assert record.revision == revision
    assert await store.change() == []


async def test_a_change_that_conflicts_does_not_harm_the_others_of_its_moment(store: Store) -> None:
    await store.change(Put("k", "there", b"1"))
    outcomes = await asyncio.gather(
        *(
            store.change(
                Put("k", f"{number}", b"1", tags={"t": ["v"]}),
                Put("k", "there", b"2", expect=0 if number % 2 else None),
            )
            for number in range(20)
        ),
        return_exceptions=True,
    )
    assert [isinstance(outcome, Conflict) for outcome in outcomes] == [bool(number % 2) for number in range(20)]
    assert sorted(keys(await store.find("k", {"t": "v"})), key=int) == [str(number) for number in range(0, 20, 2)]


async def test_of_many_who_expect_the_same_one_succeeds(store: Store) -> None:
    outcomes = await asyncio.gather(
        *(store.change(Put("k", "a", b"%d" % number, expect=0)) for number in range(50)), return_exceptions=True
    )
    [winner] = [number for number, outcome in enumerate(outcomes) if isinstance(outcome, list)]
    assert sum(isinstance(outcome, Conflict) for outcome in outcomes) == 49
    record = await store.get("k", "a")
    assert record is not None
    assert record.value == b"%d" % winner


async def test_concurrent_increments_lose_none(store: Store) -> None:
    await store.change(Put("k", "n", b"0"))

    async def increment() -> None:
        while True:
            record = await store.get("k", "n")
            assert record is not None
            await asyncio.sleep(0)  # let the others in between
            try:
                await store.change(Put("k", "n", b"%d" % (int(record.value) + 1), expect=record.revision))
            except Conflict:
                continue
            return

    running = asyncio.Semaphore(20)

    async def turn() -> None:
        async with running:
            await increment()

    await asyncio.gather(*(turn() for _ in range(200)))
    record = await store.get("k", "n")
    assert record is not None
    assert record.value == b"200"


async def test_a_cancelled_caller_disturbs_nobody(store: Store) -> None:
    cancelled = [asyncio.create_task(store.change(Put("k", f"c{number}", b"1"))) for number in range(20)]
    others = [asyncio.create_task(store.change(Put("k", f"o{number}", b"%d" % number))) for number in range(20)]
    await asyncio.sleep(0)
    for task in cancelled:
        task.cancel()
    await asyncio.gather(*others)
    await asyncio.gather(*cancelled, return_exceptions=True)
    records = await asyncio.gather(*(store.get("k", f"o{number}") for number in range(20)))
    assert [record and record.value for record in records] == [b"%d" % number for number in range(20)]


# Lists


async def test_the_largest_order_comes_first_then_the_smallest_key(store: Store) -> None:
    orders = [0.0, -1.5, 1e300, 3, 3, -1e-300, 1e-300, 1731672000.123456, 1731672000.123457, -1e300]
    names = ["b", "B", "🎈", "a", "é", "z", "aa", "\uffff", "10", "9"]
    puts = [Put("k", name, b"1", order=order, tags={"t": ["v"]}) for name in names for order in [orders.pop()]]
    puts += [Put("k", f"tie{name}", b"1", tags={"t": ["v"]}) for name in names]
    random.Random(7).shuffle(puts)
    for put in puts:
        await store.change(put)
    expected = [put.key for put in sorted(puts, key=lambda put: (-put.order, put.key.encode()))]
    assert keys(await store.find("k")) == expected
    assert keys(await store.find("k", {"t": "v"})) == expected
    assert keys(await store.find("k", {"t": ["v", "w"]})) == expected
    assert keys(await store.find("k", containing="")) == expected
    assert [record.key async for record in store.scan("k")] == sorted(expected, key=str.encode)


async def test_a_changed_order_moves_a_record(store: Store) -> None:
    await fill(store, 3)
    await store.change(Put("k", "0000", b"1", order=9, tags={"all": ["yes"]}))
    for page in (await store.find("k"), await store.find("k", {"all": "yes"})):
        assert keys(page) == ["0000", "0002", "0001"]
        assert page.total == 3
        assert page.records[0].order == 9


async def test_every_tag_must_fit_with_one_of_its_values(store: Store) -> None:
    colours = ("red", "green", "blue")
    sizes = ("s", "m")
    puts = [
        Put("k", f"{colour}{size}{both}", b"1", tags={"colour": [colour, *both], "size": [size], "any": ["1"]})
        for colour in colours
        for size in sizes
        for both in ((), ("grey",))
    ]
    await store.change(*puts)
    asked: list[dict[str, str | list[str]]] = [
        {},
        {"colour": "red"},
        {"colour": ["red"]},
        {"colour": ["red", "grey"]},
        {"colour": ["grey", "red", "green", "red"]},
        {"colour": "red", "size": "s"},
        {"colour": ["red", "grey"], "size": ["s", "m"]},
        {"colour": ["red", "grey"], "size": "m", "any": "1"},
        {"colour": "red", "size": "xl"},
        {"colour": ["red", "pink"], "other": "1"},
        {"colour": []},
        {"colour": [], "size": "s"},
        {"any": "1"},
    ]
    for tags in asked:
        lists = {name: [values] if isinstance(values, str) else values for name, values in tags.items()}
        expected = sorted(
            put.key for put in puts if all(set(put.tags.get(name, ())) & set(values) for name, values in lists.items())
        )
        page = await store.find("k", tags)
        assert (keys(page), page.total) == (expected, len(expected)), tags
        assert await store.find("k", tags, limit=2, offset=1) == Page(page.records[1:3], page.total)
    assert await store.find("k") == await store.find("k", None)


async def test_the_same_value_twice_is_one_tag(store: Store) -> None:
    await store.change(Put("k", "a", b"1", tags={"t": ["v", "v"]}))
    assert keys(await store.find("k", {"t": ["v", "v"]})) == ["a"]
    await store.change(Delete("k", "a"))
    assert (await store.find("k", {"t": "v"})).total == 0


async def test_as_many_tags_as_a_record_may_have(store: Store) -> None:
    tags = {f"n{number}": ["v"] for number in range(MOST_TAGS)}
    await store.change(Put("k", "a", b"1", tags=tags), Put("k", "b", b"1", tags={"many": list(tags)}))
    assert keys(await store.find("k", tags)) == ["a"]
    assert keys(await store.find("k", {"many": list(tags)})) == ["b"]


async def test_a_text_is_found_whatever_its_case(store: Store) -> None:
    await store.change(
        Put("k", "a", b"1", search="Terminal Bench", tags={"t": ["1"]}, order=2),
        Put("k", "b", b"1", search="terminal 100%", tags={"t": ["1", "2"]}, order=1),
        Put("k", "c", b"1", search="STRASSE Ünïcode [x]", tags={"t": ["2"]}),
        Put("k", "terminal", b'"terminal"', tags={"t": ["1"]}),
    )
    for text, expected in {
        "TERMINAL": ["a", "b"],
        "l b": ["a"],
        "0%": ["b"],
        "%": ["b"],
        "_": [],
        ".": [],
        "straße": ["c"],
        "ÜNÏ": ["c"],
        "[X]": ["c"],
        "terminal bench and more": [],
        "": ["a", "b", "c", "terminal"],
    }.items():
        page = await store.find("k", containing=text)
        assert (keys(page), page.total) == (expected, len(expected)), text
    assert keys(await store.find("k", {"t": "2"}, containing="terminal")) == ["b"]
    assert keys(await store.find("k", {"t": ["1", "2"]}, containing="E")) == ["a", "b", "c"]
    assert await store.find("k", containing="e", limit=1, offset=1) == Page([await store.get("k", "b")], 3)


async def test_pages_lead_to_the_end_and_beyond(store: Store) -> None:
    await fill(store, 1050)
    expected = [f"{number:04}" for number in reversed(range(1050))]
    for tags in (None, {"all": "yes"}, {"all": ["yes", "no"]}):
        found: list[str] = []
        while page := keys(await store.find("k", tags, limit=300, offset=len(found))):
            found += page
        assert found == expected
        assert (await store.find("k", tags, offset=1050)) == Page([], 1050)
        assert (await store.find("k", tags, offset=10**15)) == Page([], 1050)
        assert (await store.find("k", tags, limit=0)) == Page([], 1050)
        assert (await store.find("k", tags, limit=0, offset=7)) == Page([], 1050)
        assert len((await store.find("k", tags)).records) == PAGE
        assert len((await store.find("k", tags, limit=LARGEST_PAGE)).records) == LARGEST_PAGE
        last = await store.find("k", tags, limit=100, offset=1000)
        assert (keys(last), last.total) == (expected[1000:], 1050)


async def test_lists_follow_what_is_deleted(store: Store) -> None:
    await fill(store, 10)
    await store.change(*(Delete("k", f"{number:04}") for number in range(0, 10, 2)))
    expected = ["0009", "0007", "0005", "0003", "0001"]
    for page in (await store.find("k"), await store.find("k", {"all": "yes"})):
        assert (keys(page), page.total) == (expected, 5)


# Scans and kinds


async def test_a_scan_sees_every_record_by_key(store: Store) -> None:
    await fill(store, 250)
    await fill(store, 3, kind="other")
    found = [record async for record in store.scan("k")]
    assert [record.key for record in found] == [f"{number:04}" for number in range(250)]
    assert found[7] == await store.get("k", "0007")


async def test_a_scan_while_records_change(store: Store) -> None:
    await fill(store, 400)
    await store.change(Put("k", "zzzz", b"as it was"))
    seen = {}
    async for record in store.scan("k"):
        seen[record.key] = record.value
        if record.key.isdigit() and (number := int(record.key)) % 2 == 0:
            await store.change(
                Delete("k", f"{number + 1:04}"),
                Delete("k", f"{number:04}"),
                Put("k", f"{number:04}-new", b"new"),
                Put("k", "zzzz", b"changed"),
            )
    assert {f"{number:04}" for number in range(0, 400, 2)} <= set(seen)
    assert list(seen) == sorted(seen)
    assert seen["zzzz"] in (b"as it was", b"changed")


async def test_a_scan_may_be_left(store: Store) -> None:
    await fill(store, 10)
    async for record in store.scan("k"):
        assert record.key == "0000"
        break
    await store.change(Delete("k", "0001"))


async def test_what_was_changed_since_is_told_in_the_order_of_change(store: Store) -> None:
    await fill(store, 5)
    [first] = await store.change(Put("k", "0002", b"again"))
    await store.change(Put("other", "a", b"1"), Delete("k", "0004"), Put("k", "0000", b"again"))
    [last] = await store.change(Put("k", "new", b"1", expires_at=time.time() + 3600))
    found = await store.since("k", 0)
    assert [record.key for record in found] == ["0001", "0003", "0002", "0000", "new"]
    assert [record.revision for record in found] == sorted(record.revision for record in found)
    assert found[2] == await store.get("k", "0002")
    assert [record.key for record in await store.since("k", first)] == ["0000", "new"]
    assert [record.key for record in await store.since("k", 0, 2)] == ["0001", "0003"]
    assert await store.since("k", last) == await store.since("nothing", 0) == []


async def test_the_kinds_of_which_there_are_records(store: Store) -> None:
    assert await store.kinds() == []
    await store.change(Put("b", "x", b"1"), Put("a", "x", b"1"), Put("a", "y", b"1"), Put("é", "x", b"1"))
    assert await store.kinds() == ["a", "b", "é"]
    await store.change(Delete("a", "x"), Delete("b", "x"))
    assert await store.kinds() == ["a", "é"]
    await store.change(Put("gone", "x", b"1", expires_at=1.0))
    assert await store.kinds() == ["a", "é"]


# Expiry


async def test_what_has_expired_is_not_there(store: Store) -> None:
    await store.change(Put("k", "past", b"1", expires_at=time.time() - 1, search="text"), Put("k", "stays", b"1"))
    assert await store.get("k", "past") is None
    assert keys(await store.find("k")) == ["stays"]
    assert (await store.find("k", limit=1)).total == 1
    assert keys(await store.find("k", containing="text")) == []
    assert [record.key async for record in store.scan("k")] == ["stays"]
    with pytest.raises(Conflict, match="is not there"):
        await store.change(Put("k", "past", b"2", expect=1))
    assert await store.change(Delete("k", "past")) == [0]


async def test_what_has_expired_can_be_made_anew(store: Store) -> None:
    await store.change(Put("k", "a", b"1", expires_at=time.time() - 1))
    [revision] = await store.change(Put("k", "a", b"2", expect=0, tags={"t": ["v"]}))
    assert await store.get("k", "a") == Record("k", "a", b"2", revision, {"t": ["v"]})
    assert keys(await store.find("k", {"t": "v"})) == ["a"]


async def test_a_record_is_there_until_it_expires(store: Store) -> None:
    at = time.time() + 3600
    await store.change(Put("k", "later", b"1", expires_at=at))
    [revision] = await store.change(Put("k", "later", b"1", expires_at=at))
    record = Record("k", "later", b"1", revision, expires_at=at)
    assert await store.get("k", "later") == record
    assert (await store.find("k")).records == [record]
    await store.change(Put("k", "later", b"1", expires_at=time.time() + SOON))

    async def gone() -> None:
        while await store.get("k", "later") is not None:
            await asyncio.sleep(0.01)

    await asyncio.wait_for(gone(), 30)
    assert (await store.find("k")).total == 0
    assert await store.kinds() == []


async def test_a_record_that_is_renewed_does_not_expire(store: Store) -> None:
    await store.change(Put("k", "a", b"1", expires_at=time.time() + SOON))
    await store.change(Put("k", "a", b"2"))
    old = time.time() + SOON
    await until(lambda: time.time() > old, "the old time")
    await store.change(Put("k", "b", b"1"))
    record = await store.get("k", "a")
    assert record is not None
    assert (record.value, record.expires_at) == (b"2", None)
    assert keys(await store.find("k")) == ["a", "b"]


# What is refused

LONG = "x" * (LONGEST + 1)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        (Put("", "a", b""), Invalid, "a kind is empty"),
        (Put("k", "", b""), Invalid, "a key of 'k' is empty"),
        (Put(LONG, "a", b""), TooLarge, "a kind has 513 characters; 512 is the most"),
        (Put("k", LONG, b""), TooLarge, "a key of 'k' has 513 characters; 512 is the most"),
        (Delete("k", LONG), TooLarge, "a key of 'k' has 513 characters"),
        (Put("k\0", "a", b""), Invalid, r"a kind has a NUL character: 'k\\x00'"),
        (Put("k", "\0", b""), Invalid, r"a key of 'k' has a NUL character"),
        (Put("k", "\ud800", b""), Invalid, "a key of 'k' has half a character"),
        (Put("k", "a", b"x" * (LARGEST + 1)), TooLarge, "'k' 'a' has 1048577 bytes; 1048576 is the most"),
        (Put("k", "a", b"x" * LARGEST, search="é"), TooLarge, "'k' 'a' has 1048578 bytes"),
        (Put("k", "a", b"", search="a\0b"), Invalid, "'k' 'a': the text to search has a NUL character"),
        (Put("k", "a", b"", search="\udfff"), Invalid, "'k' 'a': the text to search has half a character"),
        (Put("k", "a", b"", tags={"": ["v"]}), Invalid, "'k' 'a': a tag's name is empty"),
        (Put("k", "a", b"", tags={LONG: ["v"]}), TooLarge, "'k' 'a': a tag's name has 513 characters"),
        (Put("k", "a", b"", tags={"t": [LONG]}), TooLarge, "'k' 'a': a value of tag 't' has 513 characters"),
        (Put("k", "a", b"", tags={"t\0": ["v"]}), Invalid, "'k' 'a': a tag's name has a NUL"),
        (Put("k", "a", b"", tags={"t": ["\0"]}), Invalid, "'k' 'a': a value of tag 't' has a NUL"),
        (Put("k", "a", b"", tags={"t": "text"}), Invalid, "'k' 'a': a tag has one text where its values belong"),
        (
            Put("k", "a", b"", tags={"t": [str(number) for number in range(MOST_TAGS)], "u": ["v"]}),
            TooLarge,
            "'k' 'a' has 257 tags; 256 is the most",
        ),
        (Put("k", "a", b"", order=float("nan")), Invalid, "'k' 'a': nan is no order"),
        (Put("k", "a", b"", order=float("inf")), Invalid, "'k' 'a': inf is no order"),
        (Put("k", "a", b"", expires_at=float("nan")), Invalid, "'k' 'a': nan is no time"),
        (Put("k", "a", b"", expires_at=1e12, tags={"t": ["v"]}), Invalid, "'k' 'a' has tags, so it cannot expire"),
        (Put("k", "a", b"", expect=-1), Invalid, "'k' 'a': -1 is no revision"),
    ],
    ids=lambda value: value.replace(" ", "-")[:40] if isinstance(value, str) else "",
)
async def test_what_is_no_record_is_refused(
    store: Store, change: Put | Delete, error: type[Invalid], message: str
) -> None:
    with pytest.raises(error, match=message) as caught:
        await store.change(Put("k", "other", b"1"), change)
    assert type(caught.value) is error
    assert len(caught.value.message) < 300
    assert await store.kinds() == []


async def test_the_longest_names_are_accepted(store: Store) -> None:
    for letter in ("x", "🎈"):
        longest = letter * LONGEST
        await store.change(Put(longest, longest, b"1", tags={longest: [longest]}, search=longest))
        assert keys(await store.find(longest, {longest: longest}, containing=longest)) == [longest]


async def test_a_record_may_occur_once_in_a_change(store: Store) -> None:
    with pytest.raises(Invalid, match="'k' 'a' occurs twice in one change"):
        await store.change(Put("k", "a", b"1"), Put("k", "b", b"1"), Delete("k", "a"))
    assert (await store.find("k")).total == 0


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"limit": -1}, Invalid, "a page of -1 records"),
        ({"limit": LARGEST_PAGE + 1}, Invalid, "a page of 1001 records; it may have from 0 to 1000"),
        ({"offset": -1}, Invalid, "there is no offset of -1"),
        ({"offset": 2**64}, Invalid, "there is no offset of"),
        ({"containing": "\0"}, Invalid, "the text has a NUL character"),
        ({"containing": LONG}, TooLarge, "the text has 513 characters"),
        ({"tags": {"t": "\0"}}, Invalid, "a value of tag 't' has a NUL character"),
        ({"tags": {"t": ["v", LONG]}}, TooLarge, "a value of tag 't' has 513 characters"),
        ({"tags": {"": "v"}}, Invalid, "a tag's name is empty"),
        ({"tags": {"t": [str(number) for number in range(257)]}}, TooLarge, "has 257 tags; 256 is the most"),
    ],
    ids=str,
)
async def test_what_is_no_search_is_refused(
    store: Store, arguments: dict[str, object], error: type[Invalid], message: str
) -> None:
    with pytest.raises(error, match=f"a search for 'k'.*{message}"):
        await store.find("k", **arguments)  # type: ignore[arg-type]


async def test_names_that_cannot_be_are_refused_when_read(store: Store) -> None:
    for kind, key in (("", "a"), ("k", ""), ("k\0", "a"), ("k", "a\0"), (LONG, "a"), ("k", LONG), ("\ud800", "a")):
        with pytest.raises(Invalid):
            await store.get(kind, key)
    for kind in ("", "k\0", LONG):
        with pytest.raises(Invalid):
            await store.find(kind)
        with pytest.raises(Invalid):
            _ = [record async for record in store.scan(kind)]


# Opening and closing


async def test_a_closed_store_says_so(url: str) -> None:
    store = await open_store(url)
    await store.change(Put("k", "a", b"1"))
    await store.close()
    await store.close()
    with pytest.raises(NetworkError, match="closed"):
        await store.get("k", "a")
    with pytest.raises(NetworkError, match="closed"):
        await store.change(Put("k", "a", b"2"))
    with pytest.raises(NetworkError, match="closed"):
        await store.find("k")
    async with await open_store(url) as again:
        assert await again.get("k", "a") is not None


@pytest.mark.parametrize(
    ("wrong", "hint"),
    [
        ("", "sqlite:PATH"),
        ("store.db", "sqlite:PATH"),
        ("sqlite:", "sqlite:PATH"),
        ("sqlite::memory:", "sqlite:PATH"),
        ("sqlite:a\0b", "sqlite:PATH"),
        ("sqlit:a.db", "did you mean 'sqlite'"),
        ("postgres://me:s3cret@host/db", "available: redis, rediss, sqlite"),
        ("redis:host", "redis://"),
        ("redis://", "redis://"),
        ("redis://:s3cret@", "redis://"),
        ("redis://me:s3cret@host:port/0", "redis://"),
        ("redis://me:s3/cret@host:1/0", "redis://"),
        ("redis://me:s3cret@host:99999/0", "redis://"),
        ("redis://me:s3cret@host:1/first", "redis://"),
        ("redis://me:s3cret@host:1/0?x=y", "redis://"),
        ("redis://me:s3cret@[host:1/0", "redis://"),
    ],
)
async def test_an_address_that_is_none(wrong: str, hint: str) -> None:
    with pytest.raises(Invalid) as caught:
        await open_store(wrong)
    assert caught.value.hint is not None
    assert hint in caught.value.hint
    assert "s3" not in f"{caught.value.message} {caught.value.hint}"
    assert caught.value.__cause__ is None
    assert caught.value.__suppress_context__ or caught.value.__context__ is None


async def test_without_the_redis_package_the_hint_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "aenv.store.redis", raising=False)
    for name in [name for name in sys.modules if name.partition(".")[0] == "redis"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "redis", None)
    with pytest.raises(Unsupported) as caught:
        await open_store("redis://127.0.0.1:1/0")
    assert caught.value.hint == "pip install 'aenvironment[redis]'"


async def test_a_store_loads_only_what_it_needs(tmp_path: Path) -> None:
    code = (
        "import asyncio, sys, aenv.store as s\n"
        "assert not {'sqlite3', 'redis'} & set(sys.modules)\n"
        "asyncio.run(s.open_store('sqlite:' + sys.argv[1]))\n"
        "assert 'redis' not in sys.modules\n"
    )
    process = await asyncio.create_subprocess_exec(sys.executable, "-c", code, str(tmp_path / "store.db"))
    assert await process.wait() == 0
