"""How the runtime in a container is reached: by its socket in a volume that the engine sees, or by a tunnel.

A container may do to the volume of its socket what it likes until the socket is there. From then on the directory is
root's and cannot be written; and only when there is nothing in it but one socket does anybody connect. The volume is
memory, so that it fills no disk and is gone with the container.
"""

from __future__ import annotations

import fcntl
import logging
import os
import socket
import stat
import struct
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import NamedTuple

from aenv.engines.docker.containers import DOOR, ENGINE, ID, KIND, SOCKET, SOCKETS, USER
from aenv.engines.docker.daemon import About, Daemon, Hijacked
from aenv.engines.process.state import start_time
from aenv.engines.tunnels import Tunnel
from aenv.errors import AEnvError, Conflict, NotFound, SandboxLost

log = logging.getLogger("aenv.engine")
_MOMENT = 5.0
_CREDENTIALS = struct.Struct("3i")
_INODES = 8
_SEALED = 0o555
SET_FLAGS, _IMMUTABLE = 0x40086602, struct.pack("l", 0x10)
"""Linux: nobody changes a directory with that flag, not even root, who must have a power of its own to take it off."""


class Outlook(NamedTuple):
    """How this process sees the files of a daemon: as its own, where both have the same mounts, else through the
    daemon's root."""

    pid: int
    began: int
    """When the daemon's process did: another may have its number later."""
    before: str
    """What stands before a path of the daemon's."""

    @property
    def holds(self) -> bool:
        """Whether the daemon is still that process, where it matters."""
        return not self.before or start_time(self.pid) == self.began


def outlook(daemon: Daemon, about: About) -> Outlook | None:
    """How this process sees the daemon's files now; None when it cannot."""
    if not daemon.base.startswith("unix:") or os.geteuid() != 0 or about.rootless or not about.root:
        return None
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as sock:
            sock.settimeout(_MOMENT)
            sock.connect(daemon.base.removeprefix("unix:"))
            credentials = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
        pid = _CREDENTIALS.unpack(credentials)[0]
        apart = os.readlink(f"/proc/{pid}/ns/mnt") != os.readlink("/proc/self/ns/mnt")
    except OSError:  # it is in another process namespace, or behind somebody who passes on
        return None
    found = Outlook(pid, start_time(pid), f"/proc/{pid}/root" if apart else "")
    return found if os.path.isdir(found.before + about.root) else None


async def make_volume(daemon: Daemon, name: str, engine: str, id: str) -> str:
    """A small volume in memory, for the container's user to make its socket in; where that is."""
    options = f"uid={USER},gid={USER},mode=0700,nr_inodes={_INODES},nr_blocks={_INODES}"  # a size is Podman's quota
    driver = {"type": "tmpfs", "device": "tmpfs", "o": options}
    labels = {ENGINE: engine, ID: id, KIND: SOCKETS}
    made = await daemon.make_volume(name, driver, labels)
    if made.get("Labels") != labels:  # a daemon gives what it has of that name, whatever it is
        hint = "remove that volume, or use another id"
        raise Conflict(f"the name {name} is taken by a volume that is none of this engine's", hint=hint)
    return str(made.get("Mountpoint") or "")


async def remove_volume(daemon: Daemon, name: str, engine: str) -> None:
    """Gone already is success; one that a container has goes when that is gone; one that is none of the engine's stays.

    A Docker that was restarted while containers lived on may count a mount too many, and lets go at its next start.
    """
    try:
        found = await daemon.ask("GET", f"/volumes/{name}") or {}
        if (found.get("Labels") or {}).get(ENGINE) == engine:
            await daemon.ask("DELETE", f"/volumes/{name}")
    except (NotFound, Conflict):
        return
    except AEnvError as exc:
        if "active mounts" not in exc.message:
            raise
        log.warning("the volume %s stays until 'aenv gc', after the daemon's next start: %s", name, exc.message)


def is_mounted(directory: str) -> bool:
    """Whether the volume's memory is to be seen here, and not only where the daemon is."""
    try:
        return os.lstat(directory).st_dev != os.lstat(os.path.dirname(directory)).st_dev
    except OSError:
        return False


def seal(directory: str, name: str = SOCKET, place: str = DOOR) -> str | None:
    """The path of the socket, once nobody inside can change any more what it leads to; None while there is none.

    Root inside can where the kernel has no flag for it: for directories in memory, it has since Linux 6.6.
    ``SandboxLost`` when something else is there, which only hostile code does.
    """
    try:
        folder = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except FileNotFoundError:
        return None
    except OSError as exc:
        raise SandboxLost(f"the volume of its socket cannot be opened: {exc.strerror or exc}") from exc
    try:
        if not os.listdir(folder):
            return None
        found = os.fstat(folder)
        if (found.st_uid, stat.S_IMODE(found.st_mode)) != (0, _SEALED):
            os.fchown(folder, 0, 0)
            os.fchmod(folder, _SEALED)
        with suppress(OSError):
            fcntl.ioctl(folder, SET_FLAGS, _IMMUTABLE)
        names = os.listdir(folder)
        if names != [name] or not stat.S_ISSOCK(os.stat(name, dir_fd=folder, follow_symlinks=False).st_mode):
            raise SandboxLost(f"there is something else than a socket at {place}, which only hostile code does")
    except FileNotFoundError:
        raise SandboxLost(f"its socket at {place} vanished") from None
    finally:
        os.close(folder)
    return os.path.join(directory, name)


def lead(path: Path, to: str) -> None:
    """Make a link of ours that leads to a socket: the path of a socket must be short, and the daemon's are long."""
    made = path.with_suffix(".new")
    made.unlink(missing_ok=True)
    made.symlink_to(to)
    made.replace(path)


class Exec(Tunnel):
    """A tunnel by a command in the container, which joins each connection with the runtime's socket. It works wherever
    the daemon does."""

    def __init__(self, daemon: Daemon, container: str, python: str, path: Path) -> None:
        super().__init__(path, container)
        self._daemon, self._container, self._python = daemon, container, python

    @asynccontextmanager
    async def connect(self) -> AsyncIterator[_Command]:
        command = [self._python, "-m", "aenv.runtime.tunnel", f"{DOOR}/{SOCKET}"]
        asked = {"Cmd": command, "AttachStdin": True, "AttachStdout": True, "AttachStderr": True, "User": f"{USER}"}
        made = await self._daemon.ask("POST", f"/containers/{self._container}/exec", body=asked)
        start = {"Detach": False, "Tty": False}
        async with self._daemon.hijack(f"/exec/{made['Id']}/start", body=start) as inside:
            yield _Command(inside)


class _Command:
    """Standard input and output of a command, as a connection."""

    def __init__(self, inside: Hijacked) -> None:
        self._inside = inside

    async def send(self, data: bytes) -> None:
        await self._inside.send(data)

    async def end_input(self) -> None:
        self._inside.end_input()

    async def output(self) -> AsyncIterator[bytes]:
        async for channel, piece in self._inside.output():
            if channel == 1:
                yield piece
