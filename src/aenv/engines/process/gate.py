"""Who may take a user namespace in a sandbox that can be forked: the fork that its owner asked for, and nobody else.

The kernel has such a call wait, and asks whoever has the other end of the filter, which is the spawner.
"""

from __future__ import annotations

import asyncio
import errno
import fcntl
import os
import select
import struct
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

_RECEIVE, _ANSWER = 0xC0502100, 0xC0182101
"""What asks the kernel for a call that waits, and what tells it how that goes on."""
_GO_ON = 1
_PAUSE = 0.01
"""Seconds for which nobody is answered after a refusal, so that who asks on and on costs next to nothing."""


class Gate:
    """That of one instance and of all that are forked from it."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._forks: Counter[int] = Counter()
        """By the process that is forked, forks that are under way."""
        self._admitted: Counter[int] = Counter()
        """And how many calls of its children are let through."""
        self._loop = asyncio.get_running_loop()
        self._pausing: asyncio.TimerHandle | None = None
        self._loop.add_reader(descriptor, self._answer)

    @contextmanager
    def opened(self, parent: int, patience: float) -> Iterator[None]:
        """Let one child of that process through, within the block. When that is given up, its child comes all the same
        for so many seconds, and must not take what is let through for another."""
        self._forks[parent] += 1
        self._admitted[parent] += 1
        self._go_on()
        task = asyncio.current_task()
        try:
            yield
        finally:
            if task is not None and task.cancelling():
                self._loop.call_later(patience, self._shut, parent)
            else:
                self._shut(parent)

    def _shut(self, parent: int) -> None:
        self._forks[parent] -= 1
        self._admitted[parent] = min(self._admitted[parent], self._forks[parent])

    def close(self) -> None:
        """Let nobody through any more."""
        self._loop.remove_reader(self._descriptor)
        if self._pausing is not None:
            self._pausing.cancel()
        os.close(self._descriptor)

    def _go_on(self) -> None:
        if self._pausing is not None:
            self._pausing.cancel()
            self._pausing = None
            self._loop.add_reader(self._descriptor, self._answer)

    def _answer(self) -> None:
        asking = select.poll()
        asking.register(self._descriptor, select.POLLIN)
        events = dict(asking.poll(0)).get(self._descriptor, 0)
        if not events & select.POLLIN:  # the last of them has ended, or whoever asked
            if events & select.POLLHUP:
                self._loop.remove_reader(self._descriptor)
            return
        with suppress(OSError):  # who asked has ended meanwhile
            call, pid = struct.unpack_from("QI", fcntl.ioctl(self._descriptor, _RECEIVE, bytes(80)))
            parent = _parent_of(pid)
            admitted = self._admitted[parent] > 0
            self._admitted[parent] -= admitted
            result = (0, _GO_ON) if admitted else (-errno.EPERM, 0)
            fcntl.ioctl(self._descriptor, _ANSWER, struct.pack("QqiI", call, 0, *result))
            if not admitted and not self._forks.total():
                self._loop.remove_reader(self._descriptor)
                self._pausing = self._loop.call_later(_PAUSE, self._go_on)


def _parent_of(pid: int) -> int:
    """The process that has forked another; 0 when that has ended."""
    with suppress(OSError):
        for row in Path(f"/proc/{pid}/status").read_text().splitlines():
            if row.startswith("PPid:"):
                return int(row.split()[1])
    return 0
