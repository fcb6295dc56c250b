"""The interpreter of a project: the one that runs, or a virtual environment kept for requirements beyond it.

A virtual environment is kept by its content: whoever asks for the same packages shares it, read-only. It is made where
it stays, under a lock, and counts from the moment its marker is written.
"""

from __future__ import annotations

import asyncio
import errno
import fcntl
import hashlib
import os
import re
import sys
import sysconfig
import time
from collections.abc import AsyncIterator, Collection, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from functools import cache
from pathlib import Path
from typing import NamedTuple

from aenv import config
from aenv.cleanup import finish
from aenv.engines.process import requirements
from aenv.engines.process.installer import TICK, Installation, Order, Progress, clear
from aenv.engines.process.requirements import FILES
from aenv.errors import Conflict, StartFailed

_FORMAT = "1"
"""Changes when virtual environments are made in another way, so that older ones are not taken."""
_MARKER = "complete"
_KEY = re.compile(r"[0-9a-f]{40}")
_ENDED = (errno.ENOENT, errno.ESRCH, errno.EINVAL)
"""What the kernel says when it is asked about a process that is gone, or nearly."""


class Interpreter(NamedTuple):
    """A Python to start a zygote with."""

    executable: str


async def interpreter_for(root: Path, progress: Progress | None = None, *, trusted: bool = False) -> Interpreter:
    """The interpreter for the project at ``root``. It is made first when there is none like it yet.

    An author who is not ``trusted`` runs no code outside a sandbox: only wheels are installed. ``Invalid`` when the
    requirements can never be met, ``StartFailed`` when they could not be installed. Cancelled, it ends the installer
    and leaves nothing behind, unless others wait for the same.
    """
    wanted = requirements.remembered(root, trusted)
    if wanted is None:
        if not any(requirements.stamp(root / name) for name in FILES):
            return Interpreter(sys.executable)
        wanted = await asyncio.to_thread(requirements.read, root, trusted)
    if wanted.satisfied:
        return Interpreter(sys.executable)
    path = _kept() / _key(wanted.content)
    if not _use(path):
        await _made(Order(root, path, wanted, trusted), progress or _silent)
    return Interpreter(str(path / "bin" / "python"))


def is_ready(root: Path, *, trusted: bool = False) -> bool:
    """Whether there is an interpreter for the project at ``root``, so that nothing has to be installed for it."""
    wanted = requirements.read(root, trusted)
    return wanted.satisfied or (_kept() / _key(wanted.content) / _MARKER).is_file()


def unused(older_than: float) -> list[Path]:
    """What no process uses and nobody asked for in so many seconds, and what killed installations left; the oldest
    first."""
    kept = [path for path in _kept().glob("*") if _KEY.fullmatch(path.name)]
    in_use = _in_use(kept)
    found: list[tuple[float, Path]] = []
    for path in kept:
        with suppress(OSError):
            asked = _asked(path)
            if path not in in_use and asked < time.time() - older_than and not _is_locked(path):
                found.append((asked, path))
    return [path for _, path in sorted(found)]


def remove(path: Path, older_than: float) -> None:
    """Remove what ``unused`` listed; gone already is success. ``Conflict`` when it is made or used by now."""
    if not path.is_dir():
        return
    with _lock(path) as held:
        if held is None:
            raise Conflict(f"{path} is being made at this moment", hint="try again later")
        if _in_use([path]) or _asked(path) >= time.time() - older_than:
            raise Conflict(f"{path} is in use", hint="try again later")
        (path / _MARKER).unlink(missing_ok=True)  # first: what is half removed must not count
        clear(path)


# What is kept


def _kept() -> Path:
    return config.home().absolute() / "venvs"


def _elsewhere() -> str:
    return f"requirements are installed in {_kept()}; AENV_HOME names another place than {config.home()}"


@cache
def _key(content: str) -> str:
    parts = (
        _FORMAT,
        sys.version,
        sys.base_prefix,  # the standard library is not copied
        str(sysconfig.get_config_var("SOABI")),
        sysconfig.get_platform(),
        *requirements.of_runtime(),
        "",
        content,
    )
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:40]


