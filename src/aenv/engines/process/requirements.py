"""A project's ``requirements.txt``, and the one of packages that are to come alone: what they ask for, and whether this
interpreter has it already."""

from __future__ import annotations

import hashlib
import re
import shlex
import stat
import sys
from collections import deque
from collections.abc import Iterator
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple
from urllib.parse import unquote, urlsplit

from aenv.errors import Invalid, StartFailed

if TYPE_CHECKING:
    from packaging.requirements import Requirement

FILE = "requirements.txt"
ALONE_FILE = "requirements-no-deps.txt"
"""Packages that are installed without what they depend on. pip knows that as an option of a command, not of a file."""
FILES = (FILE, ALONE_FILE)
_LARGEST = 1024 * 1024
_OURS = ("aenvironment", "aenv")
"""Asked for or not, a sandbox runs the version that starts it."""
_OUTSIDE_ONLY = ("click", "packaging")
"""Dependencies of the command line and of engines, which a sandbox never imports."""
_SHORT = {"-r": "--requirement", "-c": "--constraint", "-e": "--editable", "-f": "--find-links", "-i": "--index-url"}
_FLAGS = ("--no-index", "--pre", "--prefer-binary", "--require-hashes")
_ARCHIVES = (".whl", ".zip", ".tar.gz", ".tgz", ".tar.bz2", ".tar.xz", ".tar")
_ADDRESS = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://|file:", re.ASCII)
_COMMENT = re.compile(r"(^|\s)#.*$")
_VARIABLE = re.compile(r"\$\{[A-Z0-9_]+\}")
_NAMED = re.compile(r"[\w.-]+\s*(\[[^\]]*\])?\s*@")
_PATH = re.compile(r"(?P<path>[^;\[\]]+?)(?P<extras>\[[^\]]*\])?\s*(?P<marker>;.*)?")

Stamp = tuple[int, int] | None


class Wanted(NamedTuple):
    """What a project asks for."""

    satisfied: bool
    """Whether this interpreter has all of it."""
    number: int = 0
    """How many packages it names."""
    lines: tuple[str, ...] = ()
    """For an installer: included files put in, local files by their full address, ourselves left out."""
    constraints: tuple[str, ...] = ()
    alone: tuple[str, ...] = ()
    """As ``lines``, of what is installed without its dependencies."""
    content: str = ""
    """What tells it from others: the lines as written, and the digests of local files."""
    hashed: bool = False
    """Whether the author gave hashes, so that nothing without one may be installed beside it."""


class _Address(NamedTuple):
    """A requirement that says where the package is."""

    target: str
    name: str
    """Empty when it cannot be told without opening the package."""
    extras: str
    marker: str
    options: str


_known: dict[tuple[Path, bool], tuple[dict[Path, Stamp], Wanted]] = {}


def remembered(root: Path, trusted: bool) -> Wanted | None:
    """What was read before, when no file that it came from has changed since."""
    stamps, wanted = _known.get((root, trusted), (None, None))
    if stamps is None or any(stamp(path) != seen for path, seen in stamps.items()):
        return None
    return wanted


def stamp(path: Path) -> Stamp:
    """What changes when a file does; nothing when it is not there."""
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_mtime_ns, found.st_size


def read(root: Path, trusted: bool) -> Wanted:
    """What the project asks for. ``Invalid``, with the line, for what can never be installed.

    Building a source package runs its code on this machine, so what is not ``trusted`` may only ask for wheels.
    """
    reader = _Reader(root.resolve(), trusted)
    if reader.blank():
        wanted = Wanted(satisfied=True)
    else:
        reader.files()
        wanted = reader.wanted()
    _known[root, trusted] = reader.stamps, wanted
    return wanted


@cache
def of_runtime() -> tuple[str, ...]:
    """What a sandbox needs beside the author's requirements: our own dependencies, less those of other parts."""
    from packaging.requirements import Requirement

    try:
        texts = metadata.requires("aenvironment") or ()
    except metadata.PackageNotFoundError as exc:
        raise StartFailed(
            "what a sandbox needs is not known, since aenvironment runs without being installed",
            hint="pip install -e . in the source tree of aenvironment",
        ) from exc
    needed = [one for one in map(Requirement, texts) if one.name not in _OUTSIDE_ONLY and _applies(one)]
    for one in needed:
        one.marker = None
    return tuple(map(str, needed))


