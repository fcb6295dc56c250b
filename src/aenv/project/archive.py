"""A project as one archive: the same files give the same bytes, and what is private stays out.

``unpack`` takes what anybody sends. Whatever it refuses, ``pack`` does not make.
"""

from __future__ import annotations

import gzip
import hashlib
import io
import os
import posixpath
import re
import stat
import tarfile
import tempfile
import unicodedata
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

from aenv.errors import AEnvError, Conflict, Invalid, InvalidConfig, TooLarge
from aenv.project import CONFIG, Project, read
from aenv.project.leaving import IGNORE_FILE, entries, rules

MAX_SIZE = 256 * 1024 * 1024
"""Most bytes the files of a project may have together."""
MAX_FILES = 20_000
"""Most files, links and directories a project may have."""
MAX_CONFIG = 1024 * 1024
"""Most bytes of ``config.json``, which is read as a whole."""
_PATH, _PART, _DEPTH = 1024, 255, 64
"""Most bytes of a path, bytes of a name in it, and names in it."""
_PAX = 8 * 1024
"""Most bytes of the PAX records of one entry."""
_PIECE = 64 * 1024
"""Most bytes that are read at once, and that may follow the end of the archive as padding."""


def pack(project: Project, *, limit: int = MAX_SIZE, most_files: int = MAX_FILES) -> bytes:
    """The project as ``tar.gz``: entries sorted, no times, no owners.

    Left out: version control, virtual environments, caches, ``.env`` files and what ``.aenvignore`` lists
    (globs as in ``.gitignore``: ``*.log``, ``data/``, ``/top.txt``, ``!keep.log``). That file itself is always in, so
    that a project which was unpacked gives the same archive again.
    """
    root = project.root.resolve()
    found = sorted(entries(root, rules(root)), key=lambda entry: entry[0])
    sizes = [(path.stat().st_size, name) for name, path in found if not path.is_symlink()]
    if (total := sum(size for size, _ in sizes)) > limit:
        largest = ", ".join(f"{name} ({_mebibytes(size)})" for size, name in sorted(sizes, reverse=True)[:3])
        raise TooLarge(
            f"the project has {_mebibytes(total)} of files; {_mebibytes(limit)} is the most",
            hint=f"list what is not needed in {IGNORE_FILE}; the largest: {largest}",
        )
    if CONFIG not in dict(found):
        raise Invalid(f"the archive would have no {CONFIG}", hint=f"look whether {IGNORE_FILE} lists it")
    _check_config(root)
    tree = _Tree(most_files)
    buffer = io.BytesIO()
    with (
        gzip.GzipFile(fileobj=buffer, mode="wb", filename="", mtime=0) as compressed,
        tarfile.open(fileobj=compressed, mode="w", format=tarfile.PAX_FORMAT) as archive,
    ):
        for name, path in found:
            _add(archive, tree, name, path, root)
    tree.check_links()
    return buffer.getvalue()


def unpack(data: bytes | BinaryIO, target: Path, *, limit: int = MAX_SIZE, most_files: int = MAX_FILES) -> None:
    """Make the directory ``target`` of an archive, whoever sent it: all of it in one step, or nothing.

    ``Invalid`` or ``TooLarge`` says which entry is refused, and why. The directory must not be there, and the one
    above it must. Files get the modes 0644 or 0755. It takes little memory, whatever the archive says of itself.
    """
    if os.path.lexists(target):
        raise Conflict(f"{target} is there already")
    raw = _Inflated(
        io.BytesIO(data) if isinstance(data, bytes) else data,
        limit + most_files * (_PAX + 4 * tarfile.BLOCKSIZE) + 2 * _PIECE,
    )
    try:
        with tempfile.TemporaryDirectory(prefix=".unpack-", dir=target.parent) as folder:
            made = Path(folder, "project")
            _extract(io.BufferedReader(raw, _PIECE), made, limit, _Tree(most_files))
            if raw.followed():
                raise Invalid("something follows the end of the archive")
            _check_config(made)
            made.rename(target)
    except OSError as exc:
        if os.path.lexists(target):
            raise Conflict(f"{target} is there already") from exc
        raise AEnvError(f"{target} cannot be written: {exc.strerror or exc}") from exc


