"""Files by path, in bounded pieces. What is not a regular file is refused: reading a pipe could take for ever."""

from __future__ import annotations

import heapq
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from aenv import ToolError
from mini_terminal.capture import whole

MOST = 1024 * 1024
"""Most bytes that are read or written at once."""
ENTRIES = 1000
"""Most entries of a directory that are listed."""
_KINDS = ((stat.S_ISREG, "file"), (stat.S_ISDIR, "directory"), (stat.S_ISLNK, "link"))


@contextmanager
def opened(path: str, flags: int) -> Iterator[int]:
    """A regular file, open; anything else is an ``OSError`` or a ``ToolError``."""
    descriptor = os.open(path, flags | os.O_NONBLOCK | os.O_CLOEXEC, 0o666)
    try:
        mode = os.fstat(descriptor).st_mode
        if stat.S_ISDIR(mode):
            raise ToolError(f"{path} is a directory; list_files shows what is in it")
        if not stat.S_ISREG(mode):
            raise ToolError(f"{path} is not a regular file")
        yield descriptor
    finally:
        os.close(descriptor)


@contextmanager
def explained(path: str) -> Iterator[None]:
    """What the system refuses, as something that a model can read."""
    try:
        yield
    except IsADirectoryError as exc:
        raise ToolError(f"{path} is a directory; list_files shows what is in it") from exc
    except (NotADirectoryError, FileExistsError) as exc:
        raise ToolError(f"{path}: a part of the path is not a directory") from exc
    except OSError as exc:
        raise ToolError(f"{path}: {exc.strerror or exc}") from exc
    except ValueError as exc:  # a NUL, or half of a surrogate pair
        raise ToolError(f"{path!r} is not a usable path: {exc}") from exc


def at(path: str, directory: str) -> str:
    """A path as the shell in that directory means it."""
    if not path:
        raise ToolError("the path is empty")
    return os.path.normpath(os.path.join(directory, os.path.expanduser(path)))


def read(path: str, offset: int, limit: int) -> dict[str, Any]:
    """A piece of a file as text, from a byte on."""
    if offset < 0 or not 0 < limit <= MOST:
        raise ToolError(f"offset must be 0 or more, and limit from 1 to {MOST} bytes")
    with explained(path), opened(path, os.O_RDONLY) as descriptor:
        size = os.fstat(descriptor).st_size
        data = _exactly(descriptor, offset, limit + 1)
    more = len(data) > limit
    data = data[:limit]
    if more:
        data = data[: whole(data) or limit]
    try:
        text, binary = data.decode(), False
    except UnicodeDecodeError:
        text, binary = data.decode(errors="replace"), True
    end = offset + len(data)
    return {"content": text, "size": max(size, end), "next_offset": end if more else None, "binary": binary}


def _exactly(descriptor: int, offset: int, count: int) -> bytes:
    os.lseek(descriptor, offset, os.SEEK_SET)
    parts = bytearray()
    while len(parts) < count and (part := os.read(descriptor, count - len(parts))):
        parts += part
    return bytes(parts)


def write(path: str, content: str, append: bool) -> dict[str, Any]:
    """Put text into a file, over what was there or after it; directories on the way are made."""
    try:
        data = content.encode()
    except UnicodeEncodeError as exc:
        raise ToolError("the content holds half of a surrogate pair, which UTF-8 cannot carry") from exc
    if len(data) > MOST:
        raise ToolError(f"the content has {len(data)} bytes and {MOST} is the most; write it in parts with append")
    with explained(path):
        os.makedirs(os.path.dirname(path), exist_ok=True)
        with opened(path, os.O_WRONLY | os.O_CREAT | (os.O_APPEND if append else 0)) as descriptor:
            if not append:
                os.ftruncate(descriptor, 0)
            left = memoryview(data)
            while left:
                left = left[os.write(descriptor, left) :]
    return {"path": path, "bytes": len(data)}


def entries(path: str) -> dict[str, Any]:
    """What is in a directory, by name."""
    count = 0

    def each(listing: Iterator[os.DirEntry[str]]) -> Iterator[os.DirEntry[str]]:
        nonlocal count
        for entry in listing:
            count += 1
            yield entry

    with explained(path), os.scandir(path) as listing:
        first = heapq.nsmallest(ENTRIES, each(listing), key=lambda entry: entry.name)
        shown = [_entry(entry) for entry in first]
    return {"path": path, "entries": shown, "total": count, "truncated": count > len(shown)}


def _entry(entry: os.DirEntry[str]) -> dict[str, Any]:
    name = os.fsencode(entry.name).decode(errors="replace")
    try:
        found = entry.stat(follow_symlinks=False)
    except OSError:  # gone meanwhile
        return {"name": name, "type": "other", "size": 0}
    kind = next((kind for is_kind, kind in _KINDS if is_kind(found.st_mode)), "other")
    return {"name": name, "type": kind, "size": found.st_size}
