"""Storage that outlives sandboxes: an image for each volume below the home, locked for as long as a sandbox has it.

``<home>/volumes/<owner>/<name>`` holds ``image``, ``volume.json`` and ``lock``. The lock ends with the spawner that
holds it, and the image's loop device with the last process of the sandbox: only when both are gone is it mounted again.
"""

from __future__ import annotations

import asyncio
import errno
import fcntl
import json
import os
import shutil
import struct
import subprocess
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from itertools import pairwise
from pathlib import Path
from typing import Any
from urllib.parse import quote, unquote

from aenv import config
from aenv.cleanup import finish
from aenv.engines.process import loops
from aenv.errors import AEnvError, Conflict, Invalid, StartFailed, StorageFull, Unsupported

MOST = 8
"""Volumes of one sandbox."""
LEAST, LARGEST = 1024 * 1024, 8 * 1024**4
"""Bytes of the smallest volume, and of the largest: the tables of a file system are written whatever is in it."""
NARROW, MOST_NARROW = 1 / 16, 16 * 1024**2
"""A volume is called full when less of it is free than this part, or these bytes: a large write fails as a whole."""
_EXTENDED = f"root_owner={loops.OWNER}:{loops.OWNER},lazy_itable_init=1,lazy_journal_init=1,nodiscard"
_OPTIONS = ("-b", "4096", "-J", "size=4", "-m", "0", "-E", _EXTENDED)
_JOURNALED = 8 * 1024**2
"""Bytes from which on a file system has a journal."""
_LONGEST = 200
"""Characters of an owner or a name, as written in a path."""
_LOST_AND_FOUND = 16 * 1024
"""Bytes of the directory that every new file system has."""
_GONE = 20.0
"""Seconds in which what held an image must let go of it, once it has ended."""
_MAKING = 600.0
"""Seconds that the tools of the file system may take."""
_OWN = ("/project", "/tmp", "/home/sandbox")  # noqa: S108
"""Where a sandbox may write, and a directory for a volume can be made when it starts."""
_RESERVED = ("/proc", "/sys", "/dev", "/etc", "/stage", "/runtime", "/venv", "/datasource", "/run", "/usr", "/bin")
_MORE_RESERVED = ("/sbin", "/lib", "/lib32", "/lib64", "/libx32")


class Held:
    """A volume that a sandbox has, or is about to have."""

    def __init__(self, volume: dict[str, Any], path: Path, holder: str, leaving: Callable[[], bool]) -> None:
        self.owner: str = volume["owner"]
        self.name: str = volume["name"]
        self.mount: str = volume["mount"]
        self.size: int = volume["size"]
        self.path = path
        self.holder = holder
        self.leaving = leaving
        """Whether the sandbox is about to give it back."""
        self.released = asyncio.Event()
        self.lock = -1
        self.mounted = -1
        """A descriptor of the mount, for as long as a sandbox has it."""

    @property
    def image(self) -> Path:
        return self.path / "image"

    @property
    def full(self) -> str:
        """That it is full, in words; nothing while it is not."""
        if self.mounted < 0:
            return ""
        found = os.fstatvfs(self.mounted)
        left, whole = found.f_bavail * found.f_frsize, found.f_blocks * found.f_frsize
        if left < min(whole * NARROW, MOST_NARROW):
            return f"its volume {self.name!r} of {self.size / 1024**2:g} MiB is full: {left / 1024**2:.1f} MiB are left"
        if not found.f_favail:
            return f"its volume {self.name!r} is full: it holds {found.f_files} files, which is its most"
        return ""