def digest(package: bytes) -> str:
    """The content address of a package: ``sha256:<hex>``."""
    return f"sha256:{hashlib.sha256(package).hexdigest()}"


def _add(archive: tarfile.TarFile, tree: _Tree, name: str, path: Path, root: Path) -> None:
    info = tarfile.TarInfo(name)
    mode = path.lstat().st_mode
    if stat.S_ISLNK(mode):
        target = Path(os.path.realpath(path))
        if not target.is_relative_to(root) or not target.exists():
            reason = "leaves the project" if target.exists() else "points to nothing"
            raise Invalid(
                f"the link {name} {reason}: {os.readlink(path)}",
                hint=f"copy the file, or add {name} to {IGNORE_FILE}",
            )
        info.type, info.mode = tarfile.SYMTYPE, 0o777
        info.linkname = Path(os.path.relpath(target, path.parent.resolve())).as_posix()
        tree.add(name, "link", info.linkname)
        archive.addfile(info)
    elif stat.S_ISREG(mode):
        tree.add(name, "file")
        content = path.read_bytes()
        info.size, info.mode = len(content), 0o755 if mode & 0o100 else 0o644
        archive.addfile(info, io.BytesIO(content))
    else:
        raise Invalid(f"{name} is neither a file nor a link", hint=f"remove it, or add it to {IGNORE_FILE}")


def _check_config(root: Path) -> None:
    """That there is a ``config.json``, of a size at which it can be read, and that it reads."""
    file = root / CONFIG
    if not file.is_file():
        raise Invalid(f"the archive has no {CONFIG}")
    if (size := file.stat().st_size) > MAX_CONFIG:
        raise TooLarge(f"{CONFIG} has {_mebibytes(size)}; {_mebibytes(MAX_CONFIG)} is the most")
    try:
        read(root)
    except InvalidConfig as exc:
        inside = re.escape(f"{root.parent.name}/{root.name}/{CONFIG}")
        raise InvalidConfig(re.sub(f"(?m)^.*?{inside}", CONFIG, exc.message), hint=exc.hint) from exc


class _Inflated(io.RawIOBase):
    """What one gzip stream holds."""

    def __init__(self, source: BinaryIO, most: int) -> None:
        self._source = source
        self._left = most
        """Bytes that may still be read: a stream can be endless and hold nothing."""
        self._inflate = zlib.decompressobj(wbits=31)

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while not self._inflate.eof:
            compressed = self._inflate.unconsumed_tail or self._compressed()
            try:
                piece = self._inflate.decompress(compressed, len(buffer))
            except zlib.error as exc:
                raise Invalid(f"the archive is not gzip, or damaged: {exc}") from exc
            if piece:
                buffer[: len(piece)] = piece
                return len(piece)
        return 0

    def followed(self) -> bool:
        """Whether anything comes after the end of the stream."""
        return bool(self._inflate.unused_data or self._read(1))

    def _compressed(self) -> bytes:
        found = self._read(_PIECE)
        if not found:
            raise Invalid("the archive is truncated")
        self._left -= len(found)
        if self._left < 0:
            raise TooLarge("the archive is larger than all that it may hold")
        return found

    def _read(self, size: int) -> bytes:
        try:
            return self._source.read(size)
        except OSError as exc:
            raise AEnvError(f"the archive cannot be read: {exc.strerror or exc}") from exc


@dataclass(slots=True)
class _Node:
    name: str
    kind: str
    """``file``, ``link`` or ``directory``."""
    listed: bool
    """Whether it has an entry of its own; a directory need not."""
    children: dict[str, _Node] = field(default_factory=dict)


