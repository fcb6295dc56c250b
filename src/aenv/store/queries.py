"""How a page is asked of SQLite: from an index and in order, the rarest tag first."""

from __future__ import annotations

import sqlite3
import time
from collections.abc import Sequence
from typing import Any

from aenv.store import checks

ORDER = "ORDER BY rank DESC, key"
BACKWARDS = "ORDER BY rank, key DESC"
ALIVE = "(expires_at IS NULL OR expires_at > ?)"
_SAMPLES = (100, 10_000)
"""Records that are counted to tell which of several tags is the rarest; the second when the first does not tell."""


def matching(kind: str, wanted: checks.Wanted, containing: str) -> tuple[str, list[Any]]:
    """A query for the rank, key and number of what is wanted, which an index can answer in order, and its arguments.

    The first tag's part of the index is gone through; the other tags are looked up for each record there.
    """
    if not wanted:
        query = f"SELECT rank, key, id AS record FROM records INDEXED BY by_rank WHERE kind = ? AND {ALIVE}"  # noqa: S608
        given: list[Any] = [kind, time.time()]
        if containing:
            query += " AND instr(folded, ?) > 0"
            given.append(containing)
        return query, given
    (name, values), *others = wanted
    query, given = "SELECT t.rank AS rank, t.key AS key, t.record AS record FROM tags AS t", []
    if containing:
        query += " CROSS JOIN records AS r ON r.id = t.record AND instr(r.folded, ?) > 0"
        given.append(containing)
    query += " WHERE t.kind = ? AND t.name = ? AND t.value = ?"
    for _, among in others:
        query += (
            " AND EXISTS (SELECT 1 FROM tags AS o WHERE o.kind = ? AND o.name = ?"  # noqa: S608
            f" AND o.value IN ({', '.join('?' * len(among))}) AND o.rank = t.rank AND o.key = t.key)"
        )
    asked = [argument for other, among in others for argument in (kind, other, *among)]
    given = [argument for value in values for argument in (*given, kind, name, value, *asked)]
    return " UNION ".join([query] * len(values)), given


def count(db: sqlite3.Connection, matching: str, given: Sequence[Any]) -> int:
    if "UNION" in matching:
        matching += f" {ORDER}"  # in order, they are merged as they are read
    found: int = db.execute(f"SELECT count(*) FROM ({matching})", given).fetchone()[0]  # noqa: S608
    return found


def rarest_first(db: sqlite3.Connection, kind: str, wanted: checks.Wanted) -> checks.Wanted:
    """These tags, the one that the fewest records bear first, as far as counting is worth it."""
    query = "SELECT 1 FROM tags WHERE kind = ? AND name = ? AND value = ? LIMIT ?"
    for most in _SAMPLES:
        counts = {
            name: sum(
                db.execute(f"SELECT count(*) FROM ({query})", (kind, name, value, most)).fetchone()[0]  # noqa: S608
                for value in values
            )
            for name, values in wanted
        }
        if min(counts.values()) < most:
            break
    return sorted(wanted, key=lambda tag: counts[tag[0]])
