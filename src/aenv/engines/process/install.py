"""A project as its instances see it: copied once, as it is at that moment, and never changed again."""

from __future__ import annotations

import os
import shutil
import stat
from pathlib import Path

_SKIPPED = {".git", ".hg", ".venv", "venv", "__pycache__", ".mypy_cache", ".pytest_cache", ".ruff_cache"}


def install(source: Path, target: Path, owner: int | None) -> None:
    """Copy a project to where its instances see it: as it is now, and never changed again.

    Links are copied as links: they are followed only inside.
    """
    _directory(target)
    for directory, names, files in os.walk(source):
        here = target / Path(directory).relative_to(source)
        names[:] = [name for name in names if name not in _SKIPPED]
        links = [name for name in names if os.path.islink(os.path.join(directory, name))]
        for name in names:
            if name not in links:
                _directory(here / name)
        for name in (*files, *links):
            _copy(Path(directory, name), here / name)
    if owner is not None:
        for directory, names, files in os.walk(target):
            os.chown(directory, owner, owner)
            for name in (*files, *(name for name in names if os.path.islink(os.path.join(directory, name)))):
                os.chown(os.path.join(directory, name), owner, owner, follow_symlinks=False)


def _directory(path: Path) -> None:
    path.mkdir()
    path.chmod(0o777)  # an instance has another user, and what it writes goes to its own overlay


def _copy(source: Path, target: Path) -> None:
    mode = source.lstat().st_mode
    if stat.S_ISLNK(mode):
        os.symlink(os.readlink(source), target)
    elif stat.S_ISREG(mode):
        shutil.copyfile(source, target)
        target.chmod(0o777 if mode & 0o100 else 0o666)