class _Tree:
    """The paths in an archive. Each is one place on every file system, and below directories only."""

    def __init__(self, most: int) -> None:
        self._links: list[tuple[bytes, bytes]] = []
        """Paths and targets, encoded: as text, some take four times as much."""
        self._root = _Node("", "directory", True)
        self._most = self._left = most

    def add(self, path: str, kind: str, target: str = "") -> None:
        if fault := _fault(path):
            raise Invalid(f"the entry {_shown(path)} {fault}")
        parts = path.split("/")
        node = self._root
        for depth, part in enumerate(parts, 1):
            last = depth == len(parts)
            found = node.children.get(key := _folded(part))
            if found is None:
                self._left -= 1
                if self._left < 0:
                    raise TooLarge(f"the entry {_shown(path)} is one too many; {self._most} is the most")
                found = node.children[key] = _Node(part, kind if last else "directory", last)
            elif found.name != part:
                other = "/".join([*parts[: depth - 1], found.name])
                raise Invalid(f"the entry {_shown(path)} and {_shown(other)} are one path on some file systems")
            elif last and (found.listed or kind != "directory"):
                raise Invalid(f"the entry {_shown(path)} is there twice")
            elif not last and found.kind != "directory":
                raise Invalid(f"the entry {_shown(path)} is below a {found.kind}")
            else:
                found.listed = found.listed or last
            node = found
        if kind == "link":
            encoded = target.encode(errors="surrogateescape")
            if len(encoded) > _PATH:
                raise Invalid(f"the link {_shown(path)} has a target that is too long")
            self._links.append((path.encode(), encoded))

    def links(self) -> Iterator[tuple[str, str]]:
        """Each link and its target."""
        for path, target in self._links:
            yield path.decode(), target.decode(errors="surrogateescape")

    def check_links(self) -> None:
        """That each leads, by real directories, to a file or directory of the archive."""
        for path, target in self.links():
            if fault := self._astray(path, target):
                raise Invalid(f"the link {_shown(path)} {fault}: {_shown(target)}")

    def _astray(self, path: str, target: str) -> str | None:
        above = posixpath.dirname(path)
        if target.startswith("/"):
            return "is absolute"
        if posixpath.normpath(posixpath.join(above, target)).split("/")[0] == "..":
            return "leaves the project"
        parts = [] if target == "." else target.split("/")
        ups = next((place for place, part in enumerate(parts) if part != ".."), len(parts))
        if not {"", ".", ".."}.isdisjoint(parts[ups:]):
            return "is not written plainly"
        start = above.split("/") if above else []
        node: _Node | None = self._root
        for part in start[: len(start) - ups] + parts[ups:]:
            node = node.children.get(_folded(part)) if node else None
            if node is None or node.name != part:
                return "points to nothing in the archive"
            if node.kind == "link":
                return "leads to another link"
        return None


def _fault(path: str) -> str | None:
    """What is wrong with the path of an entry, if anything is."""
    parts = path.split("/")
    try:
        longest, whole = max(len(part.encode()) for part in parts), len(path.encode())
    except UnicodeEncodeError:
        return "is not UTF-8"
    if re.search(r"[\x00-\x1f\x7f-\x9f]", path):
        return "has a control character in its name"
    if "\\" in path:
        return "has a backslash in its name"
    if path.startswith("/") or re.match("[A-Za-z]:", path):
        return "is an absolute path"
    if ".." in parts:
        return "leaves the project"
    if not {"", "."}.isdisjoint(parts):
        return "is not written plainly"
    return "has a name that is too long" if whole > _PATH or longest > _PART or len(parts) > _DEPTH else None


def _folded(name: str) -> str:
    """The same for names that a file system may take for one."""
    return unicodedata.normalize("NFD", unicodedata.normalize("NFD", name).casefold())


_KINDS = {
    tarfile.REGTYPE: "file",
    tarfile.AREGTYPE: "file",
    tarfile.SYMTYPE: "link",
    tarfile.DIRTYPE: "directory",
}
_REFUSED = {
    tarfile.LNKTYPE: "a hard link",
    tarfile.CHRTYPE: "a device",
    tarfile.BLKTYPE: "a device",
    tarfile.FIFOTYPE: "a pipe",
    tarfile.GNUTYPE_SPARSE: "a sparse file",
}
_KEYWORDS = {
    "GNU.sparse": "is a sparse file",
    "hdrcharset": "is not UTF-8",
    "size": "has a second size in its PAX header",
}
"""PAX records that change what an entry is. Others, such as times, are passed over."""


