"""The interpreter of a project: the one that runs, or a virtual environment kept for requirements beyond it.

A virtual environment is kept by its content: whoever asks for the same packages shares it, read-only. It is made where
it stays, under a lock, and counts from the moment its marker is written.
"""

from __future__ import annotations

import asyncio
import fcntl
import hashlib
import os
import re
import sys
import sysconfig
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from functools import cache
from pathlib import Path
from typing import NamedTuple

import aenv
from aenv import config
from aenv.cleanup import finish
from aenv.engines.process import requirements
from aenv.engines.process.installer import TICK, Installation, Order, Progress, clear
from aenv.engines.process.requirements import FILE
from aenv.errors import Conflict, StartFailed

_FORMAT = "1"
"""Changes when virtual environments are made in another way, so that older ones are not taken."""
_MARKER = "complete"
_KEY = re.compile(r"[0-9a-f]{40}")
_LINK = "aenv-"


class Interpreter(NamedTuple):
    """A Python to start a zygote with."""

    executable: str
    prefix: str
    """Its ``sys.prefix``."""
    paths: tuple[str, ...] = ()
    """Import roots that the process must add itself, in which it finds this package."""


async def interpreter_for(root: Path, progress: Progress | None = None, *, trusted: bool = False) -> Interpreter:
    """The interpreter for the project at ``root``. It is made first when there is none like it yet.

    An author who is not ``trusted`` runs no code outside a sandbox: only wheels are installed. ``Invalid`` when the
    requirements can never be met, ``StartFailed`` when they could not be installed. Cancelled, it ends the installer
    and leaves nothing behind, unless others wait for the same.
    """
    wanted = requirements.remembered(root, trusted)
    if wanted is None:
        if requirements.stamp(root / FILE) is None:
            return _current()
        wanted = await asyncio.to_thread(requirements.read, root, trusted)
    if wanted.satisfied:
        return _current()
    path = _kept() / _key(wanted.content)
    if not _use(path):
        await _made(Order(root, path, wanted, trusted), progress or _silent)
    return _in_venv(path)


def unused(older_than: float) -> list[Path]:
    """What was not used for so many seconds, and what killed installations left; the oldest first."""
    found: list[tuple[float, Path]] = []
    for path in _kept().glob("*"):
        with suppress(OSError):
            if path.name.startswith(_LINK) and not (path / "aenv").exists():
                found.append((0.0, path))
            if _KEY.fullmatch(path.name):
                marker = path / _MARKER
                used = marker.stat().st_mtime if marker.exists() else 0.0
                if used < time.time() - older_than and not _is_locked(path):
                    found.append((used, path))
    return [path for _, path in sorted(found)]


def remove(path: Path) -> None:
    """Remove what ``unused`` listed; gone already is success. ``Conflict`` while it is being made."""
    if not path.is_dir():
        return
    with _lock(path) as held:
        if held is None:
            raise Conflict(f"{path} is being made at this moment", hint="try again later")
        (path / _MARKER).unlink(missing_ok=True)  # first: what is half removed must not count
        clear(path)


# Which interpreter


@cache
def _current() -> Interpreter:
    here = str(_package().parent)
    own = {os.path.realpath(entry) for entry in requirements.own_directories()}
    return Interpreter(sys.executable, sys.prefix, () if here in own else (here,))


def _in_venv(path: Path) -> Interpreter:
    return Interpreter(str(path / "bin" / "python"), str(path), (str(_linked(_package())),))


@cache
def _package() -> Path:
    return Path(aenv.__file__).resolve().parent


def _linked(package: Path) -> Path:
    """A directory with nothing but a link to this package, so that what is installed beside it stays unseen."""
    link = _kept() / f"{_LINK}{hashlib.sha256(os.fsencode(package)).hexdigest()[:16]}"
    if not (link / "aenv").is_symlink():
        try:
            link.mkdir(parents=True, exist_ok=True)
            with suppress(FileExistsError):
                (link / "aenv").symlink_to(package, target_is_directory=True)
        except OSError as exc:
            raise StartFailed(f"{link} cannot be made: {exc.strerror or exc}", hint=_elsewhere()) from exc
    return link


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
