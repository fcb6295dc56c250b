"""Files of a sandbox, read and written for its owner. Paths are resolved here, inside, and nowhere else."""

from __future__ import annotations

import asyncio
import errno
import functools
import os
import secrets
import stat
import sys
from collections.abc import AsyncGenerator, Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

from aenv.cleanup import finish
from aenv.errors import AEnvError, Conflict, Forbidden, Invalid, NotFound
from aenv.runtime.context import printable
from aenv.runtime.threads import Outcome, Threads

PIECE = 256 * 1024
MOST_ENTRIES = 10_000
_FAULTS: dict[int | None, type[AEnvError]] = {
    errno.ENOENT: NotFound,
    errno.ENOTDIR: Conflict,
    errno.EISDIR: Conflict,
    errno.ENXIO: Conflict,
    errno.EACCES: Forbidden,
    errno.EPERM: Forbidden,
    errno.EROFS: Forbidden,
    errno.ELOOP: Invalid,
    errno.ENAMETOOLONG: Invalid,
}
T = TypeVar("T")


async def is_directory(path: Path) -> bool:
    """Whether it is one; ``NotFound`` when there is nothing."""

    def look() -> bool:
        with _explained(path, "read"):
            return stat.S_ISDIR(os.stat(path).st_mode)

    return await apart(look)


async def listing(path: Path) -> dict[str, Any]:
    """The entries of a directory by name, each with its type and size."""

    def look() -> dict[str, Any]:
        with _explained(path, "read"), os.scandir(path) as found:
            entries = [entry for _, entry in zip(range(MOST_ENTRIES + 1), found, strict=False)]
        shown = [_entry(entry) for entry in sorted(entries[:MOST_ENTRIES], key=lambda entry: entry.name)]
        return {"path": printable(str(path)), "entries": shown, "truncated": len(entries) > MOST_ENTRIES}

    return await apart(look)


def _entry(entry: os.DirEntry[str]) -> dict[str, Any]:
    size = None
    if entry.is_symlink():
        kind = "link"
    elif entry.is_dir(follow_symlinks=False):
        kind = "directory"
    elif entry.is_file(follow_symlinks=False):
        kind = "file"
        with suppress(OSError):  # gone since it was listed
            size = entry.stat(follow_symlinks=False).st_size
    else:
        kind = "other"
    return {"name": printable(entry.name), "type": kind, "size": size}


async def pieces(path: Path) -> AsyncGenerator[bytes, None]:
    """The bytes of a regular file as it is now; each piece but the last has ``PIECE`` of them."""
    file: BinaryIO | None = None

    def begin() -> int:
        nonlocal file
        with _explained(path, "read"):
            file, size = _open(path)
        return size

    def read(most: int) -> bytes:
        assert file is not None
        with _explained(path, "read"):
            return file.read(most)

    try:
        left = await apart(begin) or sys.maxsize  # files under /proc have no size
        while piece := await apart(functools.partial(read, min(PIECE, left))):
            left -= len(piece)
            yield piece
    finally:
        if file is not None:
            file.close()


def _open(path: Path) -> tuple[BinaryIO, int]:
    _regular(path, os.stat(path))
    # What has become something else since then must neither be waited for nor become our terminal.
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
    try:
        found = os.fstat(descriptor)
        _regular(path, found)
        return open(descriptor, "rb", buffering=PIECE), found.st_size
    except BaseException:
        os.close(descriptor)
        raise


async def write(path: Path, content: bytes) -> None:
    """Write a file in one step, with its parents: who reads it finds the old content or the new."""

    def put() -> None:
        with _explained(path, "written"):
            _write(path, content)

    await apart(put)


def _write(path: Path, content: bytes) -> None:
    mode = None
    with suppress(FileNotFoundError):
        found = os.lstat(path)
        if not stat.S_ISLNK(found.st_mode):  # a link is replaced, whatever it points at
            _regular(path, found)
            mode = stat.S_IMODE(found.st_mode) & 0o777
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{secrets.token_hex(8)}.upload")
    try:
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666)
        with open(descriptor, "wb", buffering=0) as file:
            left = memoryview(content)
            while left:
                left = left[file.write(left) :]
            if mode is not None:
                os.fchmod(descriptor, mode)
        os.replace(temporary, path)
    except BaseException:
        with suppress(OSError):
            os.unlink(temporary)
        raise


def _regular(path: Path, found: os.stat_result) -> None:
    if stat.S_ISDIR(found.st_mode):
        raise Conflict(f"{printable(str(path))} is a directory", hint="name a file")
    if not stat.S_ISREG(found.st_mode):
        raise Conflict(f"{printable(str(path))} is not a regular file")


@contextmanager
def _explained(path: Path, done: str) -> Iterator[None]:
    try:
        yield
    except OSError as exc:
        kind = _FAULTS.get(exc.errno, AEnvError)
        hint = "nothing was changed there" if done == "written" else None
        raise kind(f"{printable(str(path))} cannot be {done}: {exc.strerror or exc}", hint=hint) from exc
    except ValueError as exc:
        raise Invalid(f"{printable(str(path))!r} is not a path: {exc}") from exc


@functools.lru_cache(maxsize=1)
def _threads(loop: asyncio.AbstractEventLoop) -> Threads:
    """Apart from those of tools: when all of these hang, the owner can still look."""
    return Threads(4)


def rest_threads(loop: asyncio.AbstractEventLoop) -> None:
    """End those that are idle; another is started when it is needed."""
    _threads(loop).close()


async def apart(work: Callable[[], T]) -> T:
    """Run ``work`` in a thread, to its end: half a write helps nobody, and what it opened has to be closed."""
    outcome: Outcome | None = None

    async def run() -> None:
        nonlocal outcome
        outcome = await _threads(asyncio.get_running_loop()).run(work)

    await finish(run())
    assert outcome is not None
    if outcome.error is not None:
        raise outcome.error
    found: T = outcome.value
    return found