def own_directories() -> list[str]:
    """Where this interpreter keeps installed packages, in the order it looks; not what a caller put on the path."""
    import site

    roots = [sys.prefix, sys.exec_prefix, sys.base_prefix, sys.base_exec_prefix]
    if site.ENABLE_USER_SITE:
        roots.append(site.getusersitepackages())
    return [entry for entry in sys.path if any(Path(entry).is_relative_to(root) for root in roots)]


class _Reader:
    """Goes through a project's requirement files, and gathers."""

    def __init__(self, root: Path, trusted: bool) -> None:
        self.root = root
        self.stamps: dict[Path, Stamp] = {}
        self._trusted = trusted
        self._lines: list[str] = []
        self._constraints: list[str] = []
        self._alone: list[str] | None = None
        """Of the file that is read now, when that is the one without dependencies."""
        self._content: list[str] = []
        self._asked: list[tuple[str, Requirement]] = []
        self._bounds: list[Requirement] = []
        self._number = 0
        self._hashed = False
        self._for_installer = False
        """Whether there is something that only an installer can judge."""

    def blank(self) -> bool:
        """Whether there is nothing to read. Most projects are like that, and need no parser."""
        lines = [line for name in FILES for line in self._own(name).splitlines()]
        return all(not line.strip() or line.lstrip().startswith("#") for line in lines)

    def files(self) -> None:
        """Go through the project's files."""
        for name in FILES:
            if self._own(name):
                self._alone = [] if name == ALONE_FILE else None
                self.file(self.root / name, name)

    def file(self, path: Path, shown: str, *, bounds: bool = False) -> None:
        for number, line in _logical(self._text(path, shown)):
            place = f"{shown}:{number}"
            if not self._trusted and _VARIABLE.search(line):
                raise Invalid(
                    f"{place}: {line} puts a variable of this machine into an address",
                    hint="write the address without it, or set it in the configuration of pip or uv",
                )
            if line.startswith("-"):
                for name, value in _options(line, place):
                    self._option(path, place, name, value, bounds)
            else:
                self._requirement(path, place, line, bounds)

    def wanted(self) -> Wanted:
        has_all = not self._for_installer and all(_has(asked) for _, asked in self._asked)
        if has_all and all(_within(bound) for bound in self._bounds):
            return Wanted(satisfied=True)
        self._check_pins()
        return Wanted(
            satisfied=False,
            number=self._number,
            lines=tuple(self._lines),
            constraints=tuple(self._constraints),
            alone=tuple(self._alone or ()),
            content="\n".join(self._content),
            hashed=self._hashed,
        )

    # Lines

    def _option(self, file: Path, place: str, name: str, value: str, bounds: bool) -> None:
        if name in ("--requirement", "--constraint"):
            if not _ADDRESS.match(value):
                path = self._inside(file.parent / value, value, place)
                if path not in self.stamps:  # twice, or in a circle, is once
                    self.file(path, str(path.relative_to(self.root)), bounds=bounds or name == "--constraint")
                return
            self._for_installer = True
        elif name == "--editable":
            # The venv outlives this copy of the project, and others share it: what is installed must be a copy.
            self._requirement(file, place, value, bounds)
            return
        elif name == "--find-links" and not _ADDRESS.match(value) and not Path(value).is_absolute():
            path = self._inside(self._beside(file, value), value, place)
            self._add(f"{name} {path.as_uri()}", f"{name} {value} {self._digest(path, deep=False)}")
            return
        elif name == "--no-binary" and not self._trusted:
            raise self._needs_building(f"{place}: {name} {value}")
        elif name == "--require-hashes":
            self._hashed = self._hashed or self._alone is None  # which installers conclude from the hashes themselves
            return
        line = f"{name} {value}".rstrip()
        self._add(line, line)

    def _requirement(self, file: Path, place: str, line: str, bounds: bool) -> None:
        from packaging.requirements import InvalidRequirement, Requirement

        text, dashes, options = line.partition(" --")
        options = dashes + options
        self._hashed = self._hashed or (options.startswith(" --hash") and self._alone is None)
        if _is_address(text):
            found = _PATH.fullmatch(text)
            target, extras, marker = (
                (found["path"].strip(), found["extras"], found["marker"]) if found else (text, "", "")
            )
            self._address(
                file, place, _Address(target, _wheel_name(target), extras or "", marker or "", options), bounds
            )
            return
        try:
            asked = Requirement(text)
        except InvalidRequirement as exc:
            raise Invalid(f"{place}: {text} cannot be read", hint="write name, or name>=1.0") from exc
        if normal(asked.name) in _OURS:
            self._of_ours(place, asked)
        elif not _applies(asked):
            return
        elif asked.url:
            extras = f"[{','.join(sorted(asked.extras))}]" if asked.extras else ""
            self._address(file, place, _Address(asked.url, asked.name, extras, "", options), bounds)
        else:
            self._add(f"{asked}{options}", f"{asked}{options}", bounds, counts=True)
            if bounds:
                self._bounds.append(asked)
            else:
                self._asked.append((place, asked))

    def _of_ours(self, place: str, asked: Requirement) -> None:
        """The version that runs is the one there is; but an extra of it stands for packages."""
        for extra in sorted(asked.extras):
            for needed in _of_extra("aenvironment", extra):
                needed.marker = None
                if normal(needed.name) in _OURS:
                    self._of_ours(place, needed)
                    continue
                self._add(str(needed), str(needed), counts=True)
                self._asked.append((place, needed))

    def _address(self, file: Path, place: str, asked: _Address, bounds: bool) -> None:
        """A file, a directory or a URL instead of a version."""
        if normal(asked.name) in _OURS:
            return
        self._for_installer = True
        is_remote = _ADDRESS.match(asked.target) and not asked.target.startswith("file:")
        written = unquote(urlsplit(asked.target).path) if asked.target.startswith("file:") else asked.target
        path = None if is_remote else self._inside(self._beside(file, written), written, place)
        is_wheel = urlsplit(asked.target).path.lower().endswith(".whl") and "+" not in urlsplit(asked.target).scheme
        if not is_wheel and not self._trusted:
            raise self._needs_building(f"{place}: {asked.target}")
        address = path.as_uri() if path else asked.target
        line = f"{asked.name}{asked.extras} @ {address}" if asked.name else f"{path or address}{asked.extras}"
        rest = f" {asked.marker}{asked.options}".rstrip()
        content = f"{asked.name}{asked.extras} {path.relative_to(self.root)} {self._digest(path)}" if path else line
        self._add(line + rest, content + rest, bounds, counts=True)

    def _add(self, line: str, content: str, bounds: bool = False, *, counts: bool = False) -> None:
        lines = self._lines if self._alone is None else self._alone
        (self._constraints if bounds else lines).append(line)
        self._content.append(f"{'' if self._alone is None else '--no-deps '}{'-c ' if bounds else ''}{content}")
        self._number += counts and not bounds

    def _needs_building(self, what: str) -> Invalid:
        return Invalid(
            f"{what} would be built on this machine, outside of any sandbox",
            hint=f"make a wheel of it (pip wheel --no-deps -w vendor ...), and name that in {FILE}: ./vendor/NAME.whl",
        )

    # Files

    def _beside(self, file: Path, value: str) -> Path:
        """A path as written: from the file that names it, else from the project's root."""
        near = file.parent / value
        return near if near.exists() else self.root / value

    def _inside(self, path: Path, shown: str, place: str) -> Path:
        found = path.resolve()
        if not found.is_relative_to(self.root):
            raise Invalid(
                f"{place}: {shown} is outside the project",
                hint="put it into the project, so that others have it too",
            )
        if not found.exists():
            raise Invalid(f"{place}: {shown} is not there", hint="correct the path, or add the file")
        return found

    def _own(self, name: str) -> str:
        """The text of a file of the project's; empty when it is not there."""
        if stamp(self.root / name) is None:
            self.stamps[self.root / name] = None
            return ""
        return self._text(self.root / name, name)

    def _text(self, path: Path, shown: str) -> str:
        self._inside(path, shown, FILE)
        try:
            found = path.stat()
            self.stamps[path] = found.st_mtime_ns, found.st_size
            if not stat.S_ISREG(found.st_mode) or found.st_size > _LARGEST:
                raise Invalid(f"{shown} is not a list of requirements", hint="write one requirement on a line")
            return path.read_text(encoding="utf-8-sig")
        except OSError as exc:
            raise Invalid(f"{shown} cannot be read: {exc.strerror or exc}") from exc
        except UnicodeDecodeError as exc:
            raise Invalid(f"{shown} is not text in UTF-8: {exc}", hint="save it as UTF-8") from exc

    def _digest(self, path: Path, *, deep: bool = True) -> str:
        if path.is_file():
            return self._digest_of_file(path)
        self.stamps[path] = stamp(path)
        digest = hashlib.sha256()
        for file in sorted(path.rglob("*") if deep else path.iterdir()):
            if {"__pycache__", ".git"} & set(file.relative_to(path).parts):
                continue
            if file.is_file():
                digest.update(f"{file.relative_to(path)}\0{self._digest_of_file(file)}\n".encode())
            elif deep:
                self.stamps[file] = stamp(file)
        return digest.hexdigest()

    def _digest_of_file(self, file: Path) -> str:
        self.stamps[file] = stamp(file)
        with file.open("rb") as opened:
            return hashlib.file_digest(opened, "sha256").hexdigest()

    def _check_pins(self) -> None:
        """Two demands that can never be met together are better said by us than by a resolver."""
        from packaging.requirements import Requirement

        needed = {normal(one.name): one for one in map(Requirement, of_runtime())}
        for place, asked in self._asked:
            ours = needed.get(normal(asked.name))
            for pin in asked.specifier if ours else ():
                exact = pin.operator in ("==", "===") and not pin.version.endswith(".*")
                if ours and exact and not ours.specifier.contains(pin.version, prereleases=True):
                    raise Invalid(
                        f"{place}: {asked} cannot be, since a sandbox needs {ours.name}{ours.specifier}",
                        hint=f"ask for {ours.name}{ours.specifier}",
                    )


