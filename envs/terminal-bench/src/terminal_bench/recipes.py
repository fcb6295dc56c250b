"""A task's Dockerfile, as far as it can be followed in a system that is there already: files that are copied,
variables, directories, and commands that need nothing but what the system has."""

from __future__ import annotations

import json
import posixpath
import re
import shlex
from pathlib import Path
from typing import NamedTuple

_PLAIN = ("debian", "ubuntu", "python", "aenv-base")
"""Images that hold a usual system and nothing of a task's."""
_INSTALLERS = re.compile(r"\b(apt-get|apt|aptitude|apk|dnf|microdnf|yum|zypper|pacman)\b")
_SILENT = ("ARG", "CMD", "ENTRYPOINT", "EXPOSE", "HEALTHCHECK", "LABEL", "MAINTAINER", "STOPSIGNAL", "VOLUME")
"""What changes nothing that a command finds: ``ARG`` is read, and the others are for whoever starts a container."""
_ARCHIVES = (".tar", ".tgz", ".gz", ".bz2", ".xz", ".zip")
_VARIABLE = re.compile(r"\$(?:(\w+)|\{(\w+)(?::-([^}]*))?\})")


class NotPlain(Exception):
    """It takes an image: the message says why."""


class Copy(NamedTuple):
    """A file of the task's, and where it goes."""

    source: Path
    target: str
    mode: int | None


class Run(NamedTuple):
    """A command, where it runs, and its variables."""

    command: str | list[str]
    workdir: str
    variables: dict[str, str]
    line: int


class Recipe(NamedTuple):
    """What a Dockerfile comes to."""

    steps: list[Copy | Run | str]
    """In their order; a text is a directory that is made."""
    workdir: str
    variables: dict[str, str]


def recipe(directory: Path) -> Recipe:
    """What the Dockerfile in a directory comes to; ``NotPlain`` when only an image can be that."""
    for name in (".dockerignore", "docker-compose.yaml"):
        if (directory / name).exists():
            raise NotPlain(f"it has a {name}")
    if not (directory / "Dockerfile").is_file():
        raise NotPlain("it has no Dockerfile")
    reader = _Reader(directory)
    for line, word, rest in _instructions((directory / "Dockerfile").read_text()):
        try:
            reader.read(line, word, rest)
        except NotPlain as exc:
            raise NotPlain(f"line {line} of its Dockerfile: {exc}") from None
        except ValueError as exc:
            raise NotPlain(f"line {line} of its Dockerfile cannot be read: {exc}") from None
    return Recipe(reader.steps, reader.workdir, reader.variables)


def _instructions(text: str) -> list[tuple[int, str, str]]:
    """Each with the number of its first line: lines that end in a backslash go on, and comments are left out."""
    found: list[tuple[int, str, str]] = []
    parts: list[str] = []
    first = 0
    for number, line in enumerate(text.splitlines(), 1):
        if line.lstrip().startswith("#") or (not line.strip() and parts):
            continue
        first = first if parts else number
        parts.append(line.rstrip().removesuffix("\\"))
        if not line.rstrip().endswith("\\"):
            word, _, rest = " ".join(parts).strip().partition(" ")
            if word:
                found.append((first, word.upper(), rest.strip()))
            parts = []
    return found


class _Reader:
    """Goes through the instructions, one after the other."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._based = False
        self._arguments: dict[str, str] = {}
        self.steps: list[Copy | Run | str] = []
        self.workdir = "/"
        self.variables: dict[str, str] = {}

    def read(self, line: int, word: str, rest: str) -> None:
        match word:
            case "FROM":
                self._from(rest)
            case "WORKDIR":
                self.workdir = self._at(self._filled(shlex.split(rest)[0]))
                self.steps.append(self.workdir)
            case "ENV":
                self.variables |= self._pairs(rest)
            case "COPY" | "ADD":
                self._copy(rest, adds=word == "ADD")
            case "RUN":
                self._run(line, rest)
            case "USER" if self._filled(rest).partition(":")[0] not in ("root", "0"):
                raise NotPlain(f"USER {rest} is a user of the image's")
            case "USER":
                pass
            case "ARG":
                name, _, value = rest.partition("=")
                self._arguments[name] = self._filled(value.strip("\"'"))
            case _ if word not in _SILENT:
                raise NotPlain(f"{word} needs an image")

    def _from(self, rest: str) -> None:
        words = [word for word in self._filled(rest).split() if not word.startswith("--")]
        name = words[0].partition("@")[0].rpartition("/")[2].partition(":")[0]
        if self._based:
            raise NotPlain("it has several stages")
        if name not in _PLAIN:
            raise NotPlain(f"{words[0]} is not a plain system: {', '.join(_PLAIN)}")
        self._based = True

    def _pairs(self, rest: str) -> dict[str, str]:
        first = rest.split(None, 1)
        if "=" not in first[0]:
            return {first[0]: self._filled(first[1])}
        pairs = (part.partition("=") for part in shlex.split(rest))
        return {name: self._filled(value) for name, _, value in pairs}

    def _copy(self, rest: str, *, adds: bool) -> None:
        words = json.loads(rest) if rest.startswith("[") else shlex.split(rest)
        flags = [word for word in words if word.startswith("--")]
        *sources, target = (self._filled(word) for word in words if not word.startswith("--"))
        mode: int | None = None
        for flag in flags:
            name, _, value = flag.partition("=")
            if name == "--chmod":
                mode = int(value, 8)
            elif name not in ("--chown", "--link"):  # all files are of the one user that there is
                raise NotPlain(f"{flag} needs an image")
        several = len(sources) > 1 or target.endswith(("/", "/.")) or target == "."
        for source in sources:
            if adds and ("://" in source or source.endswith(_ARCHIVES)):
                raise NotPlain(f"ADD {source} fetches or unpacks")
            for path in self._sources(source):
                self._copied(path, self._at(target), mode, inside=several)

    def _sources(self, source: str) -> list[Path]:
        relative = _relative(source)
        found = sorted(self._directory.glob(relative)) if relative != "." else [self._directory]
        if not found or any(not path.resolve().is_relative_to(self._directory.resolve()) for path in found):
            raise NotPlain(f"{source} is not among its files")
        return found

    def _copied(self, path: Path, target: str, mode: int | None, *, inside: bool) -> None:
        if path.is_dir():
            self.steps.append(target)
            for child in sorted(path.rglob("*")):
                place = posixpath.join(target, child.relative_to(path).as_posix())
                self.steps.append(place if child.is_dir() else Copy(child, place, mode))
        else:
            self.steps.append(Copy(path, posixpath.join(target, path.name) if inside else target, mode))

    def _run(self, line: int, rest: str) -> None:
        if rest.startswith(("<<", "--")):
            raise NotPlain("RUN with options or with text of its own needs a builder")
        if found := _INSTALLERS.search(rest):
            raise NotPlain(f"RUN installs by {found[0]}")
        command = json.loads(rest) if rest.startswith("[") else rest
        self.steps.append(Run(command, self.workdir, self._arguments | self.variables, line))

    def _at(self, path: str) -> str:
        return posixpath.normpath(posixpath.join(self.workdir, path))

    def _filled(self, text: str) -> str:
        known = self._arguments | self.variables
        return _VARIABLE.sub(lambda found: known.get(found[1] or found[2]) or found[3] or "", text)


def _relative(source: str) -> str:
    return posixpath.normpath(source.lstrip("/")) or "."