class Volumes:
    """The volumes of one home, as one spawner uses them."""

    def __init__(self, *, why_not: str = "") -> None:
        """``why_not``: why this spawner's sandboxes can have none."""
        self._why_not = why_not
        self._root = Path(os.path.realpath(config.home())) / "volumes"
        self._held: dict[Path, Held] = {}

    # For a sandbox

    async def take(
        self, wanted: Iterable[dict[str, Any]], holder: str, leaving: Callable[[], bool], into: list[Held]
    ) -> None:
        """Lock those volumes for a sandbox, and make what is not there. They are in ``into`` as soon as they are its
        own to release. One that a sandbox has which ends is waited for; another is a ``Conflict``."""
        self._able()
        found = [(self._place(volume["owner"], volume["name"]), volume) for volume in wanted]
        for path, volume in sorted(found, key=lambda pair: pair[0]):  # in one order, so that no two wait for each other
            await self._reserve(path)
            held = self._held[path] = Held(volume, path, holder, leaving)
            into.append(held)
            await finish(asyncio.to_thread(lock, held))
            await _let_go(held.image)
            await finish(asyncio.to_thread(_make, held))

    async def mount(self, held: Iterable[Held], user: int) -> list[int]:
        """Descriptors of the mounts, in that order, to be given to a process whose user of this machine is ``user``."""
        given: list[int] = []
        try:
            for one in held:
                if one.mounted >= 0:  # of a process that came to nothing
                    os.close(one.mounted)
                    one.mounted = -1
                    await _let_go(one.image)
                await finish(asyncio.to_thread(_mount, one, user))
                given.append(os.dup(one.mounted))
        except BaseException:
            for descriptor in given:
                os.close(descriptor)
            raise
        return given

    async def release(self, held: list[Held]) -> None:
        """Give back what a sandbox had that is no more."""
        for one in held:
            if one.mounted >= 0:
                os.close(one.mounted)
                one.mounted = -1
            if one.lock >= 0:
                with suppress(StartFailed):  # who comes next waits for it as well, and says so
                    await _let_go(one.image)
                os.close(one.lock)
            del self._held[one.path]
            one.released.set()
        held.clear()

    async def _reserve(self, path: Path) -> None:
        while (other := self._held.get(path)) is not None:
            if not other.leaving():
                raise _taken(other.name, f"the sandbox {other.holder}")
            await other.released.wait()

    # For their owner

    async def used(self, owner: str) -> dict[str, int]:
        """The owner's volumes, and the bytes in use in each."""
        self._able()
        mounted = {held.path: _in_use(held.mounted) for held in self._held.values() if held.mounted >= 0}
        return await asyncio.to_thread(listed, self._place(owner), mounted)

    async def delete(self, owner: str, name: str) -> None:
        """Forget a volume; ``Conflict`` while a sandbox has it."""
        self._able()
        path = self._place(owner, name)
        await self._reserve(path)
        if not path.is_dir():
            return
        held = Held({"owner": owner, "name": name, "mount": "", "size": 0}, path, "one that deletes it", lambda: True)
        self._held[path] = held
        try:
            await finish(asyncio.to_thread(lock, held))
            await _let_go(held.image)
            await finish(asyncio.to_thread(_remove, path))
        finally:
            await finish(self.release([held]))

    def _able(self) -> None:
        if self._why_not:
            raise Unsupported(f"volumes are not to be had here: {self._why_not}", hint=loops.HINT)

    def _place(self, *names: str) -> Path:
        return self._root.joinpath(*(_written(name) for name in names))


def check(volumes: Iterable[tuple[str, str, str, int]]) -> list[dict[str, Any]]:
    """Volumes (owner, name, mount, size) as the spawner takes them; ``Invalid`` for those that can never be had."""
    found: list[dict[str, Any]] = []
    for owner, name, mount, size in volumes:
        _written(owner)
        _written(name)
        if size < LEAST:
            raise Invalid(f"the volume {name!r} of {size} bytes is too small", hint="use 1Mi or more")
        if size > LARGEST:
            raise Invalid(f"the volume {name!r} of {size} bytes is too large", hint="use 8Ti or less")
        if any((owner, name) == (one["owner"], one["name"]) for one in found):
            raise Invalid(f"the volume {name!r} is asked for twice")
        found.append({"owner": owner, "name": name, "mount": _mount_point(name, mount), "size": size})
    if len(found) > MOST:
        raise Invalid(f"a sandbox has {MOST} volumes at most, not {len(found)}")
    for outer, inner in pairwise(sorted(one["mount"] for one in found)):
        if inner == outer or _below(inner, outer):
            raise Invalid(f"a volume at {inner} would hide what another has at {outer}, or be hidden by it")
    return found


