"""The store in a file: what it survives, and what it says of a file that it cannot use."""

from __future__ import annotations

import asyncio
import os
import signal
import sqlite3
import stat
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from aenv.errors import AEnvError, Conflict, Invalid, Unsupported
from aenv.store import Delete, Put, Store, open_store
from aenv.store import sqlite as module
from aenv.store.sqlite import SqliteStore

WRITER = """
import asyncio, os, sys
from aenv.store import Delete, Put, open_store

async def main(path, first):
    store = await open_store(f"sqlite:{path}")

    async def write(writer):
        for number in range(first, first + 100_000):
            key = f"{writer}-{number}"
            tags = {"writer": [str(writer)]}
            [revision, _] = await store.change(Put("k", key, b"%d" % number, tags=tags), Delete("k", f"{writer}-gone"))
            os.write(1, f"{key} {revision}\\n".encode())

    await asyncio.gather(*(write(writer) for writer in range(4)))

asyncio.run(main(sys.argv[1], int(sys.argv[2])))
"""


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "store.db"


@pytest.fixture
def small(tmp_path: Path) -> Iterator[Path]:
    """A file system of four megabytes."""
    folder = tmp_path / "small"
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", str(folder)]
    if os.geteuid() != 0 or subprocess.run(command, capture_output=True, check=False).returncode:
        pytest.skip("a file system can be mounted by root only")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


@asynccontextmanager
async def opened(path: Path) -> AsyncIterator[SqliteStore]:
    async with await open_store(f"sqlite:{path}") as store:
        assert isinstance(store, SqliteStore)
        yield store


def looked_up(path: Path, query: str) -> list[tuple[object, ...]]:
    """What another program sees in the file."""
    db = sqlite3.connect(path)
    try:
        return db.execute(query).fetchall()
    finally:
        db.close()


async def revisions(store: Store) -> dict[str, int]:
    return {record.key: record.revision async for record in store.scan("k")}


# Ends of a process


async def test_what_was_acknowledged_survives_a_kill(path: Path) -> None:
    acknowledged: dict[str, int] = {}
    for turn, count in enumerate([1, 2, 3, 4, 5, 7, 11, 50, 133, 400]):
        command = [sys.executable, "-c", WRITER, str(path), str(turn * 100_000)]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as writer:
            assert writer.stdout is not None
            try:
                lines = [writer.stdout.readline() for _ in range(count)]
            finally:
                writer.send_signal(signal.SIGKILL)
            lines += [line for line in writer.stdout if line.endswith("\n")]  # acknowledged before the end
        acknowledged |= {key: int(revision) for key, revision in map(str.split, lines)}
        async with opened(path) as store:
            kept = await revisions(store)
            assert acknowledged.items() <= kept.items()
            assert len(set(kept.values())) == len(kept)
            total = sum([(await store.find("k", {"writer": str(number)})).total for number in range(4)])
            assert total == len(kept)


