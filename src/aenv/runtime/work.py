"""A sandbox's own copy of its project, where the project itself is not to be changed."""

from __future__ import annotations

import os
import shutil
import stat
import sys
from contextlib import suppress
from dataclasses import replace
from pathlib import Path, PurePosixPath

from aenv.errors import Invalid, StartFailed
from aenv.project import Project
from aenv.project.leaving import ALWAYS, leaves_out


def move(found: Project, work: Path) -> Project:
    """Copy the project to a directory that is there, and go to it; the project as it is there.

    What is imported from the project is imported from the copy.
    """
    root, target = found.root.resolve(), work.resolve()
    if target.is_relative_to(root):
        raise Invalid(
            f"the work directory {work} is in the project, {root}", hint="give one outside of it in AENV_WORK"
        )
    try:
        _copy(root, target, PurePosixPath())
        os.chdir(target)
    except OSError as exc:
        place = exc.filename or work
        raise StartFailed(
            f"the project cannot be copied to {work}: {place}: {exc.strerror or exc}",
            hint="AENV_WORK names a directory that is there, that the sandbox may write, and that has room",
        ) from exc
    sys.path[:] = [_moved(entry, root, target) for entry in sys.path]
    return replace(found, root=target)


def _copy(source: Path, target: Path, below: PurePosixPath) -> None:
    """Copy what a directory holds, modes and times too. Links are copied as links, and none is followed."""
    with os.scandir(source) as listing:
        for entry in listing:
            name, made = below / entry.name, target / entry.name
            is_directory = entry.is_dir(follow_symlinks=False)
            if leaves_out(ALWAYS, name, is_directory):
                continue
            if is_directory:
                if made.is_symlink():
                    made.unlink()
                made.mkdir(mode=0o700, exist_ok=True)
                _copy(Path(entry.path), made, name)
                shutil.copystat(entry.path, made)
                continue
            with suppress(FileNotFoundError):
                made.unlink()
            if entry.is_symlink():
                made.symlink_to(_target(Path(entry.path), below))
            elif stat.S_ISREG(entry.stat(follow_symlinks=False).st_mode):
                shutil.copy2(entry.path, made, follow_symlinks=False)


def _target(link: Path, below: PurePosixPath) -> str:
    """What a link's copy leads to: by the same words, or, where they are a whole path into the project, to the copy."""
    words = os.readlink(link)
    if not os.path.isabs(words):
        return words
    root = link.parents[len(below.parts)]
    if not Path(words).is_relative_to(root):
        return words
    return os.path.relpath(words, link.parent)


def _moved(entry: str, root: Path, target: Path) -> str:
    """Where an entry of the search path that is in the project is in its copy; virtual environments are not there."""
    path = Path(entry or ".").absolute()
    if not entry or not path.is_relative_to(root):
        return entry
    copy = target / path.relative_to(root)
    return str(copy) if copy.is_dir() else entry
