"""Giving a process in a new user namespace the users of the one above it, which only a process in that one may do."""

from __future__ import annotations

import fcntl
import os

from aenv.engines.process import kernel
from aenv.engines.process.jail import SPAN
from aenv.errors import StartFailed

_PARENT = 0xB702
"""What asks a namespace for the one above it."""


def give(pid: int, parent: int) -> None:
    """Give a process that was forked by ``parent``, and has taken a user namespace, all users of the jail.
    ``StartFailed`` when it has done something else."""
    opened: list[int] = []
    try:
        opened.append(above := os.open(f"/proc/{parent}/ns/user", os.O_RDONLY | os.O_CLOEXEC))
        opened.append(own := os.open(f"/proc/{pid}/ns/user", os.O_RDONLY | os.O_CLOEXEC))
        opened.append(found := fcntl.ioctl(own, _PARENT))
        if not os.path.samestat(os.fstat(found), os.fstat(above)):
            raise StartFailed("the fork is not in a user namespace below its parent's")
        _write(pid, above)
    except OSError as exc:
        raise StartFailed(f"the fork could not be given its users: {exc}") from exc
    finally:
        for descriptor in opened:
            os.close(descriptor)


def _write(pid: int, above: int) -> None:
    """By a child of this process, which enters that namespace: the kernel takes it from nobody else."""
    child = os.fork()  # with Python's hooks: this process has threads
    if child == 0:
        try:
            kernel.setns(above, kernel.NEWUSER)
            for name in ("uid_map", "gid_map"):
                file = os.open(f"/proc/{pid}/{name}", os.O_WRONLY)
                os.write(file, b"0 0 %d" % SPAN)
            os._exit(0)
        finally:
            os._exit(1)
    _, status = os.waitpid(child, 0)
    if status:
        raise StartFailed("the fork could not be given its users")
