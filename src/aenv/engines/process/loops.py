"""A volume's image as a mount that only descriptors hold: what runs between the spawner and an instance, as root.

The image is the file of a loop device, and holds a file system, so that what is written to it ends where it is full,
and nothing out here ever walks through what a sandbox wrote. Neither the device nor the mount has a name on this
machine that could be left behind: both go with the last process that has them. Imports nothing but the standard
library.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import socket
import struct
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

from aenv.engines.process import kernel
from aenv.engines.process.jail import python

OWNER = 1000
"""Whose the files of a volume are in its image, whoever they are shown as."""
HINT = "volumes take the process engine as root on Linux, with isolation and loop devices"
KIND = "ext4"
PATIENCE = 60.0
"""Seconds that mounting may take."""
_CONTROL = "/dev/loop-control"
_GET_FREE, _CONFIGURE = 0x4C82, 0x4C0A
_AUTOCLEAR = 4
"""The device lets go of its file when nobody has it open or mounted any more."""
_CONFIGURATION = struct.Struct("II5Q4I64s64s32s2Q64x")
_ATTEMPTS = 100
"""Free devices that somebody else may take before us."""


def users_of(image: Path) -> list[str]:
    """The loop devices whose file it is."""
    wanted = str(image)
    found = []
    for file in Path("/sys/block").glob("loop*/loop/backing_file"):
        with suppress(OSError):  # it was let go meanwhile
            if file.read_text().rstrip("\n") == wanted:
                found.append(file.parent.parent.name)
    return found


def missing() -> str:
    """Why this machine has no volumes, as far as that can be seen; nothing when it seems to have them."""
    if not os.access(_CONTROL, os.R_OK | os.W_OK):
        return f"there is no {_CONTROL}"
    try:
        kinds = Path("/proc/filesystems").read_text().split()
    except OSError:
        kinds = []
    if KIND not in kinds:
        return f"this kernel has no {KIND}"
    return ""


def attach(image: Path, user: int) -> int:
    """A descriptor of the mounted image, whose files belong to that user of this machine; ``OSError`` says why not."""
    mine, theirs = socket.socketpair()
    with mine, theirs:
        code = f"from aenv.engines.process.loops import main; main({theirs.fileno()}, {str(image)!r}, {user})"
        process = subprocess.Popen(
            python(sys.executable, code),
            env={},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            pass_fds=[theirs.fileno()],
            cwd="/",
        )
        theirs.close()
        mine.settimeout(PATIENCE)
        try:
            message, descriptors, _, _ = socket.recv_fds(mine, 65536, 1, socket.MSG_CMSG_CLOEXEC)
        except TimeoutError:
            raise OSError(errno.ETIMEDOUT, f"it was not mounted within {PATIENCE:g} s") from None
        finally:
            process.kill()
            process.wait()
    if not descriptors:
        number, words = json.loads(message or b'[0, "the process that mounts it ended"]')
        raise OSError(number, words)
    return descriptors[0]


def main(answer: int, image: str, user: int) -> None:
    """In a process of its own: mount the image, and hand the descriptor of that over."""
    spawner = socket.socket(fileno=answer)
    try:
        mounted = _mounted(image)
        with suppress(OSError):  # what belongs to nobody inside is only in the way
            os.rmdir("lost+found", dir_fd=mounted)
        owner = f"{OWNER} {user} 1"
        kernel.map_owners(mounted, mapping(owner, owner))
        socket.send_fds(spawner, [b"{}"], [mounted])
    except OSError as exc:
        spawner.sendall(json.dumps([exc.errno or 0, exc.strerror or str(exc)]).encode())


def _mounted(image: str) -> int:
    device, path = attach_device(image)
    try:
        return kernel.detached_mount(KIND, path, kernel.NOSUID | kernel.NODEV, "discard")
    finally:
        os.close(device)


def attach_device(image: str) -> tuple[int, str]:
    """A device whose file is the image: an open descriptor of it, and its path. It lets go of the image when nobody has
    it open or mounted."""
    file = os.open(image, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    control = -1
    try:
        control = os.open(_CONTROL, os.O_RDWR | os.O_CLOEXEC)
        for _ in range(_ATTEMPTS):
            path = f"/dev/loop{fcntl.ioctl(control, _GET_FREE)}"
            device = os.open(path, os.O_RDWR | os.O_CLOEXEC)
            try:
                fcntl.ioctl(device, _CONFIGURE, _configuration(file))
                return device, path
            except OSError as exc:
                os.close(device)
                if exc.errno != errno.EBUSY:  # which it is when somebody else took it
                    raise
        raise OSError(errno.EBUSY, "no loop device stays free long enough")
    finally:
        os.close(file)
        if control >= 0:
            os.close(control)


def _configuration(file: int) -> bytes:
    numbers = (0, 0, 0, 0, 0)
    return _CONFIGURATION.pack(file, 0, *numbers, 0, 0, 0, _AUTOCLEAR, b"", b"", b"", 0, 0)


def mapping(users: str, groups: str) -> int:
    """A user namespace with these rows, for a mount whose files shall seem to belong to others."""
    ready, is_ready = os.pipe()
    stay, leave = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(leave)
        with suppress(OSError):
            kernel.unshare(kernel.NEWUSER)
            os.write(is_ready, b"y")
            os.read(stay, 1)
        os._exit(0)
    try:
        os.close(is_ready)
        if not os.read(ready, 1):
            raise OSError(errno.EPERM, "no user namespace is to be had")
        Path(f"/proc/{pid}/uid_map").write_text(users)
        Path(f"/proc/{pid}/gid_map").write_text(groups)
        return os.open(f"/proc/{pid}/ns/user", os.O_RDONLY | os.O_CLOEXEC)
    finally:
        os.close(leave)
        os.waitpid(pid, 0)
