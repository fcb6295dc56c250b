"""Records in one SQLite file that one process owns.

Calls run on the event loop's thread: each takes some tens of microseconds, less than a way to a thread and back.
Changes of the same tick of the loop share one transaction, and each caller is answered after its commit.

What was acknowledged survives the end of the process, however it ends. A power cut or a crash of the system may take
the changes since the last checkpoint (about the last 4 MB written), never more, and never half of a change: that is
``synchronous=NORMAL`` with a write-ahead log.
"""

from __future__ import annotations

import asyncio
import fcntl
import os
import sqlite3
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import msgspec

from aenv.errors import AEnvError, Conflict, Invalid, NetworkError, StorageFull, Unsupported
from aenv.store import checks, queries
from aenv.store.base import PAGE, Add, Change, Delete, Page, Put, Record, Store
from aenv.store.queries import ALIVE, BACKWARDS, ORDER

_APPLICATION = int.from_bytes(b"aenv", "big")
"""Written into the file, so that no other program's database is taken for ours."""
_BUSY = 1.0
"""Seconds to wait for somebody who looks into the file with another program."""
_SWEEP = 60.0
"""Seconds between two removals of expired records."""
_SWEPT = 1000
"""Expired records removed at a time."""
_RESERVED = 1000
"""Revisions that are reserved at a time, so that not every commit writes down the last one."""
_COLUMNS = "records.kind, records.key, value, revision, tags, records.rank, search, expires_at"

_decode = msgspec.json.Decoder(dict[str, float]).decode

_CAUSES: dict[str, tuple[type[AEnvError], str, str]] = {
    "FULL": (StorageFull, "its disk is full", "make room there; what was acknowledged is kept"),
    "READONLY": (AEnvError, "it cannot be written", "make the file and its folder writable for this user"),
    "CANTOPEN": (AEnvError, "it cannot be opened", "its folder must be writable for this user"),
    "BUSY": (AEnvError, "another program writes to it", "end that program"),
    "NOTADB": (Invalid, "it is no SQLite database", "name another file"),
    "CORRUPT": (Invalid, "it is damaged", "put a copy in its place, or name another file"),
}
"""What SQLite's error codes mean to the reader."""


def _first(db: sqlite3.Connection) -> None:
    db.execute(f"PRAGMA application_id = {_APPLICATION}")
    # The value comes last: what is before it can be read without it.
    db.execute(
        "CREATE TABLE records (id INTEGER PRIMARY KEY, kind TEXT NOT NULL, key TEXT NOT NULL, rank REAL NOT NULL,"
        " revision INTEGER NOT NULL, expires_at REAL, tags BLOB NOT NULL, folded TEXT NOT NULL, search TEXT NOT NULL,"
        " value BLOB NOT NULL, UNIQUE (kind, key))"
    )
    db.execute("CREATE INDEX by_rank ON records (kind, rank DESC, key, expires_at)")
    db.execute("CREATE INDEX by_expiry ON records (expires_at) WHERE expires_at IS NOT NULL")
    db.execute(
        "CREATE TABLE tags (kind TEXT NOT NULL, name TEXT NOT NULL, value TEXT NOT NULL, rank REAL NOT NULL,"
        " key TEXT NOT NULL, record INTEGER NOT NULL, PRIMARY KEY (kind, name, value, rank DESC, key)) WITHOUT ROWID"
    )
    db.execute("CREATE TABLE counter (revision INTEGER NOT NULL)")
    db.execute("INSERT INTO counter VALUES (0)")


def _second(db: sqlite3.Connection) -> None:
    db.execute("CREATE TABLE numbers (kind TEXT, key TEXT, value BLOB, PRIMARY KEY (kind, key)) WITHOUT ROWID")


MIGRATIONS: list[Callable[[sqlite3.Connection], None]] = [_first, _second]
"""What leads from each version of the file to the next. ``PRAGMA user_version`` is how many were done."""


async def open(url: str) -> SqliteStore:
    """The store in the file of ``sqlite:PATH``, made when it is not there."""
    path = _path(url)
    lock = _own(path)
    try:
        db, revision = _connect(path)
    except BaseException:
        os.close(lock)
        raise
    return SqliteStore(path, db, revision, lock)