async def test_another_owner_is_refused_and_told_who_it_is(path: Path) -> None:
    command = [sys.executable, "-c", WRITER, str(path), "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as owner:
        assert owner.stdout is not None
        try:
            owner.stdout.readline()
            with pytest.raises(Conflict, match=f"store.db belongs to process {owner.pid}$") as caught:
                await open_store(f"sqlite:{path}")
            assert caught.value.hint
        finally:
            owner.kill()
    async with opened(path) as store:
        link = path.with_name("link.db")
        link.symlink_to(path)
        for other in (path, link):
            with pytest.raises(Conflict, match=f"store.db belongs to process {os.getpid()}$"):
                await open_store(f"sqlite:{other}")
        assert await store.kinds() == ["k"]


async def test_a_store_that_is_closed_answers_who_waits(path: Path) -> None:
    async with opened(path) as store:
        waiting = asyncio.gather(*(store.change(Put("k", f"{number}", b"1")) for number in range(3)))
        await asyncio.gather(store.change(Put("k", "last", b"1")), store.close())
        await waiting
    async with opened(path) as store:
        assert sorted(await revisions(store)) == ["0", "1", "2", "last"]


# Transactions


async def test_changes_of_one_tick_share_a_commit(path: Path) -> None:
    async with opened(path) as store:
        statements: list[str] = []
        store._db.set_trace_callback(statements.append)
        await asyncio.gather(*(store.change(Put("k", f"{number}", b"1")) for number in range(50)))
        assert statements.count("COMMIT") == 1
        assert (await store.find("k")).total == 50


async def test_nobody_is_answered_before_the_commit(path: Path) -> None:
    async with opened(path) as store:

        async def change(number: int) -> int:
            await store.change(Put("k", f"{number}", b"1"))
            return len(looked_up(path, f"SELECT * FROM records WHERE key = '{number}'"))

        assert await asyncio.gather(*(change(number) for number in range(20))) == [1] * 20


async def test_what_is_read_is_committed(path: Path) -> None:
    async with opened(path) as store:

        async def read() -> None:
            record = await store.get("k", "a")
            assert record is not None
            assert looked_up(path, "SELECT revision FROM records") == [(record.revision,)]

        await asyncio.gather(store.change(Put("k", "a", b"1")), read(), store.change(Put("k", "b", b"1")))
        assert (await store.find("k")).total == 2


async def test_what_a_cancelled_caller_asked_for_is_made_whole(path: Path) -> None:
    async with opened(path) as store:
        cancelled = asyncio.create_task(store.change(Put("k", "a", b"1"), Put("k", "b", b"1")))
        other = asyncio.create_task(store.change(Put("k", "c", b"1")))
        asyncio.get_running_loop().call_soon(cancelled.cancel)  # after both have begun, before the commit
        await other
        with pytest.raises(asyncio.CancelledError):
            await cancelled
        assert sorted(await revisions(store)) == ["a", "b", "c"]


async def test_a_change_that_sqlite_refuses_does_not_harm_the_others(path: Path) -> None:
    async with opened(path) as store:
        bad = Put("k", "bad", object())  # type: ignore[arg-type]
        good = [store.change(Put("k", f"{number}", b"1", tags={"t": ["v"]})) for number in range(4)]
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(module.checks, "changes", lambda changes: None)
            outcomes = await asyncio.gather(
                *good[:2], store.change(Put("k", "with", b"1"), bad), *good[2:], return_exceptions=True
            )
        assert isinstance(outcomes.pop(2), AEnvError)
        assert all(isinstance(outcome, list) for outcome in outcomes)
        assert list(await revisions(store)) == ["0", "1", "2", "3"]


async def test_expired_records_are_removed(path: Path) -> None:
    async with opened(path) as store:
        await store.change(*(Put("k", f"{number}", b"1", expires_at=time.time() - 1) for number in range(1500)))
        await store.change(Put("k", "later", b"1", expires_at=time.time() + 3600))
    async with opened(path) as store:
        for _ in range(2):
            await store.change(Put("k", "stays", b"1"))
    assert looked_up(path, "SELECT key FROM records ORDER BY key") == [("later",), ("stays",)]


@pytest.mark.parametrize("containing", ["", "x"])
@pytest.mark.parametrize(
    "tags", [None, {"t": "1"}, {"t": ["1", "2", "3"]}, {"t": "1", "u": ["1", "2"]}, {"t": ["1", "2"], "u": ["1", "2"]}]
)
async def test_a_page_is_read_in_order_from_an_index(
    path: Path, tags: dict[str, str | list[str]] | None, containing: str
) -> None:
    async with opened(path) as store:
        for number in range(20):
            await store.change(Put("k", f"{number}", b"1", tags={"t": ["1", "2"], "u": ["1"]}, search="x"))
        statements: list[str] = []
        store._db.set_trace_callback(statements.append)
        assert (await store.find("k", tags, containing=containing, limit=2, offset=3)).total == 20
        store._db.set_trace_callback(None)
        page, total = statements[-2:]
        for statement in (page, total):
            plan = [row[3] for row in store._db.execute(f"EXPLAIN QUERY PLAN {statement}")]
            assert not [step for step in plan if "TEMP B-TREE" in step], plan
            scanned = [
                step for step in plan if step.startswith("SCAN") and "page" not in step and "subquery" not in step
            ]
            assert not scanned, plan


# Files that are new, old, or none of ours


async def test_a_new_file_is_for_its_owner_only(tmp_path: Path) -> None:
    path = tmp_path / "new" / "store.db"
    before = os.umask(0)
    try:
        async with opened(path) as store:
            await store.change(Put("k", "a", b"1"))
            modes = {file.name: stat.S_IMODE(file.stat().st_mode) for file in path.parent.iterdir()}
    finally:
        os.umask(before)
    assert set(modes) == {"store.db", "store.db-wal", "store.db-shm", "store.db.lock"}
    assert set(modes.values()) == {0o600}
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700


def add_colour(db: sqlite3.Connection) -> None:
    db.execute("ALTER TABLE records ADD COLUMN colour TEXT NOT NULL DEFAULT 'red'")


def fail(db: sqlite3.Connection) -> None:
    db.execute("CREATE TABLE halfway (x)")
    db.execute("SELECT * FROM missing")


async def test_an_older_file_is_brought_up_to_date(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with opened(path) as store:
        await store.change(Put("k", "a", b"1", tags={"t": ["v"]}))
    monkeypatch.setattr(module, "MIGRATIONS", [*module.MIGRATIONS, add_colour, lambda db: None])
    for _ in range(2):
        async with opened(path) as store:
            assert (await store.find("k", {"t": "v"})).total == 1
            await store.change(Put("k", "b", b"1"))
    assert looked_up(path, "PRAGMA user_version") == [(len(module.MIGRATIONS),)]
    assert looked_up(path, "SELECT colour FROM records") == [("red",), ("red",)]


async def test_a_step_that_fails_leaves_the_file_as_it_was(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with opened(path) as store:
        await store.change(Put("k", "a", b"1"))
    with monkeypatch.context() as patch:
        patch.setattr(module, "MIGRATIONS", [*module.MIGRATIONS, add_colour, fail])
        with pytest.raises(AEnvError, match="no such table: missing"):
            await open_store(f"sqlite:{path}")
    async with opened(path) as store:
        assert list(await revisions(store)) == ["a"]
    assert looked_up(path, "SELECT name FROM sqlite_master WHERE name = 'halfway'") == []


async def test_a_newer_file_is_refused_with_both_numbers(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MIGRATIONS", [*module.MIGRATIONS, add_colour])
    async with opened(path) as store:
        await store.change(Put("k", "a", b"1"))
    monkeypatch.undo()
    content = path.read_bytes()
    known = len(module.MIGRATIONS)
    message = f"has version {known + 1} of the store's schema; this package knows {known}"
    with pytest.raises(Unsupported, match=message) as caught:
        await open_store(f"sqlite:{path}")
    assert caught.value.hint
    assert path.read_bytes() == content


def no_database(path: Path) -> None:
    path.write_bytes(b"this is a letter to my aunt\n" * 1000)


def another_database(path: Path) -> None:
    with sqlite3.connect(path) as db:
        db.execute("CREATE TABLE photographs (x)")
    db.close()


def another_version(path: Path) -> None:
    with sqlite3.connect(path) as db:
        db.execute("PRAGMA user_version = 1")
    db.close()


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (no_database, "it is no SQLite database"),
        (another_database, "is another program's database"),
        (another_version, "is another program's database"),
    ],
)
async def test_a_file_that_is_not_ours_is_left_alone(path: Path, make: Callable[[Path], None], message: str) -> None:
    make(path)
    content = path.read_bytes()
    for _ in range(2):  # the lock of the first try is free again
        with pytest.raises(Invalid, match=message) as caught:
            await open_store(f"sqlite:{path}")
        assert caught.value.hint
    assert path.read_bytes() == content


async def test_a_damaged_file_is_told(path: Path) -> None:
    async with opened(path) as store:
        await store.change(Put("k", "a", b"1"))
    content = path.read_bytes()
    path.write_bytes(content[:4096] + b"\xff" * (len(content) - 4096))
    with pytest.raises(Invalid, match="it is damaged") as caught:
        await open_store(f"sqlite:{path}")
    assert caught.value.hint
    path.write_bytes(content)
    async with opened(path) as store:
        assert list(await revisions(store)) == ["a"]


async def test_a_place_where_there_can_be_no_file(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for place in (tmp_path, tmp_path / "file" / "store.db", Path("/proc/store.db")):
        with pytest.raises(AEnvError, match="cannot be used as a store") as caught:
            await open_store(f"sqlite:{place}")
        assert caught.value.hint


async def test_an_empty_file_becomes_a_store(path: Path) -> None:
    path.touch()
    async with opened(path) as store:
        await store.change(Put("k", "a", b"1"))


# Disks that fail


async def test_a_read_only_file_system(small: Path) -> None:
    async with opened(small / "store.db") as store:
        await store.change(Put("k", "a", b"1"))
    subprocess.run(["mount", "-o", "remount,ro", str(small)], check=True)
    with pytest.raises(AEnvError, match="Read-only file system") as caught:
        await open_store(f"sqlite:{small / 'store.db'}")
    assert caught.value.hint
    subprocess.run(["mount", "-o", "remount,rw", str(small)], check=True)
    async with opened(small / "store.db") as store:
        assert list(await revisions(store)) == ["a"]


async def test_a_file_that_becomes_read_only(path: Path) -> None:
    async with opened(path) as store:
        await store.change(Put("k", "a", b"1"))
        store._db.execute("PRAGMA query_only = 1")
        with pytest.raises(AEnvError, match="it cannot be written") as caught:
            await store.change(Put("k", "a", b"2"))
        assert caught.value.hint
        record = await store.get("k", "a")
        assert record is not None
        assert record.value == b"1"
        store._db.execute("PRAGMA query_only = 0")
        await store.change(Put("k", "a", b"3", expect=record.revision))


async def test_a_full_disk_loses_nothing_that_was_acknowledged(small: Path) -> None:
    path = small / "store.db"
    acknowledged: dict[str, int] = {}
    failures: list[BaseException] = []

    async def write(store: Store, key: str) -> None:
        try:
            [revision] = await store.change(Put("k", key, b"x" * 20_000, tags={"t": ["v"]}))
            acknowledged[key] = revision
        except AEnvError as exc:
            failures.append(exc)

    async with opened(path) as store:
        await store.change(Put("k", "first", b"1"))
        with (small / "filler").open("wb") as filler:
            filler.write(b"x" * 2_000_000)
        number = 0
        while len(failures) < 10:
            await asyncio.gather(*(write(store, f"{number}-{sub}") for sub in range(5)))
            number += 1
            assert number < 1000
        assert acknowledged
        assert {str(failure) for failure in failures} == {f"{path} cannot be used as a store: its disk is full"}
        assert all(isinstance(failure, AEnvError) and failure.hint for failure in failures)
        kept = await revisions(store)
        assert acknowledged.items() <= kept.items()
        (small / "filler").unlink()
        await write(store, "room again")
        await store.change(Delete("k", "first"))
    assert "room again" in acknowledged
    async with opened(path) as store:
        kept = await revisions(store)
        assert acknowledged.items() <= kept.items()
        assert (await store.find("k", {"t": "v"})).total == len(kept)
