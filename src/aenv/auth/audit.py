"""The audit log: who asked for what, and what came of it. The newest lines are kept, in order."""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections import deque
from contextlib import suppress

import msgspec
from msgspec import structs

from aenv.auth.callers import Caller, Scope
from aenv.auth.tokens import TOKEN
from aenv.errors import AEnvError
from aenv.store.base import PAGE, Delete, Put, Store
from aenv.wire import Audited

log = logging.getLogger("aenv.audit")

MOST = 10_000
"""Lines that are kept, and lines that wait while the store is away."""
_KIND = "audit"
_BATCH = 100
"""Lines that are written at a time: a store in a file does so on the loop's thread."""
_PAUSE = 0.5
"""Seconds for which lines are gathered before they are written."""
_RETRY = 1.0
_CLOSING = 5.0
"""Seconds in which the last lines must be written."""
_SLACK = 500
"""Lines after which those that are too many are removed."""
_STRANGERS = 300.0
"""Lines about callers without a token that are written in an hour: who has none cannot drive out the others' lines."""
_LONGEST = 512
_TICK = 1e-6

Found = tuple[list[Audited], int]


class Audit:
    """The lines in a store. Writing one keeps nobody waiting: it is done in the background, within a second."""

    def __init__(self, store: Store, *, most: int = MOST) -> None:
        self._store = store
        self._most = most
        self._waiting: deque[tuple[float, bytes]] = deque()
        self._batch: list[Put] = []
        """What is being written; again the same when it failed, since it may have been written nevertheless."""
        self._dropped = 0
        self._away = False
        self._strangers = _STRANGERS
        """How many more lines may be about strangers."""
        self._strangers_at = time.monotonic()
        self._strangers_left_out = 0
        self._last: float | None = None
        self._unchecked = _SLACK
        """Lines written since somebody looked how many there are."""
        self._one_at_a_time = asyncio.Lock()
        self._some = asyncio.Event()
        self._closing = asyncio.Event()
        self._writer: asyncio.Task[None] | None = None

    def note(self, line: Audited) -> None:
        """Write this line soon. When too many wait, the oldest is dropped."""
        if not line.owner and not self._may_be_strangers():
            return
        if len(self._waiting) >= self._most:
            self._waiting.popleft()
            self._dropped += 1
        self._waiting.append((time.time(), _encoded(line)))
        self._some.set()
        if self._writer is None:
            self._writer = asyncio.create_task(self._write(), name="aenv audit")

    def _may_be_strangers(self) -> bool:
        now = time.monotonic()
        earned = (now - self._strangers_at) * _STRANGERS / 3600
        self._strangers, self._strangers_at = min(_STRANGERS, self._strangers + earned), now
        if self._strangers < 1:
            self._strangers_left_out += 1
            return False
        self._strangers -= 1
        if self._strangers_left_out:
            log.warning("%d requests without a token are not in the audit log", self._strangers_left_out)
            self._strangers_left_out = 0
        return True

    async def list(self, caller: Caller, *, limit: int = PAGE, offset: int = 0) -> Found:
        """The lines, for an admin; the newest first, and how many there are."""
        caller.require(Scope.ADMIN)
        await self._flush()
        within = max(0, min(limit, self._most - offset))
        page = await self._store.find(_KIND, limit=within, offset=offset)
        return [msgspec.json.decode(record.value, type=Audited) for record in page.records], min(page.total, self._most)

    async def close(self) -> None:
        """Write what waits, as far as the store is there."""
        self._closing.set()
        self._some.set()
        if self._writer is None:
            return
        _, late = await asyncio.wait([self._writer], timeout=_CLOSING)
        for writer in late:
            writer.cancel()
            await asyncio.wait([writer])
        if lost := len(self._waiting) + len(self._batch) + self._dropped:
            log.error("the audit log has lost its last %d lines: the store did not take them", lost)

    async def _write(self) -> None:
        while True:
            await self._some.wait()
            await self._rest(_PAUSE)
            self._some.clear()
            failed = not await self._try()
            if self._closing.is_set() and (failed or not self._waiting):
                return
            if failed:
                self._some.set()
                await self._rest(_RETRY)

    async def _rest(self, seconds: float) -> None:
        """Wait, unless the log is being closed."""
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._closing.wait()

    async def _try(self) -> bool:
        """Whether what waited is written."""
        try:
            await self._flush()
        except Exception as exc:
            if not self._away:
                known = isinstance(exc, AEnvError)
                log.warning("the audit log is not being written: %s", exc, exc_info=None if known else exc)
            self._away = True
            return False
        if self._away or self._dropped:
            log.warning("the audit log is being written again; it has lost %d lines", self._dropped)
            self._away, self._dropped = False, 0
        return True

    async def _flush(self) -> None:
        """Write what waits by now."""
        async with self._one_at_a_time:
            if self._last is None:
                newest = (await self._store.find(_KIND, limit=1)).records
                self._last = newest[0].order if newest else 0.0
            wanted = len(self._waiting)
            while self._batch or (wanted > 0 and self._waiting):
                if not self._batch:
                    count = min(_BATCH, len(self._waiting))
                    self._batch = [self._put(*self._waiting.popleft()) for _ in range(count)]
                    wanted -= count
                await self._store.change(*self._batch)
                self._unchecked += len(self._batch)
                self._batch = []
                if self._unchecked >= _SLACK:
                    await self._trim()

    async def _trim(self) -> None:
        """Remove the oldest lines of those that are too many."""
        while old := (await self._store.find(_KIND, limit=_BATCH, offset=self._most)).records:
            await self._store.change(*(Delete(_KIND, record.key) for record in old))
        self._unchecked = 0

    def _put(self, at: float, line: bytes) -> Put:
        """A line after the last one, whatever the clock says."""
        self._last = at if self._last is None else max(at, self._last + _TICK)
        return Put(_KIND, f"{self._last:.6f}-{secrets.token_hex(6)}", line, order=self._last)


def _encoded(line: Audited) -> bytes:
    """A line whose target, which is whatever a caller named, is short, has an UTF-8 form, and is no token."""
    target = TOKEN.sub("***", line.target[:_LONGEST].encode(errors="backslashreplace").decode())
    return msgspec.json.encode(line if target == line.target else structs.replace(line, target=target))
