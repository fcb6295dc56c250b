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
from aenv.errors import Conflict

LARGEST = 1024 * 1024
"""Bytes of one record: its value, and its text to search."""
LONGEST = 512
"""Characters of a kind, a key, a tag's name or value, and a text to find. The first two, and a name, are not empty."""
MOST_TAGS = 256
"""Values of tags that a record bears, or that are looked for at once."""
MOST_NUMBERS = 32
"""Numbers that are added to at once under one key."""
PAGE = 100
LARGEST_PAGE = 1000


class Full(Conflict):
    """A number may not grow so far. Of several, the first that was found."""

    def __init__(self, kind: str, key: str, name: str) -> None:
        super().__init__(f"{name} of {kind} {key} may not grow so far")
        self.kind, self.key, self.name = kind, key, name


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


class Add(msgspec.Struct, frozen=True):
    """Add to numbers that are kept under a kind and a key; one that is not there is 0. They are no record: ``get``,
    ``find`` and ``scan`` do not see them, ``counts`` does."""

    kind: str
    key: str
    amounts: Mapping[str, float]
    """By the name of the number; what is added may be negative."""
    floors: Mapping[str, float] = {}
    """A number that is below this is raised to it before anything is added."""
    most: Mapping[str, float] = {}
    """A number that grows, and would be over this after it, is ``Full``, and nothing is changed. What does not grow may
    be over it."""


Change = Put | Delete | Add


class Page(msgspec.Struct, frozen=True):
    """Some of the records that were found, and how many there are."""

    records: Sequence[Record]
    total: int


class Store(ABC):
    """Records that outlive this process. What was acknowledged survives whatever ends it.

    A store that cannot be reached raises ``NetworkError``; what is no record, page or tag is ``Invalid``.
    """

    shared = False
    """Whether several processes may use it at the same time."""

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
        """Make all of these changes, or none: ``Conflict`` when one expects another revision than there is, ``Full``
        when something is added to a number that may not grow so far.

        The revisions that they led to, 0 for what was deleted or added to. No record may occur twice; numbers may.
        """

    @abstractmethod
    def scan(self, kind: str) -> AsyncIterator[Record]:
        """Every record of a kind, by key. What changes meanwhile may be seen before or after its change."""

    @abstractmethod
    async def counts(self, kind: str) -> dict[str, dict[str, float]]:
        """The numbers of a kind, by key and name, without those that are 0."""

    async def since(self, kind: str, revision: int, limit: int = PAGE) -> list[Record]:
        """Records of a kind that were made or changed after that revision, in the order in which they were last
        changed. What was deleted is not among them. Revisions are given one after another in all of a store, so whoever
        goes on from the last one that it got misses nothing."""
        raise NotImplementedError

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