class SqliteStore(Store):
    """Records in a file."""

    def __init__(self, path: Path, db: sqlite3.Connection, revision: int, lock: int) -> None:
        self.path = path
        self._db = db
        self._lock = lock
        self._closed = False
        self._waiting: list[asyncio.Future[None]] = []
        """Callers whose changes are made but not committed."""
        self._revision = revision
        self._reserved = revision
        """Up to here, the file knows that revisions may have been given."""
        self._sweep_at = 0.0

    async def get(self, kind: str, key: str) -> Record | None:
        checks.name(kind, key)
        with self._reading() as db:
            query = f"SELECT {_COLUMNS} FROM records WHERE kind = ? AND key = ? AND {ALIVE}"  # noqa: S608
            row = db.execute(query, (kind, key, time.time())).fetchone()
        return None if row is None else _record(row)

    async def find(
        self,
        kind: str,
        tags: Mapping[str, str | Sequence[str]] | None = None,
        *,
        containing: str = "",
        limit: int = PAGE,
        offset: int = 0,
    ) -> Page:
        wanted = checks.query(kind, tags, containing, limit, offset)
        if not all(values for _, values in wanted):
            return Page([], 0)
        with self._reading() as db:
            if len(wanted) > 1:
                wanted = queries.rarest_first(db, kind, wanted)
            matching, given = queries.matching(kind, wanted, containing.casefold())
            total = queries.count(db, matching, given) if offset else None
            order, count, start = ORDER, limit, offset
            if total is not None and offset > total // 2:  # from the end it is not as far
                count = max(min(limit, total - offset), 0)
                order, start = BACKWARDS, max(total - offset, 0) - count
            query = (
                f"SELECT {_COLUMNS} FROM ({matching} {order} LIMIT ? OFFSET ?) AS page"  # noqa: S608
                " CROSS JOIN records ON records.id = page.record"
            )
            rows = db.execute(query, (*given, count, start)).fetchall()
            if total is None:
                total = len(rows) if len(rows) < limit else queries.count(db, matching, given)
        records = sorted(map(_record, rows), key=lambda record: (-record.order, record.key))
        return Page(records, total)

    async def change(self, *changes: Change) -> list[int]:
        checks.changes(changes)
        if not changes:
            return []
        self._begin()
        try:
            self._db.execute("SAVEPOINT change")
            revisions = self._apply(changes)
            self._db.execute("RELEASE change")
        except BaseException as exc:
            self._undo(exc)
            if isinstance(exc, sqlite3.Error):
                raise self._failure(exc) from exc
            raise
        answer: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append(answer)
        await answer
        return revisions

    async def scan(self, kind: str) -> AsyncIterator[Record]:
        checks.kind(kind)
        query = (
            f"SELECT {_COLUMNS} FROM records WHERE kind = ? AND key > ? AND {ALIVE}"  # noqa: S608
            f" ORDER BY key LIMIT {PAGE}"
        )
        after = ""
        while True:
            with self._reading() as db:
                rows = db.execute(query, (kind, after, time.time())).fetchall()
            for row in rows:
                yield _record(row)
            if len(rows) < PAGE:
                return
            after = rows[-1][1]
            await asyncio.sleep(0)  # a long scan keeps nobody waiting

    async def since(self, kind: str, revision: int, limit: int = PAGE) -> list[Record]:
        checks.kind(kind)
        query = (
            f"SELECT {_COLUMNS} FROM records WHERE kind = ? AND revision > ? AND {ALIVE}"  # noqa: S608
            " ORDER BY revision LIMIT ?"
        )
        with self._reading() as db:
            return [_record(row) for row in db.execute(query, (kind, revision, time.time(), limit))]

    async def counts(self, kind: str) -> dict[str, dict[str, float]]:
        checks.kind(kind)
        with self._reading() as db:
            rows = db.execute("SELECT key, value FROM numbers WHERE kind = ? ORDER BY key", (kind,)).fetchall()
        return {key: _decode(value) for key, value in rows}

    async def kinds(self) -> list[str]:
        query = f"SELECT kind FROM records WHERE kind > ? AND {ALIVE} ORDER BY kind LIMIT 1"  # noqa: S608
        found: list[str] = []
        now = time.time()
        with self._reading() as db:
            while row := db.execute(query, (found[-1] if found else "", now)).fetchone():
                found.append(row[0])
        return found

    async def close(self) -> None:
        if self._closed:
            return
        self._commit()
        self._closed = True
        try:
            self._db.close()
        finally:
            os.close(self._lock)

    def _begin(self) -> None:
        """Be in a transaction that this tick of the loop ends."""
        self._alive()
        if self._db.in_transaction:
            return
        try:
            self._db.execute("BEGIN IMMEDIATE")
            self._sweep()
        except sqlite3.Error as exc:
            self._abandon(exc)
            raise self._failure(exc) from exc
        asyncio.get_running_loop().call_soon(self._commit)

    def _sweep(self) -> None:
        """Remove what has expired, now and then."""
        if time.monotonic() < self._sweep_at:
            return
        query = "SELECT id FROM records WHERE expires_at <= ? LIMIT ?"
        removed = self._db.execute(
            f"DELETE FROM records WHERE id IN ({query})",  # noqa: S608
            (time.time(), _SWEPT),
        ).rowcount
        if removed < _SWEPT:
            self._sweep_at = time.monotonic() + _SWEEP

    def _commit(self) -> None:
        """End the transaction, if there is one, and answer those who wait for that."""
        if self._closed or not self._db.in_transaction:
            return
        reserved = self._reserved
        try:
            if self._revision > reserved:
                reserved = self._revision + _RESERVED
                self._db.execute("UPDATE counter SET revision = ?", (reserved,))
            self._db.execute("COMMIT")
        except sqlite3.Error as exc:
            self._abandon(exc)
            return
        self._reserved = reserved
        waiting, self._waiting = self._waiting, []
        for answer in waiting:
            if not answer.done():
                answer.set_result(None)

    def _undo(self, exc: BaseException) -> None:
        """Take one change back; the others of its tick stay."""
        try:
            self._db.execute("ROLLBACK TO change")
            self._db.execute("RELEASE change")
        except sqlite3.Error:  # SQLite has given up the whole transaction, as it does when a disk is full
            self._abandon(exc)

    def _abandon(self, exc: BaseException) -> None:
        """Take back everything that is not committed, and tell those who wait for it."""
        with suppress(sqlite3.Error):
            if self._db.in_transaction:
                self._db.execute("ROLLBACK")
        waiting, self._waiting = self._waiting, []
        for answer in waiting:
            if not answer.done():
                answer.set_exception(self._failure(exc))

    def _apply(self, changes: Sequence[Change]) -> list[int]:
        """Make these changes; ``Conflict`` before the first when one of them may not be made."""
        now = time.time()
        rows: list[tuple[Any, ...] | None] = []
        numbers: dict[tuple[str, str], dict[str, float]] = {}
        for change in changes:
            place = (change.kind, change.key)
            if isinstance(change, Add):
                numbers[place] = checks.added(change, numbers[place] if place in numbers else self._numbers(*place))
                rows.append(None)
                continue
            query = "SELECT id, revision, rank, tags, expires_at FROM records WHERE kind = ? AND key = ?"
            row = self._db.execute(query, place).fetchone()
            revision = 0 if row is None or (row[4] is not None and row[4] <= now) else row[1]
            checks.expected(change, revision)
            rows.append(row)
        for place, left in numbers.items():
            if left:
                self._db.execute("INSERT OR REPLACE INTO numbers VALUES (?, ?, ?)", (*place, msgspec.json.encode(left)))
            else:
                self._db.execute("DELETE FROM numbers WHERE kind = ? AND key = ?", place)
        return [self._make(change, row) for change, row in zip(changes, rows, strict=True)]

    def _make(self, change: Change, row: tuple[Any, ...] | None) -> int:
        if isinstance(change, Put):
            return self._put(change, row)
        return self._delete(change, row) if isinstance(change, Delete) else 0

    def _numbers(self, kind: str, key: str) -> dict[str, float]:
        row = self._db.execute("SELECT value FROM numbers WHERE kind = ? AND key = ?", (kind, key)).fetchone()
        return {} if row is None else _decode(row[0])

    def _put(self, put: Put, row: tuple[Any, ...] | None) -> int:
        self._revision += 1
        rank = float(put.order)
        tags = msgspec.json.encode({name: list(values) for name, values in put.tags.items()})
        values = (rank, self._revision, put.expires_at, tags, put.search.casefold(), put.search, put.value)
        old = set()
        if row is None:
            number = self._db.execute(
                "INSERT INTO records (kind, key, rank, revision, expires_at, tags, folded, search, value)"
                " VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)",
                (put.kind, put.key, *values),
            ).lastrowid
        else:
            number = row[0]
            self._db.execute(
                "UPDATE records SET rank = ?, revision = ?, expires_at = ?, tags = ?, folded = ?, search = ?, value = ?"
                " WHERE id = ?",
                (*values, number),
            )
            if row[2] == rank and row[3] == tags:
                return self._revision
            old = _entries(put, row[2], msgspec.json.decode(row[3]))
        new = _entries(put, rank, put.tags)
        self._untag(old - new)
        if added := [(*entry, number) for entry in new - old]:
            insert = "INSERT INTO tags (kind, name, value, rank, key, record) VALUES (?, ?, ?, ?, ?, ?)"
            self._db.executemany(insert, added)
        return self._revision

    def _delete(self, delete: Delete, row: tuple[Any, ...] | None) -> int:
        if row is not None:
            self._db.execute("DELETE FROM records WHERE id = ?", (row[0],))
            self._untag(_entries(delete, row[2], msgspec.json.decode(row[3])))
        return 0

    def _untag(self, entries: set[tuple[str, str, str, float, str]]) -> None:
        if entries:
            remove = "DELETE FROM tags WHERE kind = ? AND name = ? AND value = ? AND rank = ? AND key = ?"
            self._db.executemany(remove, entries)

    @contextmanager
    def _reading(self) -> Iterator[sqlite3.Connection]:
        """The file without anything that could still be taken back."""
        self._alive()
        self._commit()
        try:
            yield self._db
        except sqlite3.Error as exc:
            raise self._failure(exc) from exc

    def _alive(self) -> None:
        if self._closed:
            raise NetworkError(f"the store in {self.path} is closed")

    def _failure(self, exc: BaseException) -> AEnvError:
        return _failure(self.path, exc)


