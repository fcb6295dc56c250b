"""What a stretch of code leaves behind in its process: threads, descriptors, shared memory, handlers, a directory."""

from __future__ import annotations

import _thread
import fcntl
import gc
import os
import signal
import stat
import threading
import time
import warnings
from collections.abc import Hashable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

_PATIENCE = 1.0
"""Seconds that a thread or a probe has to be gone."""
_DEVICES = ("/dev/null", "/dev/zero", "/dev/full", "/dev/random", "/dev/urandom", "/dev/tty")
"""Files without a position that forks would share."""
_FOLDER = next((folder for folder in ("/proc/self/fd", "/dev/fd") if os.path.isdir(folder)), "")


class Remain(NamedTuple):
    """One thing that was not there before."""

    what: str
    key: Hashable
    """Which thread, descriptor or signal it is, for whoever saw it being made."""


def descriptors() -> dict[int, tuple[int, int]]:
    """The open descriptors, each with what tells its file from another."""
    names = [int(name) for name in os.listdir(_FOLDER)] if _FOLDER else range(256)
    found = {}
    for number in names:
        with suppress(OSError):  # closed by now, as the one that listed the folder is
            status = os.fstat(number)
            found[number] = (status.st_dev, status.st_ino)
    return found


def path_of(descriptor: int) -> str:
    """The file behind a descriptor; a word for its kind where it has no name."""
    with suppress(OSError):
        target = os.readlink(f"{_FOLDER}/{descriptor}")
        if target.startswith("/"):
            return target
    mode = os.fstat(descriptor).st_mode
    kinds = {stat.S_ISSOCK: "a socket", stat.S_ISFIFO: "a pipe", stat.S_ISREG: "a file", stat.S_ISDIR: "a folder"}
    return next((name for test, name in kinds.items() if test(mode)), "an event queue")


def is_written(descriptor: int) -> bool:
    """Whether it is an ordinary file that may be written through it."""
    access = fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_ACCMODE
    return access != os.O_RDONLY and stat.S_ISREG(os.fstat(descriptor).st_mode)


def tasks() -> int:
    """The threads of this process as the kernel counts them, or as Python does where it cannot be asked."""
    try:
        return len(os.listdir("/proc/self/task"))
    except OSError:
        return _python_threads()


def _python_threads() -> int:
    return _thread._count() + 1


def _shared() -> set[str]:
    """Memory that is written in one process and read in its forks, by name and inode."""
    try:
        lines = Path("/proc/self/maps").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return set()
    found = (line.split(maxsplit=5) for line in lines)
    return {f"{parts[5] if len(parts) > 5 else ''}#{parts[4]}" for parts in found if parts[1][1::2] == "ws"}


def _handlers() -> dict[int, Any]:
    return {number: signal.getsignal(number) for number in signal.valid_signals()}


class Before:
    """How the process is now; ``remains`` says later what is new."""

    def __init__(self) -> None:
        self._descriptors = descriptors()
        self._shared = _shared()
        self._handlers = _handlers()
        self._directory = _directory()
        self._threads = set(threading.enumerate())
        self._tasks = tasks()
        self._python_threads = _python_threads()

    def remains(self) -> Iterator[Remain]:
        yield from self._left_threads()
        yield from self._left_descriptors()
        for name in sorted(_shared() - self._shared):
            shown = name.rpartition("#")[0].removesuffix(" (deleted)")
            yield Remain(f"leaves memory that forks would share{f': {shown}' if shown else ''}", None)
        for number, handler in _handlers().items():
            if handler != self._handlers[number]:
                yield Remain(f"sets a handler of {_signal_name(number)}", ("signal", number))
        if _directory() != self._directory:
            yield Remain("changes the working directory", "directory")

    def _left_threads(self) -> Iterator[Remain]:
        alive = [thread for thread in threading.enumerate() if thread not in self._threads]
        for thread in alive:
            yield Remain(f"leaves the thread {thread.name!r} running", thread)
        if not alive and (count := self._nameless_threads()):
            yield Remain(f"leaves threads running that Python does not know: {count}", "tasks")

    def _nameless_threads(self) -> int:
        if self._surplus() <= 0:
            return 0
        # Some libraries end their threads before a fork and begin them anew when needed, as OpenBLAS does. So fork.
        if _python_threads() == self._python_threads:
            _fork()
        until = time.monotonic() + _PATIENCE
        while (surplus := self._surplus()) > 0 and time.monotonic() < until:
            time.sleep(0.005)  # the kernel is a little behind when a thread was joined
        return max(surplus, 0)

    def _surplus(self) -> int:
        return max(tasks() - self._tasks, _python_threads() - self._python_threads)

    def _left_descriptors(self) -> Iterator[Remain]:
        if not self._new_descriptors():
            return
        gc.collect()  # some were only waiting for it
        for number in self._new_descriptors():
            with suppress(OSError):
                name = path_of(number)
                if name not in _DEVICES:
                    yield Remain(f"leaves {name} open", ("descriptor", number))

    def _new_descriptors(self) -> list[int]:
        return [number for number, file in descriptors().items() if self._descriptors.get(number) != file]


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:  # a real-time signal between the first and the last
        return f"signal {number}"


def _directory() -> str:
    try:
        return os.getcwd()
    except OSError:
        return ""


def _fork() -> None:
    """Fork once and wait for the child, which does nothing."""
    with warnings.catch_warnings(), suppress(OSError):
        warnings.simplefilter("ignore")  # that threads are there is known
        if (child := os.fork()) == 0:
            os._exit(0)
        until = time.monotonic() + _PATIENCE
        while os.waitpid(child, os.WNOHANG)[0] == 0:
            if time.monotonic() > until:
                os.kill(child, signal.SIGKILL)
            time.sleep(0.001)