def made_outside(mount: str) -> bool:
    """Whether the directory it is mounted on must be there before a sandbox starts, which may not write there."""
    return not any(_below(mount, own) for own in _OWN)


def _mount_point(name: str, mount: str) -> str:
    path = os.path.normpath(mount)
    hint = "use a directory of its own, such as /home/admin/data"
    if not mount.startswith("/") or path.startswith("//") or "\0" in mount or ".." in mount.split("/"):
        raise Invalid(f"the volume {name!r} cannot be at {mount!r}: that is not an absolute path", hint=hint)
    reserved = (*_RESERVED, *_MORE_RESERVED)
    hides = [place for place in (*reserved, *_OWN) if place == path or _below(place, path)]
    if path == "/" or hides or any(_below(path, place) for place in reserved):
        raise Invalid(f"the volume {name!r} cannot be at {path}, which sandboxes need themselves", hint=hint)
    return path


def _below(path: str, parent: str) -> bool:
    return path.startswith(f"{parent}/")


def _written(name: str) -> str:
    """An owner or a volume's name as it is in a path: never one that leads elsewhere, and no two alike."""
    try:
        written = quote(name, safe="").replace(".", "%2E")
    except UnicodeEncodeError:
        written = ""
    if not 0 < len(written) <= _LONGEST:
        raise Invalid(f"{name[:100]!r} cannot be the name or the owner of a volume", hint="use a short name")
    return written


# What blocks, and is done in a thread


