"""What records cost in SQLite, beside the same rows written by ``sqlite3`` alone, and how far back a page may lie."""

from __future__ import annotations

import asyncio
import sqlite3
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path

from aenv.store import Add, Put, open_store
from aenv.store.base import Store
from benchmarks.measure import Effort, Line, interleave, line

RECORDS = 10_000
PAGE = 100
WRITES = 200
"""Writes of each round, one after the other, each durable before the next."""
MOST_WRITE, MOST_PAGE, MOST_ADD = 3.0, 5.0, 1.5
_VALUE = b'{"status": "Running", "env": "word-game@1.0.0", "labels": {"experiment": "first"}, "filler": "%b"}' % (
    b"x" * 400
)


def stores(effort: Effort) -> list[Line]:
    """A durable write against the bare one; the last page of 10,000 records against the first of 100."""
    with tempfile.TemporaryDirectory(prefix="aenv-stores-") as folder, asyncio.Runner() as runner:
        with _opened(runner, Path(folder, "ours.db")) as store, closing(_bare(Path(folder, "bare.db"))) as bare:
            runner.run(_filled(store, "few", PAGE))
            runner.run(_filled(store, "many", RECORDS))
            changed, bare_changed = interleave(
                effort.rounds(11), lambda: runner.run(_changes(store)), _timed(lambda: _bare_changes(bare))
            )
            added, put = interleave(
                effort.rounds(11), lambda: runner.run(_adds(store)), lambda: runner.run(_changes(store))
            )
            last, first = interleave(
                effort.rounds(11),
                lambda: runner.run(_page(store, "many", RECORDS - PAGE)),
                lambda: runner.run(_page(store, "few", 0)),
            )
    return [
        line("record changed in SQLite", "µs", changed, "sqlite3", bare_changed, limit=MOST_WRITE, scale=1e6 / WRITES),
        line("number added in SQLite", "µs", added, "record changed", put, limit=MOST_ADD, scale=1e6 / WRITES),
        line("last page of 10,000 records", "ms", last, "first of 100", first, limit=MOST_PAGE, scale=1e3),
    ]


@contextmanager
def _opened(runner: asyncio.Runner, path: Path) -> Iterator[Store]:
    store = runner.run(open_store(f"sqlite:{path}"))
    try:
        yield store
    finally:
        runner.run(store.close())


def _bare(path: Path) -> sqlite3.Connection:
    """A table with nothing but what a write needs, as durable as ours."""
    db = sqlite3.connect(path, isolation_level=None)
    db.execute("PRAGMA journal_mode = WAL")
    db.execute("PRAGMA synchronous = NORMAL")
    db.execute("CREATE TABLE record (kind TEXT, key TEXT, value BLOB, revision INTEGER, PRIMARY KEY (kind, key))")
    return db


def _bare_changes(db: sqlite3.Connection) -> None:
    for number in range(WRITES):
        db.execute("BEGIN IMMEDIATE")
        db.execute("INSERT OR REPLACE INTO record VALUES (?, ?, ?, ?)", ("changed", f"key-{number}", _VALUE, number))
        db.execute("COMMIT")


def _timed(work: Callable[[], None]) -> Callable[[], float]:
    def run() -> float:
        begin = time.perf_counter()
        work()
        return time.perf_counter() - begin

    return run


async def _changes(store: Store) -> float:
    begin = time.perf_counter()
    for number in range(WRITES):
        await store.change(Put("changed", f"key-{number}", _VALUE))
    return time.perf_counter() - begin


async def _adds(store: Store) -> float:
    begin = time.perf_counter()
    for number in range(WRITES):
        await store.change(Add("added", f"key-{number}", {"instances": 1, "cpu": 500, "memory": 2**30}))
    return time.perf_counter() - begin


async def _filled(store: Store, kind: str, count: int) -> None:
    for start in range(0, count, 500):
        await store.change(
            *(
                Put(kind, f"key-{number:06}", _VALUE, tags={"owner": ["somebody"]}, order=float(number))
                for number in range(start, min(start + 500, count))
            )
        )


async def _page(store: Store, kind: str, offset: int) -> float:
    begin = time.perf_counter()
    page = await store.find(kind, {"owner": "somebody"}, limit=PAGE, offset=offset)
    seconds = time.perf_counter() - begin
    assert len(page.records) == PAGE
    return seconds
