"""Numbers that are added to: together with records, up to a limit, once, and for good."""

from __future__ import annotations

import asyncio
import random
import signal
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

from aenv.errors import Conflict, Invalid, NetworkError, TooLarge
from aenv.store import Add, Delete, Full, Put, Store, open_store
from aenv.store.base import LONGEST, MOST_NUMBERS
from tests.store.servers import Server, redis_server

WRITER = """
import asyncio, os, sys
from aenv.store import Add, Put, open_store

async def main(path, turn):
    store = await open_store(f"sqlite:{path}")

    async def write(writer):
        for number in range(100_000):
            key = f"{turn}-{writer}-{number}"
            await store.change(Put("k", key, b"1"), Add("n", str(writer), {"made": 1, "sum": number}))
            os.write(1, b"%d\\n" % writer)

    await asyncio.gather(*(write(writer) for writer in range(4)))

asyncio.run(main(*sys.argv[1:]))
"""


def one(key: str = "a", amount: float = 1, **more: Mapping[str, float]) -> Add:
    return Add("n", key, {"i": amount}, **more)


async def test_what_was_added_is_counted_by_key_and_name(store: Store) -> None:
    assert await store.counts("n") == {}
    added = await store.change(Add("n", "a", {"i": 1, "m": 2.5}), Add("n", "b", {"i": -3}), Add("other", "a", {"i": 7}))
    assert added == [0, 0, 0]
    await store.change(Add("n", "a", {"i": 2, "x": 0.1}))
    assert await store.counts("n") == {"a": {"i": 3.0, "m": 2.5, "x": 0.1}, "b": {"i": -3.0}}
    assert await store.counts("other") == {"a": {"i": 7.0}}
    assert await store.counts("none") == {}


async def test_numbers_are_no_records(store: Store) -> None:
    await store.change(one(), Put("k", "a", b"1"), Add("k", "a", {"i": 1}))
    assert await store.kinds() == ["k"]
    assert await store.get("n", "a") is None
    assert (await store.find("n")).total == 0
    assert [record async for record in store.scan("n")] == []
    await store.change(Delete("k", "a"))
    assert await store.counts("k") == {"a": {"i": 1.0}}


async def test_what_comes_back_to_0_is_gone(store: Store) -> None:
    shuffled = random.Random(7)
    amounts = [shuffled.choice([1, 250, 2**31, 2**40 + 1]) for _ in range(50)]
    for amount in amounts:
        await store.change(one(amount=amount), one("b"))
    assert await store.counts("n") == {"a": {"i": float(sum(amounts))}, "b": {"i": 50.0}}
    shuffled.shuffle(amounts)
    for amount in amounts:
        await store.change(one(amount=-amount))
    assert await store.counts("n") == {"b": {"i": 50.0}}
    await store.change(Add("n", "b", {"i": -50, "j": 0}), Add("n", "c", {}), Add("n", "d", {"i": 0}))
    assert await store.counts("n") == {}


@pytest.mark.parametrize("number", [0.1, 1 / 3, 1e-300, 1e99, 2.0**53 - 1, 1731672000.123456, -5e-324, 3.5])
async def test_a_number_is_kept_to_the_last_bit(store: Store, number: float) -> None:
    await store.change(one(amount=number))
    assert await store.counts("n") == {"a": {"i": number}}
    await store.change(one(amount=-number))
    assert await store.counts("n") == {}


async def test_any_name_may_be_counted_under(store: Store) -> None:
    strange, longest = "Ünï:{c}ö∂é \n\"'%_* 🎈", "🎈" * LONGEST
    for name in (strange, longest, "1"):
        await store.change(Add(name, name, {name: 1.5, "1": 1, "2": 2}))
        expected = {name: 1.5, "1": 1.0, "2": 2.0} if name != "1" else {"1": 1.0, "2": 2.0}
        assert await store.counts(name) == {name: expected}


async def test_a_number_may_be_full(store: Store) -> None:
    for _ in range(3):
        await store.change(one(most={"i": 3}))
    with pytest.raises(Full, match="i of n a may not grow so far") as caught:
        await store.change(one(most={"i": 3}))
    assert (caught.value.kind, caught.value.key, caught.value.name) == ("n", "a", "i")
    assert isinstance(caught.value, Conflict)
    with pytest.raises(Full):
        await store.change(one("new", 0.5, most={"i": 0.25}))
    assert await store.counts("n") == {"a": {"i": 3.0}}
    await store.change(one("b", 2.5, most={"i": 2.5}))


async def test_a_limit_below_what_is_there_stops_what_grows_only(store: Store) -> None:
    await store.change(Add("n", "a", {"i": 10, "j": 10}))
    await store.change(Add("n", "a", {"i": -1, "j": 0, "k": 1}, most={"i": 3, "j": 3, "other": -1}))
    assert await store.counts("n") == {"a": {"i": 9.0, "j": 10.0, "k": 1.0}}
    with pytest.raises(Full) as caught:
        await store.change(Add("n", "a", {"i": -1, "j": 1}, most={"i": 3, "j": 3}))
    assert caught.value.name == "j"