def _extract(stream: BinaryIO, root: Path, limit: int, tree: _Tree) -> None:
    """Write what an archive holds. Links come last, so nothing is ever written through one."""
    root.mkdir()
    left = limit
    for info in _headers(stream):
        tree.add(info.name, _KINDS[info.type], info.linkname)
        path = root / info.name
        folder = path if info.isdir() else path.parent
        folder.mkdir(parents=True, exist_ok=True)
        if info.isreg():
            with path.open("xb") as file:
                for piece in _content(stream, info.size):
                    left -= len(piece)
                    if left < 0:
                        raise TooLarge(
                            f"with the entry {_shown(info.name)}, the files have more than {_mebibytes(limit)}"
                        )
                    file.write(piece)
            path.chmod(0o755 if info.mode & 0o100 else 0o644)
    for directory, _, _ in os.walk(root):
        Path(directory).chmod(0o755)
    tree.check_links()
    for name, target in tree.links():
        (root / name).symlink_to(target)


def _headers(stream: BinaryIO) -> Iterator[tarfile.TarInfo]:
    """The entries, each checked but for its path. Its content is to be read before the next one."""
    records: dict[str, str] = {}
    last = "its start"
    while any(block := _exactly(stream, tarfile.BLOCKSIZE)):
        try:
            info = tarfile.TarInfo.frombuf(block, "utf-8", "surrogateescape")
        except tarfile.HeaderError as exc:
            raise Invalid(f"the archive is damaged after {last}: {exc}") from exc
        if info.type == tarfile.XHDTYPE and not records:
            if not 0 < info.size <= _PAX:
                raise TooLarge(f"the PAX header after {last} has {info.size} bytes, not 1 to {_PAX}")
            records = _records(b"".join(_content(stream, info.size)), last)
            continue
        info.name = records.get("path", info.name)
        info.linkname = records.get("linkpath", info.linkname)
        if info.isdir():
            info.name = info.name.removesuffix("/")
        last = _shown(info.name)
        if info.type not in _KINDS:
            kind = _REFUSED.get(info.type, f"of a kind that no project has ({info.type!r})")
            raise Invalid(f"the entry {last} is {kind}")
        for keyword in records:
            if fault := _KEYWORDS.get("GNU.sparse" if keyword.startswith("GNU.sparse") else keyword):
                raise Invalid(f"the entry {last} {fault}")
        if info.size < 0 or (info.size and not info.isreg()):
            raise Invalid(f"the entry {last} cannot have {info.size} bytes")
        records = {}
        yield info
    padding = stream.read(_PIECE + 1)
    if len(padding) < tarfile.BLOCKSIZE:
        raise Invalid("the archive is truncated")
    if records or any(padding) or len(padding) > _PIECE:
        raise Invalid("something follows the end of the archive")


def _content(stream: BinaryIO, size: int) -> Iterator[bytes]:
    """So many bytes in pieces. What fills the last block is passed over."""
    for start in range(0, size, _PIECE):
        yield _exactly(stream, min(_PIECE, size - start))
    _exactly(stream, -size % tarfile.BLOCKSIZE)


def _exactly(stream: BinaryIO, size: int) -> bytes:
    found = stream.read(size)
    if len(found) < size:
        raise Invalid("the archive is truncated")
    return found


def _records(data: bytes, last: str) -> dict[str, str]:
    """PAX records, each ``<length> <keyword>=<value>`` and the end of a line."""
    found = {}
    while data:
        match = re.match(rb"([1-9]\d{0,4}) ([^=]+)=", data)
        end = int(match[1]) if match else 0
        if match is None or not match.end() < end <= len(data) or data[end - 1 : end] != b"\n":
            raise Invalid(f"the PAX header after {last} is damaged")
        found[match[2].decode(errors="surrogateescape")] = data[match.end() : end - 1].decode(errors="surrogateescape")
        data = data[end:]
    return found


def _shown(name: str) -> str:
    """A name that anybody may have chosen, fit for a message."""
    return repr(name if len(name) <= 100 else f"{name[:100]}...")


def _mebibytes(size: int) -> str:
    return f"{size / 1024 / 1024:.1f} MiB"