def lock(held: Held) -> None:
    """Take the lock of a volume; ``Conflict`` when another process has it."""
    while True:
        try:
            held.path.mkdir(mode=0o700, parents=True, exist_ok=True)
            held.path.parent.parent.chmod(0o700)
            lock = os.open(held.path / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        except FileNotFoundError:  # it was deleted in this moment
            continue
        except OSError as exc:
            raise _refused(held, exc) from exc
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = os.pread(lock, 1024, 0).decode(errors="replace") or "another process"
            os.close(lock)
            raise _taken(held.name, holder) from None
        if os.fstat(lock).st_nlink:
            break
        os.close(lock)  # of one that was deleted meanwhile
    held.lock = lock
    os.ftruncate(lock, 0)
    os.pwrite(lock, f"the sandbox {held.holder} of process {os.getpid()}".encode(), 0)


async def _let_go(image: Path) -> None:
    """Wait until no device has the image: what ended with its spawner may need a moment."""
    loop = asyncio.get_running_loop()
    deadline = loop.time() + _GONE
    pause = 0.001
    while devices := loops.users_of(image):
        if loop.time() > deadline:
            raise StartFailed(
                f"the volume {image.parent} is still in use: {', '.join(devices)}",
                hint=f"see who has it with 'grep {devices[0]} /proc/*/mountinfo'",
            )
        await asyncio.sleep(pause)
        pause = min(pause * 2, 0.1)


def _make(held: Held) -> None:
    """Make the image if there is none, and let it grow to the size that is asked for. It never gets smaller."""
    image = held.image
    facts = _facts(held.path)
    try:
        if not image.exists():
            new = held.path / "image.new"
            with open(os.open(new, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600), "wb") as file:
                file.truncate(_whole(held.size))
            try:
                _run(held, "mke2fs", "-q", "-F", "-t", loops.KIND, *_OPTIONS, str(new))
            except AEnvError:
                new.unlink()  # it may be what the disk is full of
                raise
            _write(held, held.size, None)
            new.rename(image)
        elif held.size > facts.get("size", 0):
            used = _used(held.path)
            os.truncate(image, max(_whole(held.size), image.stat().st_size))  # what it was may not be known
            _run(held, "e2fsck", "-f", "-p", str(image), accept=(0, 1))
            _run(held, "resize2fs", str(image))
            _write(held, held.size, _free(image) + used)
        else:
            held.size = facts["size"]
    except OSError as exc:
        raise _refused(held, exc) from exc


def _whole(size: int) -> int:
    """Bytes of an image that has room for about ``size`` bytes of files, beside what the file system itself needs."""
    return size + size // 24 + (5 if size >= _JOURNALED else 1) * 1024**2


def _write(held: Held, size: int, free: int | None) -> None:
    """``free`` is the bytes that were free when it was empty."""
    facts = {"owner": held.owner, "name": held.name, "size": size, "free": free}
    config.replace_file(held.path / "volume.json", json.dumps(facts), mode=0o600)


def note_free(held: Held) -> None:
    """Write down, while it is empty and not mounted, how much is free in it once lost+found is removed."""
    if _facts(held.path).get("free") is None:
        _write(held, held.size, _free(held.image) + _LOST_AND_FOUND)


def size_of(path: Path) -> int:
    """Bytes that the volume in that directory holds at most; 0 when nobody knows."""
    size = _facts(path).get("size")
    return size if isinstance(size, int) else 0


def _mount(held: Held, user: int) -> None:
    try:
        held.mounted = loops.attach(held.image, user)
        if _facts(held.path).get("free") is None:
            found = os.fstatvfs(held.mounted)
            _write(held, held.size, found.f_bfree * found.f_frsize)
    except OSError as exc:
        raise _refused(held, exc) from exc


def _remove(path: Path) -> None:
    shutil.rmtree(path, ignore_errors=True)
    with suppress(OSError):  # the owner may have others
        path.parent.rmdir()


def listed(place: Path, mounted: dict[Path, int]) -> dict[str, int]:
    found = {}
    for path in _directories(place):
        with suppress(OSError):  # it is made or deleted at this moment
            found[unquote(path.name)] = mounted[path] if path in mounted else _used(path)
    return found


def _directories(place: Path) -> Iterator[Path]:
    try:
        yield from sorted(place.iterdir())
    except (FileNotFoundError, NotADirectoryError):
        return


def _in_use(mounted: int) -> int:
    found = os.fstatvfs(mounted)
    return (found.f_blocks - found.f_bfree) * found.f_frsize


def _facts(path: Path) -> dict[str, Any]:
    try:
        facts = json.loads((path / "volume.json").read_bytes())
    except (OSError, ValueError):
        return {}
    return facts if isinstance(facts, dict) else {}


def _used(path: Path) -> int:
    """Bytes in use in a volume that is not mounted."""
    whole = _facts(path).get("free")
    return max(whole - _free(path / "image"), 0) if isinstance(whole, int) else 0


def _free(image: Path) -> int:
    """Bytes that are free in an image, as its own head says, which is right while it is not mounted."""
    with open(image, "rb") as file:
        file.seek(1024)
        head = file.read(1024)
    if len(head) < 1024:
        raise OSError(errno.EIO, "its image holds no file system")
    free, exponent, features = struct.unpack_from("<I8xI", head, 12) + struct.unpack_from("<I", head, 0x60)
    if features & 0x80:  # numbers of 64 bits
        free += struct.unpack_from("<I", head, 0x158)[0] << 32
    bytes_free: int = free << (10 + exponent)
    return bytes_free


def _run(held: Held, tool: str, *arguments: str, accept: tuple[int, ...] = (0,)) -> None:
    try:
        done = subprocess.run(
            [tool, *arguments],
            capture_output=True,
            text=True,
            errors="replace",
            timeout=_MAKING,
            env={"PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin", "LANG": "C"},
            check=False,
        )
    except FileNotFoundError:
        raise StartFailed(f"a volume takes {tool}, which is not installed", hint="install e2fsprogs") from None
    except subprocess.TimeoutExpired:
        raise StartFailed(f"{tool} did not end within {_MAKING:g} s for the volume {held.name!r}") from None
    if done.returncode not in accept:
        raise StartFailed(f"{tool} failed for the volume {held.name!r}: {(done.stderr or done.stdout).strip()[:1000]}")


def _taken(name: str, holder: str) -> Conflict:
    hint = "a volume is for one sandbox at a time: delete that one first"
    return Conflict(f"the volume {name!r} is in use by {holder}", hint=hint)


def _refused(held: Held, exc: OSError) -> AEnvError:
    kind = StorageFull if exc.errno in (errno.ENOSPC, errno.EDQUOT) else StartFailed
    return kind(f"the volume {held.name!r} cannot be had: {exc.strerror or exc}")
