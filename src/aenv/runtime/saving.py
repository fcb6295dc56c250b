"""Where an environment is, as bytes that another sandbox can go on from: an archive of the files that this one may
write, and first in it what the author says.

A sandbox whose root cannot be written has nothing else that it could have changed. Any other is told so, and not saved.
"""

from __future__ import annotations

import errno
import io
import os
import re
import stat
import tarfile
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from itertools import islice
from pathlib import Path
from typing import Any

import msgspec
from msgspec import Struct

from aenv.errors import Invalid, StorageFull, TooLarge, Unsupported
from aenv.runtime.context import printable
from aenv.runtime.conversations import Said as Told
from aenv.runtime.seeds import Drawn

_SAID = "said"
"""The name in the archive of what the author says. Files have absolute names in it, without their first slash."""
_END = "end"
"""The name of the last: an archive without it is not whole."""
_MORE = ("/dev/shm", "/var/tmp")  # noqa: S108
_ESCAPED = re.compile(rb"\\([0-7]{3})")
"""A byte of a path that the kernel's list of mounts cannot show as it is."""


class Said(Struct, frozen=True, kw_only=True):
    """What the author says, what the runtime knows, and of which places the files are."""

    places: list[str]
    seed: int | None
    drawn: Drawn
    value: msgspec.Raw = msgspec.Raw(b"null")
    data: bytes | None = None
    """It instead, where the author gave bytes."""
    conversations: list[Told] = []


def places(directory: Path) -> list[str]:
    """The directories that a sandbox with this work directory may write in, none of them within another."""
    if not os.statvfs("/").f_flag & os.ST_RDONLY:
        raise Unsupported(
            "its files are not apart from those of the machine", hint="'aenv doctor' tells what isolation needs"
        )
    found: list[str] = []
    for place in (str(directory), tempfile.gettempdir(), os.path.expanduser("~"), *_MORE):
        real = os.path.realpath(place)
        if os.path.isdir(real) and os.access(real, os.W_OK) and not os.statvfs(real).f_flag & os.ST_RDONLY:
            found.append(real)
    return sorted({one for one in found if not any(one != other and _is_within(one, other) for other in found)})


def _is_within(place: str, other: str) -> bool:
    return os.path.commonpath((place, other)) == other


class _Bounded(io.BytesIO):
    """Bytes up to a number of them."""

    def __init__(self, most: int) -> None:
        super().__init__()
        self._most = most

    def write(self, data: Any) -> int:
        if self.tell() + len(data) > self._most:
            raise TooLarge(f"its files are over {self._most} bytes", hint="AENV_MAX_BODY sets this limit")
        return super().write(data)


def pack(said: Said, most: int) -> bytes:
    """All that another sandbox needs."""
    held, path = _Bounded(most), ""
    try:
        with ExitStack() as closing, tarfile.open(fileobj=held, mode="w", format=tarfile.PAX_FORMAT) as archive:
            head = tarfile.TarInfo(_SAID)
            content = msgspec.json.encode(said)
            head.size = len(content)
            archive.addfile(head, io.BytesIO(content))
            mounts = _mounts()
            for place in said.places:
                for path, mode in _below(place, mounts):
                    with suppress(FileNotFoundError):  # it went meanwhile
                        _add(archive, path, mode, closing)
            archive.addfile(tarfile.TarInfo(_END))
    except OSError as exc:
        where = printable(str(exc.filename or path))
        raise Unsupported(f"{where} cannot be saved: {exc.strerror or exc}") from exc
    return held.getvalue()


def _mounts() -> frozenset[str]:
    """Where something is mounted. Within a place that is a volume, which outlives sandboxes and is no part of one."""
    lines = Path("/proc/self/mountinfo").read_bytes().splitlines()
    found = (_ESCAPED.sub(lambda byte: bytes((int(byte[1], 8),)), line.split(b" ")[4]) for line in lines)
    return frozenset(map(os.fsdecode, found))


def _below(place: str, mounts: frozenset[str]) -> Iterator[tuple[str, int]]:
    """The paths in a directory and their modes, each after the directory that it is in. Without sockets: nobody listens
    on a copy of one, and where a state is loaded somebody may listen."""
    waiting = [place]
    while waiting:
        directory = waiting.pop()
        with suppress(FileNotFoundError):  # it went meanwhile, as any below may
            for name in sorted(os.listdir(directory)):
                path = f"{directory}/{name}"
                with suppress(FileNotFoundError):
                    mode = os.lstat(path).st_mode
                    if path in mounts or stat.S_ISSOCK(mode):
                        continue
                    yield path, mode
                    if stat.S_ISDIR(mode):
                        waiting.append(path)


