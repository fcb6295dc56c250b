"""What a store of records is, whichever one it is.

A record is JSON under a kind and a key. It may bear tags, by which it is found, a text that is searched, and a time by
which lists are sorted. Every record has a revision, a number that grows with each change and is never given again, not
even when the record is deleted and made anew. A change may say which revision it expects: so who changes what somebody
else has changed meanwhile is told, and nothing is locked.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Mapping, Sequence
from types import TracebackType
from typing import Self

import msgspec

from aenv.cleanup import finish

LARGEST = 1024 * 1024
"""Bytes of one record: its value, and its text to search."""
LONGEST = 512
"""Characters of a kind, a key, a tag's name or value, and a text to find. The first two, and a name, are not empty."""
MOST_TAGS = 256
"""Values of tags that a record bears, or that are looked for at once."""
PAGE = 100
LARGEST_PAGE = 1000


class Record(msgspec.Struct, frozen=True):
    """One record as it is kept."""

    kind: str
    key: str
    value: bytes
    """JSON."""
    revision: int
    tags: Mapping[str, Sequence[str]] = {}
    order: float = 0.0
    search: str = ""
    expires_at: float | None = None


class Put(msgspec.Struct, frozen=True):
    """Make a record, or replace it."""

    kind: str
    key: str
    value: bytes
    expect: int | None = None
    """The revision that it replaces; 0 when there must be none, None when it does not matter."""
    tags: Mapping[str, Sequence[str]] = {}
    order: float = 0.0
    """Lists have the largest first; with the same order, the smallest key."""
    search: str = ""
    """What ``containing`` looks in. Upper and lower case are the same."""
    expires_at: float | None = None
    """Seconds since the epoch, after which there is no such record. One with tags cannot have it."""


class Delete(msgspec.Struct, frozen=True):
    """Remove a record. One that is not there is removed already, unless a revision is expected."""

    kind: str
    key: str
    expect: int | None = None


Change = Put | Delete


class Page(msgspec.Struct, frozen=True):
    """Some of the records that were found, and how many there are."""

    records: Sequence[Record]
    total: int


class Store(ABC):
    """Records that outlive this process. What was acknowledged survives whatever ends it.

    A store that cannot be reached raises ``NetworkError``; what is no record, page or tag is ``Invalid``.
    """

    @abstractmethod
    async def get(self, kind: str, key: str) -> Record | None: ...

    @abstractmethod
    async def find(
        self,
        kind: str,
        tags: Mapping[str, str | Sequence[str]] | None = None,
        *,
        containing: str = "",
        limit: int = PAGE,
        offset: int = 0,
    ) -> Page:
        """Records that bear every one of these tags, with that value or one of those values."""

    @abstractmethod
    async def change(self, *changes: Change) -> list[int]:
        """Make all of these changes, or none: ``Conflict`` when one expects another revision than there is.

        The revisions that they led to, 0 for what was deleted. No record may occur twice.
        """

    @abstractmethod
    def scan(self, kind: str) -> AsyncIterator[Record]:
        """Every record of a kind, by key. What changes meanwhile may be seen before or after its change."""

    @abstractmethod
    async def kinds(self) -> list[str]:
        """The kinds of which there are records."""

    @abstractmethod
    async def close(self) -> None:
        """Let go. What was acknowledged is kept."""

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await finish(self.close())