def _logical(text: str) -> Iterator[tuple[int, str]]:
    """Lines without comments, each with its number, continued ones joined."""
    held, first = "", 0
    for number, line in enumerate([*text.splitlines(), ""], 1):
        first = first or number
        bare = _COMMENT.sub("", line).rstrip()
        if bare.endswith("\\"):
            held += bare[:-1]
            continue
        joined = " ".join((held + bare).split())
        if joined:
            yield first, joined
        held, first = "", 0


def _options(line: str, place: str) -> Iterator[tuple[str, str]]:
    """The options of a line, each by its long name."""
    try:
        words = deque(shlex.split(line))
    except ValueError as exc:
        raise Invalid(f"{place}: {line} cannot be read: {exc}", hint="close the quotation mark") from exc
    while words:
        word = words.popleft()
        if word[:2] in _SHORT:
            name, value = _SHORT[word[:2]], word[2:].removeprefix("=")
        else:
            name, _, value = word.partition("=")
        if not value and name not in _FLAGS:
            if not words:
                raise Invalid(f"{place}: {line} cannot be read: {word} says nothing", hint=f"write {name} VALUE")
            value = words.popleft()
        yield name, value


def _is_address(text: str) -> bool:
    """Whether a requirement is a path or a URL by itself."""
    path = text.partition("[")[0].partition(";")[0].strip()
    is_path = path.startswith(".") or "/" in path or path.lower().endswith(_ARCHIVES)
    return not _NAMED.match(text) and (is_path or _ADDRESS.match(text) is not None)