def _add(archive: tarfile.TarFile, path: str, mode: int, closing: ExitStack) -> None:
    if stat.S_ISCHR(mode) or stat.S_ISBLK(mode):
        raise Unsupported(f"{printable(path)} cannot be saved: it is a device")
    needed = {stat.S_IFDIR: os.R_OK | os.X_OK, stat.S_IFREG: os.R_OK}.get(stat.S_IFMT(mode))
    if needed and not os.access(path, needed):  # closed to its own owner, who may open it
        os.chmod(path, stat.S_IMODE(mode) | needed << 6)
        closing.callback(_close, path, stat.S_IMODE(mode))
    if stat.S_ISREG(mode):
        with open(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as file:
            member = archive.gettarinfo(arcname=path, fileobj=file)
            member.mode = stat.S_IMODE(mode)
            archive.addfile(member, file)
    else:
        member = archive.gettarinfo(path)
        member.mode = stat.S_IMODE(mode)
        archive.addfile(member)


def _close(path: str, mode: int) -> None:
    with suppress(FileNotFoundError):
        os.chmod(path, mode)


def unpack(directory: Path, content: bytes) -> Said:
    """Have the files that ``pack`` had, and no others, in the places that may be written. What was said then."""
    own = places(directory)
    try:
        with tarfile.open(fileobj=io.BytesIO(content), mode="r:") as archive:
            said = _said(archive)
            if own != said.places:
                raise Unsupported(f"it was saved with files in {', '.join(said.places)}, and has {', '.join(own)} here")
            members = list(_files(archive, own))
            mounts = _mounts()
            for place in own:
                _clear(place, mounts)
            archive.extractall("/", members, **_AS_IT_IS)  # noqa: S202 - each was looked at
    except (tarfile.TarError, ValueError, ArithmeticError, LookupError, RecursionError) as exc:  # as its reader raises
        raise Invalid(f"this is nothing that was saved: {exc}") from exc
    except OSError as exc:
        where = printable(str(exc.filename)) if exc.filename else "its files"
        kind = StorageFull if exc.errno in (errno.ENOSPC, errno.EDQUOT) else Unsupported
        raise kind(f"{where} cannot be written: {exc.strerror or exc}", hint="make another sandbox") from exc
    return said


_AS_IT_IS: dict[str, Any] = {"filter": "fully_trusted"} if hasattr(tarfile, "fully_trusted_filter") else {}
"""Who loads may write these files anyway, and what they are is the sandbox's own affair."""


def _said(archive: tarfile.TarFile) -> Said:
    first = archive.next()
    file = archive.extractfile(first) if first is not None and first.name == _SAID and first.isreg() else None
    if file is None:
        raise Invalid("this is nothing that was saved")
    try:
        return msgspec.json.decode(file.read(), type=Said)
    except msgspec.MsgspecError as exc:
        raise Invalid(f"this is nothing that was saved: {exc}") from exc


def _files(archive: tarfile.TarFile, own: list[str]) -> Iterator[tarfile.TarInfo]:
    """The files of an archive. One that is not as ``pack`` makes them is refused before anything is removed: each must
    be in a directory that came before it, so that no link leads elsewhere."""
    directories, files, seen = {place[1:] for place in own}, set[str](), set[str]()
    for member in islice(archive, 1, None):
        if member.name == _END:
            return
        parent, _, name = member.name.rpartition("/")
        where = printable(f"/{member.name}")
        if parent not in directories or name in ("", ".", "..") or "\0" in name or member.size < 0:
            raise Invalid(f"{where} is in none of the places that are saved")
        if member.name in seen:
            raise Invalid(f"{where} is there twice")
        seen.add(member.name)
        if member.isdir():
            directories.add(member.name)
        elif member.isreg():
            files.add(member.name)
        elif not (member.issym() or member.isfifo() or (member.islnk() and member.linkname in files)):
            raise Invalid(f"{where} is of no kind that is saved, or a link to what is not")
        yield member
    raise Invalid("this is nothing that was saved, or not all of it")


def _clear(place: str, mounts: frozenset[str]) -> None:
    """Remove what is in a directory, as far as it is saved."""
    directories = []
    for path, mode in _below(place, mounts):
        if stat.S_ISDIR(mode):
            with suppress(PermissionError):  # it may be closed to its own owner, or another's and open to everybody
                os.chmod(path, 0o700)
            directories.append(path)
        else:
            with suppress(FileNotFoundError):
                os.unlink(path)
    for path in reversed(directories):
        try:
            os.rmdir(path)
        except OSError as exc:
            if exc.errno not in (errno.ENOENT, errno.ENOTEMPTY):  # something is in it that is not saved
                raise
