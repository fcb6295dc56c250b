"""Files of a task, brought into the second container."""

from __future__ import annotations

import os
import posixpath
from pathlib import Path

from aenv.runtime.second import Second


async def put(second: Second, directory: Path, target: str) -> None:
    """All files of a directory, below another one there."""
    folders, files = _content(directory)
    await second.exec(["mkdir", "-p", target, *(posixpath.join(target, name) for name in folders)])
    for name, path in files.items():
        await second.write(posixpath.join(target, name), path.read_bytes(), mode=mode_of(path))


def mode_of(path: Path) -> int:
    """A file's mode; its own user may read it."""
    return (os.stat(path).st_mode & 0o777) | 0o600


def _content(directory: Path) -> tuple[list[str], dict[str, Path]]:
    found = {path.relative_to(directory).as_posix(): path for path in sorted(directory.rglob("*"))}
    folders = [name for name, path in found.items() if path.is_dir()]
    return folders, {name: path for name, path in found.items() if name not in folders}
