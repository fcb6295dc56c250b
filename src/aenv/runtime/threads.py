"""Threads for blocking functions: started when none is idle, so that one which never returns delays nobody.

Unlike ``ThreadPoolExecutor``, they are daemons: a hung tool does not keep a sandbox from ending.
"""

from __future__ import annotations

import asyncio
import contextvars
import threading
from collections import deque
from collections.abc import Callable
from functools import cached_property
from queue import SimpleQueue
from typing import Any

from aenv import config
from aenv.errors import SandboxError

NAME = "aenv-tool-"
"""How the names of these threads begin."""
WAIT = 30.0
"""Seconds a call waits for a thread when all of them are busy."""


class Outcome:
    """What a thread hands back. An exception travels as a value: a future that held ``SystemExit`` or
    ``StopIteration`` would take the event loop with it."""

    __slots__ = ("error", "value")

    def __init__(self, value: Any, error: BaseException | None) -> None:
        self.value = value
        self.error = error


class _Job:
    __slots__ = ("context", "done", "work")

    def __init__(self, work: Callable[[], Any], done: asyncio.Future[Outcome]) -> None:
        self.context = contextvars.copy_context()
        self.work = work
        self.done = done

    def run(self) -> Outcome:
        try:
            return Outcome(self.context.run(self.work), None)
        except BaseException as exc:
            return Outcome(None, exc)


_Inbox = SimpleQueue[_Job | None]
"""None ends the thread."""


class Threads:
    """All book-keeping happens on the event loop, so it needs no lock."""

    def __init__(self, most: int | None = None) -> None:
        self._given = most
        self._idle: list[_Inbox] = []
        self._waiting: deque[_Job] = deque()
        self._started = 0
        self._running: set[_Job] = set()
        self._finished: deque[tuple[_Inbox, _Job, Outcome]] = deque()
        self._awake = False
        """Whether the loop has been told to look at what is finished."""

    @cached_property
    def _most(self) -> int:
        """Looked up for the second thread: most sandboxes never have one."""
        most: int = self._given or config.get("threads")
        return most

    @property
    def abandoned(self) -> int:
        """How many of them still do what nobody waits for any more."""
        return sum(job.done.cancelled() for job in self._running)

    async def run(self, work: Callable[[], Any]) -> Outcome:
        """Run ``work`` in a thread. Cancelling abandons the thread, which cannot be stopped."""
        loop = asyncio.get_running_loop()
        job = _Job(work, loop.create_future())
        if self._idle:
            self._give(self._idle.pop(), job)
        elif self._started and self._started >= self._most:
            return await self._queued(job, loop)
        elif not self._start(job):
            return await self._crowded(job, loop)
        return await job.done

    async def _crowded(self, job: _Job, loop: asyncio.AbstractEventLoop) -> Outcome:
        """When the machine gives no more threads, those there are will do; when there are none, it gives one soon."""
        deadline = loop.time() + WAIT
        while not self._started:
            if loop.time() > deadline:
                raise SandboxError("the sandbox can start no thread: what runs in it has all it may have")
            await asyncio.sleep(0.02)
            if self._start(job):
                return await job.done
        return await self._queued(job, loop)

    async def _queued(self, job: _Job, loop: asyncio.AbstractEventLoop) -> Outcome:
        self._waiting.append(job)
        timer = loop.call_later(WAIT, self._give_up, job)
        try:
            return await job.done
        finally:
            timer.cancel()
            if job in self._waiting:
                self._waiting.remove(job)

    def _give_up(self, job: _Job) -> None:
        if job in self._waiting and not job.done.done():
            message = f"all {self._started} threads of the sandbox are busy"
            job.done.set_exception(
                SandboxError(message, hint="do its tools hang? AENV_THREADS sets how many there are")
            )

    def close(self) -> None:
        """End the threads that are idle."""
        while self._idle:
            self._idle.pop().put(None)
            self._started -= 1

    def _give(self, inbox: _Inbox, job: _Job) -> None:
        self._running.add(job)
        inbox.put(job)

    def _start(self, job: _Job) -> bool:
        inbox: _Inbox = SimpleQueue()
        name = f"{NAME}{self._started + 1}"
        try:
            threading.Thread(target=self._worker, args=(inbox,), name=name, daemon=True).start()
        except RuntimeError:
            return False
        self._started += 1
        self._give(inbox, job)
        return True

    def _worker(self, inbox: _Inbox) -> None:
        while True:
            job = inbox.get()
            if job is None:
                return
            outcome = job.run()
            self._finished.append((inbox, job, outcome))
            # Waking the loop is the dearest part of a quick call: what ends until it is awake shares one waking.
            if not self._awake:
                self._awake = True
                try:
                    job.done.get_loop().call_soon_threadsafe(self._collect)
                except RuntimeError:  # the loop is closed: the sandbox has ended
                    return
            del job, outcome  # an idle thread holds no result

    def _collect(self) -> None:
        self._awake = False
        while self._finished:
            inbox, job, outcome = self._finished.popleft()
            self._running.discard(job)
            if not job.done.done():
                job.done.set_result(outcome)
            if self._waiting:
                self._give(inbox, self._waiting.popleft())
            else:
                self._idle.append(inbox)