def _path(url: str) -> Path:
    name = url.removeprefix("sqlite:")
    if not name or name == ":memory:" or "\0" in name:
        raise Invalid(f"{url!r} names no file", hint="use sqlite:PATH")
    return Path(os.path.realpath(os.path.expanduser(name)))  # the lock lies beside the file itself


def _own(path: Path) -> int:
    """Lock the file for this process, and make it if it is not there."""
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        lock = os.open(f"{path}.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as exc:
        raise _unusable(path, exc) from exc
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.ftruncate(lock, os.pwrite(lock, b"%d\n" % os.getpid(), 0))
        os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600))
    except BlockingIOError:
        owner = os.pread(lock, 32, 0).decode(errors="replace").strip()
        os.close(lock)
        hint = "stop it, or name another file; a Redis store may have several owners"
        raise Conflict(f"{path} belongs to process {owner or '(just starting)'}", hint=hint) from None
    except OSError as exc:
        os.close(lock)
        raise _unusable(path, exc) from exc
    return lock


def _connect(path: Path) -> tuple[sqlite3.Connection, int]:
    """The file, brought to the newest version, and the last revision that may have been given there."""
    db = None
    try:
        db = sqlite3.connect(path, timeout=_BUSY, isolation_level=None)
        _migrate(path, db)
        db.execute("PRAGMA journal_mode = WAL")
        db.execute("PRAGMA synchronous = NORMAL")
        [revision] = db.execute("SELECT revision FROM counter").fetchone()
    except BaseException as exc:
        if db is not None:
            db.close()
        if isinstance(exc, sqlite3.Error):
            raise _failure(path, exc) from exc
        raise
    return db, revision


