"""Projects of this machine that came as archives: each is unpacked once, under its digest."""

from __future__ import annotations

import logging
import os
import shutil
from collections.abc import Collection
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO, NamedTuple

from aenv.errors import Conflict
from aenv.project import CONFIG
from aenv.project.archive import unpack

log = logging.getLogger("aenv.project")

MOST_KEPT = 8 * 1024 * 1024 * 1024
"""Bytes of unpacked projects that are kept; those in use stay, however many they are."""


class Placed(NamedTuple):
    """A project on this machine."""

    root: str
    stamp: str
    """Which state of its files it is: an engine keeps nothing from another one."""


class Unpacked:
    """Projects by digest, below ``folder``. All but ``find`` is for a thread."""

    def __init__(self, folder: Path, *, most: int = MOST_KEPT) -> None:
        self.folder = folder
        self._most = most

    def find(self, digest: str) -> Placed | None:
        """The project of that digest, if it is here; that counts as a use of it."""
        root = self.folder / digest
        try:
            status = os.stat(root / CONFIG)
            os.utime(root)  # what was used last is kept longest
        except OSError:
            return None
        return Placed(str(root), f"{digest[:16]}-{status.st_ino}-{status.st_mtime_ns}")

    def put(self, file: BinaryIO, digest: str, in_use: Collection[str]) -> None:
        """Unpack an archive under its digest, and make room for it before. Those ``in_use`` stay."""
        self.make_room(in_use, self._most)
        target = self.folder / digest
        if (target / CONFIG).exists():
            return  # another server of this home was faster
        if target.exists():
            shutil.rmtree(target)
        try:
            unpack(file, target)
        except Conflict:
            if not (target / CONFIG).exists():
                raise

    def make_room(self, in_use: Collection[str], most: int = 0) -> int:
        """Remove what was not used for the longest time, until no more than ``most`` bytes are left; how many went."""
        found = []
        for path in self.folder.iterdir() if self.folder.is_dir() else ():
            if is_digest(path.name):
                with suppress(OSError):
                    found.append((path.stat().st_mtime, path, _size(path)))
        total, removed = sum(size for _, _, size in found), 0
        for _, path, size in sorted(found):
            if total <= most:
                break
            if path.name not in in_use:
                doomed = path.with_name(f".{path.name}")  # in one step, it is no longer there
                with suppress(OSError):
                    path.rename(doomed)
                shutil.rmtree(doomed, ignore_errors=True)
                total -= size
                removed += 1
                log.info("removed the unpacked project %s, which nobody uses", path.name[:16])
        return removed


def is_digest(text: str) -> bool:
    """Whether it is a sha256, as it is written."""
    return len(text) == 64 and set(text) <= set("0123456789abcdef")


def _size(root: Path) -> int:
    total = 0
    for directory, _, names in os.walk(root):
        for name in names:
            with suppress(OSError):
                total += os.lstat(os.path.join(directory, name)).st_size
    return total