async def test_what_is_full_changes_nothing_at_all(store: Store) -> None:
    [revision] = await store.change(Put("k", "kept", b"1", tags={"t": ["old"]}))
    await store.change(Add("n", "a", {"i": 1, "j": 1}), Add("n", "gone", {"i": 1}))
    counts, records = await store.counts("n"), [record async for record in store.scan("k")]
    with pytest.raises(Full) as caught:
        await store.change(
            Put("k", "kept", b"2", expect=revision, tags={"t": ["new"]}),
            Put("k", "new", b"2"),
            Add("n", "gone", {"i": -1}),
            Add("n", "a", {"i": 1, "j": 1}, most={"i": 2, "j": 1}),
            Add("n", "b", {"i": 1}),
        )
    assert (caught.value.key, caught.value.name) == ("a", "j")
    assert await store.counts("n") == counts
    assert [record async for record in store.scan("k")] == records
    assert (await store.find("k", {"t": "new"})).total == 0


async def test_a_conflict_adds_nothing(store: Store) -> None:
    await store.change(Put("k", "a", b"1"))
    with pytest.raises(Conflict, match="'k' 'a' is at revision"):
        await store.change(one(), Put("k", "a", b"2", expect=0), one("b"))
    assert await store.counts("n") == {}


async def test_several_for_one_key_are_added_in_order(store: Store) -> None:
    revisions = await store.change(one(amount=2), one(amount=-2), one(most={"i": 1}), one(amount=-1), one(amount=5))
    assert revisions == [0] * 5
    assert await store.counts("n") == {"a": {"i": 5.0}}
    with pytest.raises(Full):
        await store.change(one(amount=-5), one(amount=3), one(amount=3, most={"i": 5}))
    await store.change(one(amount=-5), one(amount=3), one(amount=2, most={"i": 5}))
    assert await store.counts("n") == {"a": {"i": 5.0}}


async def test_a_floor_raises_what_is_below_it(store: Store) -> None:
    await store.change(Add("n", "a", {"at": 2}, floors={"at": 100}))
    await store.change(Add("n", "a", {"at": 2}, floors={"at": 50, "other": 7, "low": -1}))
    assert await store.counts("n") == {"a": {"at": 104.0, "other": 7.0}}
    with pytest.raises(Full):
        await store.change(Add("n", "a", {"at": 2}, floors={"at": 110}, most={"at": 111}))
    assert await store.counts("n") == {"a": {"at": 104.0, "other": 7.0}}


async def test_a_rate_is_a_number_with_a_floor_and_a_limit(store: Store) -> None:
    rate, burst = 8.0, 5

    async def passes(now: float, count: int = 1) -> bool:
        most = {"at": now + (burst + count) / rate}
        try:
            await store.change(Add("n", "rate", {"at": count / rate}, floors={"at": now}, most=most))
        except Full:
            return False
        return True

    began = 1731672000.0
    assert [await passes(began) for _ in range(9)].count(True) == burst + 1
    assert await passes(began + 0.125)
    assert not await passes(began + 0.125)
    assert [await passes(began + 60) for _ in range(9)].count(True) == burst + 1
    assert not await passes(began + 60, 100)


# Many at once


async def test_one_that_is_full_does_not_harm_the_others_of_its_moment(store: Store) -> None:
    outcomes = await asyncio.gather(
        *(
            store.change(
                Put("k", f"{number}", b"1"), one("full" if number % 2 else "free", most={"i": 20 * (number % 2 == 0)})
            )
            for number in range(20)
        ),
        return_exceptions=True,
    )
    assert [isinstance(outcome, Full) for outcome in outcomes] == [bool(number % 2) for number in range(20)]
    assert await store.counts("n") == {"free": {"i": 10.0}}
    assert sorted([int(record.key) async for record in store.scan("k")]) == list(range(0, 20, 2))


async def test_no_more_than_the_limit_are_let_in_however_many_come(store: Store) -> None:
    most, seen = 7, 0.0

    async def visit(number: int) -> bool:
        nonlocal seen
        try:
            await store.change(Put("k", f"{number}", b"1", expect=0), one(most={"i": most}))
        except Full:
            return False
        seen = max(seen, (await store.counts("n"))["a"]["i"])
        await store.change(Delete("k", f"{number}"), one(amount=-1))
        return True

    done = await asyncio.gather(*(visit(number) for number in range(200)))
    assert any(done)
    assert 0 < seen <= most
    assert await store.counts("n") == {}
    assert (await store.find("k")).total == 0
    outcomes = await asyncio.gather(*(store.change(one(most={"i": most})) for _ in range(50)), return_exceptions=True)
    assert sum(isinstance(outcome, list) for outcome in outcomes) == most


async def test_two_connections_share_a_limit(redis: Server) -> None:
    redis.empty()
    async with await open_store(redis.url) as first, await open_store(redis.url) as second:

        async def enter(store: Store, number: int) -> bool:
            try:
                await store.change(Put("k", f"{number}", b"1", expect=0), one(most={"i": 30}), one("all"))
            except Full:
                return False
            return True

        entered = await asyncio.gather(*(enter((first, second)[number % 2], number) for number in range(200)))
        assert entered.count(True) == 30
        assert await first.counts("n") == await second.counts("n") == {"a": {"i": 30.0}, "all": {"i": 30.0}}
        assert (await second.find("k")).total == 30


