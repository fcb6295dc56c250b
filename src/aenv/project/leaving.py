"""What of a project's directory is left out when it is packed or copied."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from fnmatch import fnmatchcase
from pathlib import Path, PurePosixPath
from typing import NamedTuple

from aenv.errors import Invalid

IGNORE_FILE = ".aenvignore"


class Rule(NamedTuple):
    """A line of ``.aenvignore``."""

    pattern: str
    keep: bool
    """``!pattern``: what an earlier line left out is in again."""
    directories_only: bool
    anchored: bool

    @classmethod
    def parse(cls, line: str) -> Rule:
        keep = line.startswith("!")
        body = line.removeprefix("!")
        pattern = body.strip("/")
        return cls(pattern, keep, body.endswith("/"), "/" in body.rstrip("/"))

    def matches(self, path: PurePosixPath, is_directory: bool) -> bool:
        if self.directories_only and not is_directory:
            return False
        return fnmatchcase(str(path) if self.anchored else path.name, self.pattern)


ALWAYS = tuple(
    Rule.parse(line)
    for line in (".git", ".hg", ".venv", "venv/", "__pycache__", "*.pyc", ".env", ".env.*", ".DS_Store", "*_cache/")
)
"""Version control, virtual environments, caches and ``.env`` files."""
SECRETS = tuple(
    Rule.parse(line)
    for line in (
        *("*.env", ".envrc", ".netrc", ".npmrc", ".pypirc", ".git-credentials"),
        *(".ssh/", ".aws/", ".kube/", "id_rsa", "id_ecdsa", "id_ed25519"),
    )
)
"""Where tools keep what lets their user in elsewhere. ``!name`` in the project's own file takes one along."""


def rules(root: Path) -> list[Rule]:
    """What is always left out, and what the project's own ``.aenvignore`` says."""
    lines: list[str] = []
    if (file := root / IGNORE_FILE).is_file():
        try:
            lines += file.read_text(encoding="utf-8-sig").splitlines()
        except (OSError, UnicodeDecodeError) as exc:
            raise Invalid(f"{file} cannot be read: {exc}") from exc
    stripped = (line.strip() for line in lines)
    own = (Rule.parse(line) for line in stripped if line.strip("!/") and not line.startswith("#"))
    return [*ALWAYS, *SECRETS, *own]


def leaves_out(rules: Sequence[Rule], name: PurePosixPath, is_directory: bool) -> bool:
    """Whether what has that name below the project's root is left out. The last rule that matches decides."""
    verdict = [rule.keep for rule in rules if rule.matches(name, is_directory)]
    return bool(verdict) and not verdict[-1] and str(name) != IGNORE_FILE


def entries(root: Path, rules: Sequence[Rule], directory: Path | None = None) -> Iterator[tuple[str, Path]]:
    """Every file and link to keep, with its name below ``root``. A directory left out is not entered."""
    with os.scandir(directory or root) as listing:
        for entry in listing:
            path = Path(entry.path)
            name = PurePosixPath(path.relative_to(root).as_posix())
            is_directory = entry.is_dir(follow_symlinks=False)
            if leaves_out(rules, name, is_directory):
                continue
            if is_directory:
                yield from entries(root, rules, path)
            else:
                yield str(name), path
