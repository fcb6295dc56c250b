"""A project as one archive: the same files give the same bytes, and what is private stays out."""

from __future__ import annotations

import gzip
import hashlib
import io
import os
import stat
import tarfile
from collections.abc import Iterator
from fnmatch import fnmatchcase
from pathlib import Path, PurePosixPath
from typing import NamedTuple

from aenv.errors import Invalid, TooLarge
from aenv.project import Project

IGNORE_FILE = ".aenvignore"
MAX_SIZE = 256 * 1024 * 1024
"""Most bytes the files of a project may have together."""
_ALWAYS = (".git", ".hg", ".venv", "venv/", "__pycache__", "*.pyc", ".env", ".env.*", ".DS_Store", "*_cache/")


class _Rule(NamedTuple):
    pattern: str
    keep: bool
    """``!pattern``: what an earlier line left out is in again."""
    directories_only: bool
    anchored: bool

    @classmethod
    def parse(cls, line: str) -> _Rule:
        keep = line.startswith("!")
        body = line.removeprefix("!")
        pattern = body.strip("/")
        return cls(pattern, keep, body.endswith("/"), "/" in body.rstrip("/"))

    def matches(self, path: PurePosixPath, is_directory: bool) -> bool:
        if self.directories_only and not is_directory:
            return False
        return fnmatchcase(str(path) if self.anchored else path.name, self.pattern)


def pack(project: Project, *, limit: int = MAX_SIZE) -> bytes:
    """The project as ``tar.gz``: entries sorted, no times, no owners.

    Left out: version control, virtual environments, caches, ``.env`` files and what ``.aenvignore`` lists
    (globs as in ``.gitignore``: ``*.log``, ``data/``, ``/top.txt``, ``!keep.log``).
    """
    root = project.root.resolve()
    entries = sorted(_entries(root, root, _rules(root)), key=lambda entry: entry[0])
    sizes = [(path.stat().st_size, name) for name, path in entries if not path.is_symlink()]
    if (total := sum(size for size, _ in sizes)) > limit:
        largest = ", ".join(f"{name} ({_mebibytes(size)})" for size, name in sorted(sizes, reverse=True)[:3])
        raise TooLarge(
            f"the project has {_mebibytes(total)} of files; {_mebibytes(limit)} is the most",
            hint=f"list what is not needed in {IGNORE_FILE}; the largest: {largest}",
        )
    buffer = io.BytesIO()
    with (
        gzip.GzipFile(fileobj=buffer, mode="wb", filename="", mtime=0) as compressed,
        tarfile.open(fileobj=compressed, mode="w", format=tarfile.PAX_FORMAT) as archive,
    ):
        for name, path in entries:
            _add(archive, name, path, root)
    return buffer.getvalue()


def digest(package: bytes) -> str:
    """The content address of a package: ``sha256:<hex>``."""
    return f"sha256:{hashlib.sha256(package).hexdigest()}"


def _rules(root: Path) -> list[_Rule]:
    lines = list(_ALWAYS)
    if (file := root / IGNORE_FILE).is_file():
        try:
            lines += file.read_text(encoding="utf-8-sig").splitlines()
        except (OSError, UnicodeDecodeError) as exc:
            raise Invalid(f"{file} cannot be read: {exc}") from exc
    stripped = (line.strip() for line in lines)
    return [_Rule.parse(line) for line in stripped if line.strip("!/") and not line.startswith("#")]


def _entries(directory: Path, root: Path, rules: list[_Rule]) -> Iterator[tuple[str, Path]]:
    """Every file and link to keep, with its name in the archive. A directory left out is not entered."""
    with os.scandir(directory) as listing:
        for entry in listing:
            path = Path(entry.path)
            name = PurePosixPath(path.relative_to(root).as_posix())
            is_directory = entry.is_dir(follow_symlinks=False)
            verdict = [rule.keep for rule in rules if rule.matches(name, is_directory)]
            if verdict and not verdict[-1]:
                continue
            if is_directory:
                yield from _entries(path, root, rules)
            else:
                yield str(name), path


def _add(archive: tarfile.TarFile, name: str, path: Path, root: Path) -> None:
    info = tarfile.TarInfo(name)
    mode = path.lstat().st_mode
    if stat.S_ISLNK(mode):
        target = path.resolve()
        if not target.is_relative_to(root) or not target.exists():
            reason = "leaves the project" if target.exists() else "points to nothing"
            raise Invalid(
                f"the link {name} {reason}: {os.readlink(path)}",
                hint=f"copy the file, or add {name} to {IGNORE_FILE}",
            )
        info.type, info.mode = tarfile.SYMTYPE, 0o777
        info.linkname = Path(os.path.relpath(target, path.parent.resolve())).as_posix()
        archive.addfile(info)
    elif stat.S_ISREG(mode):
        content = path.read_bytes()
        info.size, info.mode = len(content), 0o755 if mode & 0o100 else 0o644
        archive.addfile(info, io.BytesIO(content))
    else:
        raise Invalid(f"{name} is neither a file nor a link", hint=f"remove it, or add it to {IGNORE_FILE}")


def _mebibytes(size: int) -> str:
    return f"{size / 1024 / 1024:.1f} MiB"
