"""The files of the work directory as they were at first, and how they are put back."""

from __future__ import annotations

import os
import stat
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any, NamedTuple

MOST_BYTES = 4 * 1024 * 1024
MOST_ENTRIES = 2000


class Entry(NamedTuple):
    mode: int
    content: bytes = b""
    """Of a file; the target of a link."""


class TooMuch(Exception):
    """More than is worth keeping."""


class Baseline:
    """The content of a directory at one moment."""

    def __init__(self, directory: str, entries: dict[str, Entry] | None = None) -> None:
        """As it is now, or as it was when another one had these entries."""
        self.directory = directory
        self.entries = _found(directory) if entries is None else entries

    def put_back(self) -> list[OSError]:
        """Make the directory what it was; what could not be done. Nothing else may be writing there."""
        failed: list[OSError] = []
        for name, entry in self.entries.items():
            if stat.S_ISDIR(entry.mode):  # so that what is in it can be seen and removed
                with suppress(OSError):
                    _change_mode(os.path.join(self.directory, name), entry.mode)
        for path, mode in list(_walk(self.directory)):
            kept = self.entries.get(os.path.relpath(path, self.directory))
            if kept is None or stat.S_IFMT(kept.mode) != stat.S_IFMT(mode):
                _attempt(failed, _remove, path, mode)
        for name, entry in self.entries.items():
            _attempt(failed, _restore, os.path.join(self.directory, name), entry)
        return failed


def _found(directory: str) -> dict[str, Entry]:
    entries: dict[str, Entry] = {}
    left = MOST_BYTES
    for path, mode in _walk(directory):
        if len(entries) >= MOST_ENTRIES:
            raise TooMuch(f"the work directory has more than {MOST_ENTRIES} entries")
        content = b""
        if stat.S_ISLNK(mode):
            content = os.fsencode(os.readlink(path))
        elif stat.S_ISREG(mode):
            with open(path, "rb") as file:
                content = file.read(left + 1)
        left -= len(content)
        if left < 0:
            raise TooMuch(f"the work directory has more than {MOST_BYTES} bytes")
        entries[os.path.relpath(path, directory)] = Entry(mode, content)
    return entries


def _attempt(failed: list[OSError], act: Callable[..., None], *arguments: Any) -> None:
    try:
        act(*arguments)
    except OSError as exc:
        failed.append(exc)


def _restore(path: str, entry: Entry) -> None:
    if stat.S_ISLNK(entry.mode):
        _link(path, os.fsdecode(entry.content))
    elif stat.S_ISDIR(entry.mode):
        os.makedirs(path, exist_ok=True)
        _change_mode(path, entry.mode)
    elif stat.S_ISREG(entry.mode):
        _write(path, entry.content)
        _change_mode(path, entry.mode)


def _change_mode(path: str, mode: int) -> None:
    found = os.lstat(path).st_mode
    # Who does not own a file may not even say that its mode stays; a link would lead elsewhere.
    if stat.S_IFMT(found) == stat.S_IFMT(mode) and found != mode:
        os.chmod(path, stat.S_IMODE(mode))


def is_private(directory: str) -> bool:
    """Whether the directory is this sandbox's own and nobody's only copy: mounted there by the process engine, as an
    overlay or as a copy on a tmpfs."""
    try:
        with open("/proc/self/mountinfo", encoding="utf-8", errors="surrogateescape") as mounts:
            rows = [line.split(" - ") for line in mounts]
    except OSError:
        return False
    found = [(mount.split()[3], kind.split()[0]) for mount, kind in rows if _unescaped(mount.split()[4]) == directory]
    if not found or directory == "/":
        return False
    root, kind = found[-1]
    return kind == "overlay" or (kind == "tmpfs" and root != "/")  # a whole tmpfs may be anybody's /tmp


def _unescaped(path: str) -> str:
    for code, character in (("\\040", " "), ("\\011", "\t"), ("\\012", "\n"), ("\\134", "\\")):
        path = path.replace(code, character)
    return path


def _walk(directory: str) -> Iterator[tuple[str, int]]:
    """Every entry below a directory with its mode, directories before what is in them; links are not followed."""
    folders = [directory]
    while folders:
        with suppress(PermissionError):
            for entry in sorted(os.scandir(folders.pop()), key=lambda entry: entry.name):
                mode = entry.stat(follow_symlinks=False).st_mode
                if stat.S_ISDIR(mode):
                    folders.append(entry.path)
                yield entry.path, mode


def _remove(path: str, mode: int) -> None:
    folders = [path] if stat.S_ISDIR(mode) else []
    with suppress(FileNotFoundError):  # it went with the directory it was in
        if not folders:
            os.unlink(path)
        for folder in folders:  # grows while it is gone through
            os.chmod(folder, 0o700)
            for entry in list(os.scandir(folder)):
                if entry.is_dir(follow_symlinks=False):
                    folders.append(entry.path)
                else:
                    os.unlink(entry.path)
        for folder in reversed(folders):
            os.rmdir(folder)


def _link(path: str, target: str) -> None:
    if not os.path.islink(path) or os.readlink(path) != target:
        with suppress(FileNotFoundError):
            os.unlink(path)
        os.symlink(target, path)


def _write(path: str, content: bytes) -> None:
    with suppress(OSError), open(path, "rb") as file:
        if file.read(len(content) + 1) == content:
            return
    with suppress(FileNotFoundError):
        os.unlink(path)
    with open(path, "xb") as file:
        file.write(content)
