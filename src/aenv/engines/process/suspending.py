"""Cells that nobody calls: held, and relieved of memory, until somebody does.

An instance says that it is idle, and lets nobody in from then on: who calls waits at its socket, which is held here,
too. So a call that came in the last moment is seen like one that comes an hour later. What the instance says is taken
at no more than a wish. One that lies is held and woken, at a bounded rate, and that is all.
"""

from __future__ import annotations

import asyncio
import socket
import threading
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress

from aenv.engines.process.cell import Cell
from aenv.engines.process.freezer import Freezer
from aenv.engines.process.wire import frame

_PAUSE = 0.05
"""Seconds between two times that a cell is heard. One that is honest is awake for longer."""
_BETWEEN = 0.25
"""Seconds between two times that a cell is held, which costs more than to hear it."""
_ATTEMPTS = 3
"""Times that a cell may turn out not to be held, since it starts processes all the time. Then it is left alone: to move
them keeps the kernel from other work."""
_THREADS = 4
"""Cells that are being held at a time."""
_LONGEST = 1e9
_CALLED = frame({"called": True})


class Suspending:
    """The cells of a spawner that are held, or about to be."""

    def __init__(self, freezer: Freezer | None) -> None:
        self._freezer = freezer
        self._threads = ThreadPoolExecutor(_THREADS, thread_name_prefix="aenv-suspend")
        self._rests: dict[Cell, _Rest] = {}
        self._known: dict[Cell, _Known] = {}

    async def rest(self, cell: Cell, idle: object, limit: float | None) -> None:
        """Have a cell stand still that says how long it was idle. Back when it is called, when it is gone, or when it
        has not been called for ``limit`` seconds, which it is to notice itself."""
        assert self._freezer is not None
        patience = None
        if limit is not None:
            said = idle if isinstance(idle, (int, float)) and 0 <= idle <= _LONGEST else 0.0
            patience = max(limit - said, 0.0) + _PAUSE
        known = self._known.setdefault(cell, _Known())
        rest = self._rests[cell] = _Rest(self._freezer, cell)
        loop = asyncio.get_running_loop()
        if cell.forking:  # somebody has asked for a fork of it
            rest.end()
        try:
            async with asyncio.timeout(patience):
                await asyncio.wait((rest.over,), timeout=max(known.held + _BETWEEN - loop.time(), 0.0))
                if not rest.over.done() and known.failures < _ATTEMPTS:
                    known.held = loop.time()
                    rest.begin(self._threads)
                await asyncio.wait((rest.over,))
        except TimeoutError:
            pass
        finally:
            rest.end()
        if rest.holding is not None:
            await asyncio.wait((rest.holding,))
            known.failures += not rest.holding.result()
        self._rests.pop(cell, None)
        await asyncio.sleep(_PAUSE)

    def wake(self, cell: Cell) -> None:
        """Let a cell run that is about to be called."""
        if rest := self._rests.get(cell):
            rest.end()

    async def release(self, cell: Cell) -> None:
        """Let a cell run that is to end, and hold its socket no longer. Back when nothing is done with it any more."""
        rest = self._rests.pop(cell, None)
        if rest is not None:
            rest.end()
        if cell.listener is not None:
            cell.listener.close()
            cell.listener = None
        if rest is not None and rest.holding is not None:
            rest.give_up()
            await asyncio.wait((rest.holding,))

    def forget(self, cell: Cell) -> None:
        """It is gone."""
        self._known.pop(cell, None)
        if self._freezer is not None:
            self._freezer.remove(cell.leaf)

    def close(self) -> None:
        self._threads.shutdown()


class _Known:
    """What there is to know of a cell from one rest to the next."""

    def __init__(self) -> None:
        self.held = 0.0
        """When that was done last, by the clock of the event loop."""
        self.failures = 0


class _Rest:
    """One time that a cell stands still."""

    def __init__(self, freezer: Freezer, cell: Cell) -> None:
        assert cell.listener is not None
        self._freezer = freezer
        self._cell = cell
        self._lock = threading.Lock()
        self._is_over = False
        self._loop = asyncio.get_running_loop()
        self._watched = [cell.listener.fileno()] + ([cell.pidfd] if cell.pidfd is not None else [])
        """What stirs when it is called, and when it is gone."""
        self.over: asyncio.Future[None] = self._loop.create_future()
        self.holding: asyncio.Future[bool] | None = None
        self._job: Future[bool] | None = None
        for descriptor in self._watched:
            self._loop.add_reader(descriptor, self.end)

    def begin(self, threads: ThreadPoolExecutor) -> None:
        """Have it held, once a thread has time for that."""
        self._job = threads.submit(self._hold)
        self.holding = asyncio.wrap_future(self._job)

    def give_up(self) -> None:
        """Wait for no thread any more."""
        if self._job is not None:
            self._job.cancel()

    def _hold(self) -> bool:
        """False when it cannot be held."""
        leaf = self._cell.leaf
        try:
            if not (self._is_over or self._freezer.gather(leaf)):
                return False
            with self._lock:
                if self._is_over:
                    return True
                self._freezer.hold(leaf)
        except OSError:
            return False
        self._freezer.reclaim(leaf)
        return True

    def end(self) -> None:
        """Let it run, and know that somebody waits. Once: its descriptors may be others' afterwards."""
        with self._lock:
            if self._is_over:
                return
            self._is_over = True
        for descriptor in self._watched:
            self._loop.remove_reader(descriptor)
        with suppress(OSError):  # one that does not listen, or is gone
            self._cell.channel.sock.send(_CALLED, socket.MSG_DONTWAIT)
        self._freezer.let_go(self._cell.leaf)
        if not self.over.done():
            self.over.set_result(None)
