"""What of a project a builder is given: as ``aenv.project.archive`` packs it, less what ``.dockerignore`` lists."""

from __future__ import annotations

import io
import os
import re
import stat
import tarfile
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import IO, NamedTuple

from aenv.errors import AEnvError, Invalid, TooLarge
from aenv.project.archive import MAX_FILES, MAX_SIZE
from aenv.project.leaving import IGNORE_FILE, entries, rules

DOCKER_IGNORE = ".dockerignore"
_BROUGHT = ".aenv.Dockerfile"
"""What a Dockerfile from outside of the context is called in it."""
_IN_MEMORY = 8 * 1024 * 1024
_WILD = re.compile(r"\*\*/|\*\*|\*|\?|\[\^?[^\]]+\]|\\.|.", re.DOTALL)


class Pattern(NamedTuple):
    """A line of ``.dockerignore``."""

    matcher: re.Pattern[str]
    keep: bool
    """``!pattern``: what an earlier line left out is in again."""

    @classmethod
    def parse(cls, line: str) -> Pattern | None:
        keep = line.startswith("!")
        text = line.removeprefix("!").strip()
        if not text or line.startswith("#"):
            return None
        text = os.path.normpath(text).lstrip("/")
        try:
            return cls(re.compile("".join(map(_expression, _WILD.findall(text))), re.DOTALL), keep)
        except re.error as exc:
            raise Invalid(f"{DOCKER_IGNORE} has a pattern that cannot be read: {line!r}") from exc

    def matches(self, name: str) -> bool:
        """Whether it means this path, or a directory above it."""
        parts = name.split("/")
        return any(self.matcher.fullmatch("/".join(parts[:depth])) for depth in range(len(parts), 0, -1))


def pack(context: Path, dockerfile: Path, other: Mapping[Path, bytes]) -> tuple[IO[bytes], str]:
    """The directory as a tar archive, open at its begin, and what the Dockerfile is called in it.

    Of a file in ``other``, that content is taken.
    """
    context, dockerfile = context.resolve(), dockerfile.resolve()
    inside = dockerfile.is_relative_to(context)
    name = dockerfile.relative_to(context).as_posix() if inside else _BROUGHT
    target = tempfile.SpooledTemporaryFile(_IN_MEMORY)  # noqa: SIM115
    try:
        with tarfile.open(fileobj=target, mode="w", format=tarfile.PAX_FORMAT) as archive:
            _fill(archive, context, {name: dockerfile}, other)
        target.seek(0)
    except BaseException as exc:
        target.close()
        if isinstance(exc, OSError):
            where = f"{exc.filename}: " if exc.filename else ""
            raise AEnvError(f"{context} cannot be packed: {where}{exc.strerror or exc}") from exc
        raise
    return target, name


def _fill(archive: tarfile.TarFile, root: Path, always: dict[str, Path], other: Mapping[Path, bytes]) -> None:
    found = {**dict(_kept(root)), **always}
    left = MAX_SIZE
    if len(found) > MAX_FILES:
        raise TooLarge(f"the project has more than {MAX_FILES} files", hint=f"list what is not needed in {IGNORE_FILE}")
    for name, path in sorted(found.items()):
        info = tarfile.TarInfo(name)
        mode = path.lstat().st_mode
        if stat.S_ISLNK(mode):
            info.type, info.linkname = tarfile.SYMTYPE, _led(path, name, root)
            archive.addfile(info)
        elif stat.S_ISREG(mode):
            with io.BytesIO(other[path]) if path in other else path.open("rb") as file:
                info.size, info.mode = file.seek(0, os.SEEK_END), 0o755 if mode & 0o100 else 0o644
                file.seek(0)
                left -= info.size
                if left < 0:
                    hint = f"list what is not needed in {IGNORE_FILE} or {DOCKER_IGNORE}"
                    raise TooLarge(f"with {name}, the project has more than {MAX_SIZE // 2**20} MiB", hint=hint)
                archive.addfile(info, file)
        else:
            raise Invalid(f"{name} is neither a file nor a link", hint=f"remove it, or add it to {IGNORE_FILE}")


def _kept(root: Path) -> Iterator[tuple[str, Path]]:
    patterns = _patterns(root)
    for name, path in entries(root, rules(root)):
        verdict = [pattern.keep for pattern in patterns if pattern.matches(name)]
        if not verdict or verdict[-1] or name == DOCKER_IGNORE:
            yield name, path


def _patterns(root: Path) -> list[Pattern]:
    file = root / DOCKER_IGNORE
    if not file.is_file():
        return []
    try:
        lines = file.read_text(encoding="utf-8-sig").splitlines()
    except UnicodeDecodeError as exc:
        raise Invalid(f"{file} cannot be read: {exc}") from exc
    return [found for line in lines if (found := Pattern.parse(line.strip()))]


def _led(path: Path, name: str, root: Path) -> str:
    """Where a link leads, which is in the project."""
    target = Path(os.path.realpath(path))
    if not target.is_relative_to(root) or not target.exists():
        reason = "leaves the project" if target.exists() else "points to nothing"
        raise Invalid(
            f"the link {name} {reason}: {path.readlink()}", hint=f"copy the file, or add {name} to {IGNORE_FILE}"
        )
    return Path(os.path.relpath(target, path.parent.resolve())).as_posix()


def _expression(piece: str) -> str:
    """A piece of a pattern as a regular expression, by Docker's rules: ``*`` stays within one name."""
    wild = {"**/": "(?:.*/)?", "**": ".*", "*": "[^/]*", "?": "[^/]"}
    if piece in wild:
        return wild[piece]
    if piece[0] == "[" and len(piece) > 1:
        return piece
    return re.escape(piece[-1])