def _migrate(path: Path, db: sqlite3.Connection) -> None:
    version = db.execute("PRAGMA user_version").fetchone()[0]
    application = db.execute("PRAGMA application_id").fetchone()[0]
    tables = db.execute("SELECT count(*) FROM sqlite_master").fetchone()[0]
    if application != _APPLICATION and (version or tables):
        raise Invalid(f"{path} is another program's database", hint="name another file")
    if version > len(MIGRATIONS):
        message = f"{path} has version {version} of the store's schema; this package knows {len(MIGRATIONS)}"
        raise Unsupported(message, hint="upgrade aenvironment, or name another file")
    if version == len(MIGRATIONS):
        return
    with db:  # all of it or nothing
        db.execute("BEGIN IMMEDIATE")
        for migrate in MIGRATIONS[version:]:
            migrate(db)
        db.execute(f"PRAGMA user_version = {len(MIGRATIONS)}")


def _entries(change: Change, rank: float, tags: Mapping[str, Sequence[str]]) -> set[tuple[str, str, str, float, str]]:
    """What the table of tags holds of a record."""
    return {(change.kind, name, value, rank, change.key) for name, values in tags.items() for value in values}


def _record(row: tuple[Any, ...]) -> Record:
    kind, key, value, revision, tags, rank, search, expires_at = row
    return Record(kind, key, value, revision, msgspec.json.decode(tags), rank, search, expires_at)


def _failure(path: Path, exc: BaseException) -> AEnvError:
    code = getattr(exc, "sqlite_errorname", "").removeprefix("SQLITE_").split("_")[0]
    cls, why, hint = _CAUSES.get(code, (AEnvError, str(exc), "look at the disk that it is on"))
    return cls(f"{path} cannot be used as a store: {why}", hint=hint)


def _unusable(path: Path, exc: OSError) -> AEnvError:
    hint = "make room there, make it writable for this user, or name another file"
    return AEnvError(f"{path} cannot be used as a store: {exc.strerror or exc}", hint=hint)