def _use(path: Path) -> bool:
    """Whether it is complete. Its marker tells when it was used last."""
    try:
        os.utime(path / _MARKER)
    except OSError:
        return False
    return True


def _asked(path: Path) -> float:
    """When it was asked for last; 0 when it never was complete."""
    try:
        return (path / _MARKER).stat().st_mtime
    except FileNotFoundError:
        return 0.0


def _in_use(paths: Collection[Path]) -> set[Path]:
    """Those that a living process was started from, or sees in its jail; all of them where that cannot be told."""
    found: set[Path] = set()
    try:
        for process in filter(str.isdigit, os.listdir("/proc")):
            told = _told(f"/proc/{process}/cmdline") + _told(f"/proc/{process}/mountinfo")
            found.update(path for path in paths if path.name.encode() in told)
    except OSError:
        return set(paths)
    return found


def _told(file: str) -> bytes:
    try:
        return Path(file).read_bytes()
    except OSError as exc:
        if exc.errno in _ENDED:
            return b""
        raise


def _silent(line: str) -> None:
    """Progress that nobody asked for."""


# Making one, once for all who ask


class _Shared:
    """One installation for all who wait for it in an event loop: it is tried once, and fails once."""

    def __init__(self, order: Order) -> None:
        self.listeners: list[Progress] = []
        self.task = asyncio.create_task(_make(order, self._tell))

    def _tell(self, line: str) -> None:
        for listener in dict.fromkeys(self.listeners):
            listener(line)


_shared: dict[tuple[asyncio.AbstractEventLoop, Path], _Shared] = {}


async def _made(order: Order, progress: Progress) -> None:
    place = (asyncio.get_running_loop(), order.path)
    shared = _shared.get(place)
    if shared is None:
        shared = _shared[place] = _Shared(order)
    shared.listeners.append(progress)
    try:
        await asyncio.shield(shared.task)
    finally:
        shared.listeners.remove(progress)
        if not shared.listeners:
            del _shared[place]
            await finish(_ended(shared.task))


async def _ended(task: asyncio.Task[None]) -> None:
    task.cancel()
    await asyncio.wait((task,))
    with suppress(asyncio.CancelledError):
        task.exception()  # whoever waited has seen it


async def _make(order: Order, tell: Progress) -> None:
    try:
        order.path.parent.mkdir(parents=True, exist_ok=True)
        async with _turn(order.path, tell) as lock:
            if lock is None:
                return
            done = False
            try:
                await Installation(order, lock, tell).run()
                (order.path / _MARKER).touch()
                done = True
            finally:
                if not done:
                    await finish(asyncio.to_thread(clear, order.path))
    except OSError as exc:
        raise StartFailed(f"{order.path} cannot be made: {exc.strerror or exc}", hint=_elsewhere()) from exc


@asynccontextmanager
async def _turn(path: Path, tell: Progress) -> AsyncIterator[int | None]:
    """The lock for making ``path``; none when another process has made it meanwhile."""
    since = told = time.monotonic()
    while True:
        with _lock(path) as held:
            if _use(path):
                yield None
                return
            if held is not None:
                yield held
                return
        if told == since or time.monotonic() - told >= TICK:
            told = time.monotonic()
            tell(f"waiting for another process that installs the same ({told - since:.0f} s)")
        await asyncio.sleep(0.05)


@contextmanager
def _lock(path: Path) -> Iterator[int | None]:
    """The descriptor of the lock; none when another has it."""
    file = path.with_name(f"{path.name}.lock")
    descriptor = os.open(file, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    held = False
    try:
        with suppress(BlockingIOError, FileNotFoundError):
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            # Whoever had it before has removed the file, perhaps: then this is a lock that nobody else sees.
            held = os.path.samestat(os.fstat(descriptor), file.stat())
        yield descriptor if held else None
    finally:
        if held:
            file.unlink(missing_ok=True)
            fcntl.flock(descriptor, fcntl.LOCK_UN)  # a fork of this process may have the same descriptor
        os.close(descriptor)


def _is_locked(path: Path) -> bool:
    with _lock(path) as held:
        return held is None