def normal(name: str) -> str:
    """A package's name as indexes compare it."""
    return re.sub(r"[-_.]+", "-", name).lower()


def _wheel_name(target: str) -> str:
    """The package of a wheel, by the name of its file; empty for anything else."""
    file = target.rpartition("/")[2]
    return file.partition("-")[0] if file.lower().endswith(".whl") and file.count("-") >= 4 else ""


def _applies(asked: Requirement) -> bool:
    return asked.marker is None or asked.marker.evaluate({"extra": ""})


def _of_extra(name: str, extra: str) -> Iterator[Requirement]:
    """What a package that is installed needs more for one of its extras."""
    from packaging.requirements import Requirement

    found = _installed(name)
    for text in (found.requires if found else None) or ():
        needed = Requirement(text)
        if not _applies(needed) and needed.marker and needed.marker.evaluate({"extra": extra}):
            yield needed


def _installed(name: str) -> metadata.Distribution | None:
    return next(iter(metadata.distributions(name=name, path=own_directories())), None)


def _has(asked: Requirement, seen: frozenset[str] = frozenset()) -> bool:
    """Whether this interpreter has what is asked, and everything of its extras."""
    found = _installed(asked.name)
    if found is None or asked.url or not asked.specifier.contains(found.version, prereleases=True):
        return False
    seen |= {str(asked)}
    return all(
        str(needed) in seen or _has(needed, seen)
        for extra in sorted(asked.extras)
        for needed in _of_extra(asked.name, extra)
    )


def _within(bound: Requirement) -> bool:
    """Whether what is installed keeps to a constraint."""
    found = _installed(bound.name)
    return found is None or (not bound.url and bound.specifier.contains(found.version, prereleases=True))
