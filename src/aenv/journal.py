"""What was asked of one instance and what it answered, in order: enough to bring another one to the same place.

It is kept by the instance's client, so it outlives the instance, and nothing in the sandbox can change it.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, NamedTuple

from aenv.errors import Conflict, Unsupported

if TYPE_CHECKING:
    from aenv.http import Response

OVERHEAD = 200
"""Bytes that an entry counts for beside what was sent and answered."""


class Entry:
    """One request that had an effect, and its answer."""

    __slots__ = ("answer", "body", "headers", "method", "path", "timeout", "what")

    def __init__(self, what: str, method: str, path: str, headers: bytes, body: bytes, timeout: float | None) -> None:
        self.what = what
        """In words, such as ``tool move``."""
        self.method = method
        self.path = path
        self.headers = headers
        """Of this request alone: no token is among them."""
        self.body = body
        self.timeout = timeout
        self.answer: Response | None = None
        """None while there is none."""

    @property
    def size(self) -> int:
        """Bytes that it counts for."""
        return OVERHEAD + len(self.body) + (0 if self.answer is None else len(self.answer.body))


class Mark(NamedTuple):
    """How far a journal had come at some moment, whether or not it kept what it was told."""

    answered: int
    uncertain: int


class Journal:
    """All that was asked of one instance, within a bound. One that does not tell all is useless, and keeps nothing."""

    def __init__(self, most: int) -> None:
        """``most``: bytes of all entries together; 0 keeps none."""
        self.most = most
        self.entries: list[Entry] = []
        """In the order in which they were begun."""
        self.gap = "" if most else "no journal is kept (AENV_JOURNAL is 0)"
        """Why it does not tell all that happened to the instance, if it does not."""
        self.unseen = ""
        """Why there may have been more calls than are counted here, if that may be."""
        self.begun = 0
        """How many calls there were, also those that are not kept or had no answer."""
        self.under_way = 0
        self._answered = self._uncertain = 0
        """How many calls were answered, and of how many nobody knows what they did; also of those not kept."""
        self._size = 0
        self._quiet: asyncio.Event | None = None

    def copied(self) -> Journal:
        """The same, for another instance in the same place."""
        made = Journal(self.most)
        made.entries, made.gap, made._size = list(self.entries), self.gap, self._size
        made.begun, made._answered, made._uncertain = self.begun, self._answered, self._uncertain
        return made

    def begin(self, entry: Entry) -> None:
        """Something is asked; how that ends is told by one of the two below."""
        self.begun += 1
        self.under_way += 1
        if not self.gap:
            self.entries.append(entry)

    def answered(self, entry: Entry, answer: Response) -> None:
        self._ended()
        entry.answer = answer
        self._answered += 1
        self._size += entry.size
        if self._size > self.most:
            self.miss(f"it had more calls than are kept (AENV_JOURNAL is {self.most} bytes)")

    def unanswered(self, entry: Entry, *, harmless: bool) -> None:
        """There is no answer. ``harmless``: it had no effect, or one that is gone with the instance."""
        self._ended()
        if not harmless:
            self._uncertain += 1
            self.miss(f"{entry.what} was cut short, and nobody knows what it did")
        elif not self.gap:
            self.entries.remove(entry)

    def _ended(self) -> None:
        self.under_way -= 1
        if not self.under_way and self._quiet is not None:
            self._quiet.set()

    async def quiet(self) -> None:
        """Wait until nothing is under way. Nothing new may be begun meanwhile."""
        if self.under_way:
            self._quiet = asyncio.Event()
            await self._quiet.wait()

    @property
    def calls(self) -> int:
        """How many there were, as far as they are kept."""
        return len(self.entries)

    def miss(self, why: str, *, unseen: bool = False) -> None:
        """Something happens to the instance that is not written down. ``unseen``: nobody tells when, or how often."""
        self.gap = self.gap or why
        self.unseen = self.unseen or (why if unseen else "")
        self.entries = []

    def answers(self) -> tuple[Entry, ...]:
        """All that was answered before the instance was lost. ``Unsupported`` where that is not all there was."""
        if self.gap:
            raise Unsupported(f"the journal does not tell all: {self.gap}")
        return tuple(entry for entry in self.entries if entry.answer is not None)

    @property
    def mark(self) -> Mark:
        """How far it has come."""
        return Mark(self._answered, self._uncertain)

    def since(self, mark: Mark) -> tuple[Entry, ...]:
        """All that was answered after that moment. ``Unsupported`` where that is not all there was."""
        if self.unseen:
            raise Unsupported(f"the journal does not tell all: {self.unseen}")
        if self.mark == mark:
            return ()
        if self._uncertain != mark.uncertain:
            raise Unsupported("a call was cut short after what was kept, and nobody knows what it did")
        return self.answers()[mark.answered :]

    def whole(self) -> tuple[Entry, ...]:
        """All that happened to an instance that lives. ``Conflict`` where something is still under way."""
        self.check_quiet()
        return self.answers()

    def check_quiet(self) -> None:
        """Raises ``Conflict`` where something is still under way."""
        if self.under_way:
            raise Conflict(f"calls under way: {self.under_way}", hint="wait for their answers first")