# Ends of a process, and of a server


async def test_what_was_added_survives_a_kill_with_its_records(tmp_path: Path) -> None:
    path, acknowledged = tmp_path / "store.db", [0] * 4
    for turn, count in enumerate([1, 5, 50, 400]):
        command = [sys.executable, "-c", WRITER, str(path), str(turn)]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as writer:
            assert writer.stdout is not None
            try:
                lines = [writer.stdout.readline() for _ in range(count)]
            finally:
                writer.send_signal(signal.SIGKILL)
            lines += [line for line in writer.stdout if line.endswith("\n")]
        for line in lines:
            acknowledged[int(line)] += 1
        async with await open_store(f"sqlite:{path}") as store:
            counts = await store.counts("n")
            made: dict[str, list[int]] = {}
            async for record in store.scan("k"):
                _, who, number = record.key.split("-")
                made.setdefault(who, []).append(int(number))
        for number in range(4):
            assert counts.get(str(number), {}).get("made", 0) >= acknowledged[number]
        assert {who: found["made"] for who, found in counts.items()} == {who: len(made[who]) for who in made}
        assert {who: found.get("sum", 0) for who, found in counts.items()} == {who: sum(made[who]) for who in made}


async def test_a_server_that_is_killed_counts_once(tmp_path: Path) -> None:
    with redis_server(tmp_path, "--appendonly", "yes", "--appendfsync", "always") as server:
        async with await open_store(server.url) as store:
            added = 0
            stop = asyncio.Event()

            async def count(key: str) -> None:
                nonlocal added
                while not stop.is_set():
                    await store.change(one(key), one("all"))
                    added += 1

            counters = [asyncio.create_task(count(f"{number}")) for number in range(8)]
            for _ in range(3):
                seen = added
                while added < seen + 100:
                    assert not [counter for counter in counters if counter.done()], "a counter failed"
                    await asyncio.sleep(0.001)
                await asyncio.to_thread(server.kill)
                await asyncio.to_thread(server.start)
            stop.set()
            await asyncio.gather(*counters)
            counts = await store.counts("n")
    assert counts.pop("all") == {"i": float(added)}
    assert sum(numbers["i"] for numbers in counts.values()) == added


# What is refused


@pytest.mark.parametrize(
    ("add", "error", "message"),
    [
        (Add("", "a", {"i": 1}), Invalid, "a kind is empty"),
        (Add("n", "\0", {"i": 1}), Invalid, "a key of 'n' has a NUL character"),
        (Add("n", "a", {"": 1}), Invalid, "'n' 'a': a number's name is empty"),
        (Add("n", "a", {"x" * 513: 1}), TooLarge, "'n' 'a': a number's name has 513 characters"),
        (Add("n", "a", {"i": 1}, floors={"\0": 1}), Invalid, "a number's name has a NUL"),
        (Add("n", "a", {"i": 1}, most={"\ud800": 1}), Invalid, "a number's name has half a character"),
        (Add("n", "a", {"i": float("nan")}), Invalid, "'n' 'a': 'i' is given what is no number"),
        (Add("n", "a", {"i": float("-inf")}), Invalid, "'i' is given what is no number"),
        (Add("n", "a", {"i": 10**400}), Invalid, "'i' is given what is no number"),
        (Add("n", "a", {"i": 1}, floors={"i": float("inf")}), Invalid, "'i' is given what is no number"),
        (Add("n", "a", {"i": 1}, most={"i": float("nan")}), Invalid, "'i' is given what is no number"),
        (
            Add("n", "a", {f"i{number}": 1 for number in range(MOST_NUMBERS)}, most={"more": 1}),
            TooLarge,
            "'n' 'a' has 33 numbers; 32 is the most",
        ),
    ],
    ids=lambda value: value.replace(" ", "-")[:40] if isinstance(value, str) else "",
)
async def test_what_cannot_be_added_is_refused(store: Store, add: Add, error: type[Invalid], message: str) -> None:
    with pytest.raises(error, match=message):
        await store.change(Put("k", "other", b"1"), one(), add)
    assert await store.kinds() == []
    assert await store.counts("n") == {}


async def test_as_many_numbers_as_there_may_be(store: Store) -> None:
    amounts = {f"i{number}": number + 1.0 for number in range(MOST_NUMBERS)}
    await store.change(Add("n", "a", amounts))
    assert await store.counts("n") == {"a": amounts}


async def test_counts_of_what_is_no_kind_or_no_store(store: Store) -> None:
    for kind in ("", "k\0", "x" * 513):
        with pytest.raises(Invalid):
            await store.counts(kind)
    await store.close()
    with pytest.raises(NetworkError, match="closed"):
        await store.counts("n")
    with pytest.raises(NetworkError, match="closed"):
        await store.change(one())
