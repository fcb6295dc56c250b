"""Databases that cost nothing to copy: a record is copied when it is first reached, and hashed anew only then."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from copy import deepcopy
from typing import Any, TypeVar

from pydantic import BaseModel

Db = TypeVar("Db", bound=BaseModel)


class Table:
    """The records of one table as the benchmark ships them, and the JSON of each."""

    def __init__(self, records: Mapping[str, BaseModel]) -> None:
        self.records = dict(records)
        self.texts = {key: _text(record.model_dump()) for key, record in records.items()}


class Records(dict[str, Any]):
    """A table of one episode.

    Whoever takes a record by its key gets one that belongs to the episode. Going through all of them gives the shipped
    ones where they were not taken yet: the benchmark's tools only read when they do so.
    """

    def __init__(self, table: Table) -> None:
        super().__init__(table.records)
        self._table = table
        self._own: set[str] = set()

    def __getitem__(self, key: str) -> Any:
        record = super().__getitem__(key)
        if key not in self._own:
            record = record.model_copy(deep=True)
            self[key] = record
        return record

    def __setitem__(self, key: str, record: Any) -> None:
        self._own.add(key)
        super().__setitem__(key, record)

    def get(self, key: str, default: Any = None) -> Any:
        try:
            return self[key]
        except KeyError:
            return default

    def text(self) -> str:
        """The table as JSON with sorted keys."""
        own, known = self._own, self._table.texts
        parts = (
            f"{json.dumps(key)}: {_text(dict.__getitem__(self, key).model_dump()) if key in own else known[key]}"
            for key in sorted(self)
        )
        return "{" + ", ".join(parts) + "}"


class Original:
    """A database as the benchmark ships it, from which episodes begin."""

    def __init__(self, db: BaseModel) -> None:
        self._db = db
        values = dict(db)
        self._tables = {name: Table(value) for name, value in values.items() if isinstance(value, dict)}
        self._rest = {name: value for name, value in values.items() if name not in self._tables}

    def copy(self) -> Any:
        """A database of the same content that shares nothing that its user could change."""
        tables = {name: Records(table) for name, table in self._tables.items()}
        return type(self._db).model_construct(**tables, **deepcopy(self._rest))


def digest(db: BaseModel) -> str:
    """What the benchmark's ``get_hash`` gives, to the letter, without writing down what nobody has touched."""
    parts = (
        f"{json.dumps(name)}: {value.text() if isinstance(value, Records) else _text(_plain(value))}"
        for name, value in sorted(dict(db).items())
    )
    return hashlib.sha256(("{" + ", ".join(parts) + "}").encode()).hexdigest()


def _plain(value: Any) -> Any:
    if isinstance(value, BaseModel):
        return value.model_dump()
    return [_plain(item) for item in value] if isinstance(value, list) else value


def _text(value: Any) -> str:
    return json.dumps(value, sort_keys=True, default=str)
