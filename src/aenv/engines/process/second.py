"""What runs in the jail of a second sandbox, before the agent: it builds the root, seals itself, and becomes the agent.

The task's directory is its work directory, ``/task``, or, where it holds a root file system, its root. Both are an
overlay: the directory itself is never written. A plain one has a root with this machine's programs in it, which it
cannot change, and may write all the rest. Imports nothing but the standard library, as everything in a jail.
"""

from __future__ import annotations

import json
import os
import resource
import shutil
import socket
import stat
import struct
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

from aenv.engines.process import kernel, loops
from aenv.engines.process.jail import SPAN, SYSTEM, Plan, build_root, enter, receive
from aenv.engines.process.kernel import BIND, NODEV, NOEXEC, NOSUID, RDONLY, RECURSIVE, Step, step
from aenv.engines.process.seal import Seal

TASK, SHARED, LINK = "/task", "/shared", "/aenv/link"
"""Where the task's directory is; what both sandboxes may write; and where the main one finds the agent's socket."""
SOCKET = f"{LINK}/second.sock"
_PROCESSES = 256
"""Most processes and threads: half of what the instance may have, so that the main sandbox is left some."""
_BACKLOG = 512
_EVERYBODY = struct.pack("I" + "HHI" * 3, 2, 1, 7, 2**32 - 1, 4, 7, 2**32 - 1, 32, 7, 2**32 - 1)
"""An access list by which whatever is made in a directory may be read and written by all, whatever its maker said."""


def _is_root(directory: str) -> bool:
    """Whether a directory holds a root file system, and not only a way to that of another."""
    tops = {"usr": "bin", "bin": "sh"}
    return any(
        os.path.lexists(f"{directory}/{top}/{name}") and not os.path.islink(f"{directory}/{top}")
        for top, name in tops.items()
    )


def main(control: int, lifeline: int, program: int, *tasks: int) -> None:
    """P0. ``program`` is a descriptor of the agent."""
    enter(control, lifeline, tasks, _prepare, partial(_become, program))


def _prepare(plan: Plan) -> Callable[[], None]:
    """Take the task's directory as long as there are the rights to show its files as the sandbox's own."""
    mounted = -1
    if plan["privileged"]:
        with suppress(OSError):  # not every file system can: its files are copied instead
            mounted = _owned(plan["task"], plan["users"], plan["user"])
    return lambda: _build(plan, mounted)


def _build(plan: Plan, mounted: int) -> None:
    """P1: build the root around the task's directory."""
    if not plan["privileged"]:
        build_root(plan, plan["task"], TASK)
        return
    if mounted >= 0:
        kernel.attach_mount(mounted, plan["place"])
        os.close(mounted)
    else:
        kernel.mount("tmpfs", plan["place"], "tmpfs", NOSUID | NODEV, f"size={plan['storage']},mode=755")
        _copy(plan["task"], plan["place"], plan["users"] + plan["user"])
    build_root(plan, plan["place"], TASK)


def _owned(task: str, users: int, user: int) -> int:
    """A mount of the directory in which what belongs to its owner belongs to the sandbox, and what belongs to others to
    users of the jail that have these numbers. ``OSError`` where the file system cannot do that."""
    found = os.stat(task)
    mounted = kernel.clone_mount(task)
    try:
        namespace = loops.mapping(_rows(found.st_uid, users, user), _rows(found.st_gid, users, user))
        try:
            kernel.map_owners(mounted, namespace)
        finally:
            os.close(namespace)
    except OSError:
        os.close(mounted)
        raise
    return mounted


def _rows(owner: int, users: int, user: int) -> str:
    rows, start = [f"{owner} {users + user} 1"], 0
    for end in (*sorted(taken for taken in {owner, user} if taken < SPAN), SPAN):
        if start < end:
            rows.append(f"{start} {users + start} {end - start}")
        start = end + 1
    return "\n".join(rows)


def _copy(source: str, target: str, owner: int) -> None:
    """Copy files, directories and links, as they are, and nothing that is a door to something else."""

    def one(file: str, copy: str) -> None:
        if stat.S_ISREG(os.lstat(file).st_mode):
            shutil.copy2(file, copy)

    try:
        shutil.copytree(source, target, symlinks=True, copy_function=one, dirs_exist_ok=True)
    except shutil.Error as exc:
        failed, _, why = exc.args[0][0]
        raise OSError(f"{failed} cannot be copied: {why}") from exc
    for directory, folders, files in os.walk(target):
        os.chown(directory, owner, owner)
        for name in (*folders, *files):
            os.chown(os.path.join(directory, name), owner, owner, follow_symlinks=False)


def _become(program: int, spawner: socket.socket, plan: Plan) -> None:
    """P2: seal this process, have the spawner look at it, and execute the agent."""
    os.set_inheritable(spawner.fileno(), False)
    os.set_inheritable(program, False)
    order = receive(spawner)  # the spawner asks the kernel from now on who answers
    plain = order["plain"]
    whole = plain or _is_root(TASK)
    variables = order["variables"] | ({"HOME": "/root", "USER": "root"} if whole else {})
    try:
        seal = SecondSeal(order, whole=whole, shown=(*SYSTEM, "/etc") if plain else ())
        seal.fit(order, [program, spawner.fileno(), 2], [])
        kernel.take(seal.steps)
        _say(spawner, {"sealed": True}, seal.handles)
        receive(spawner)
        os.set_inheritable(seal.door, True)
        os.execve(program, ["aenv-agent", f"fd:{seal.door}"], variables)  # noqa: S606
    except OSError as exc:
        _say(spawner, {"failed": {"message": str(exc)}}, [])
    os._exit(1)


def _say(spawner: socket.socket, message: dict[str, Any], handles: list[int]) -> None:
    data = json.dumps(message).encode()
    socket.send_fds(spawner, [struct.pack("I", len(data)) + data], handles)
    for handle in handles:
        os.close(handle)


class SecondSeal(Seal):
    """The seal of an instance, with other places. Its handles: the listener of the proxy if there is one, what both
    sandboxes share, and the directory of the agent's socket."""

    name = b"second"
    work = TASK.encode()
    own = (*Seal.own, (b"/stage/shared", SHARED.encode()), (b"/stage/link", LINK.encode()))

    def __init__(self, order: dict[str, Any], *, whole: bool, shown: Sequence[str] = ()) -> None:
        """``whole``: whether the task's directory holds a root file system. ``shown``: what that has from the jail's,
        each a mount, so that nobody can put something else in its place."""
        self.door = -1
        """The agent's socket, which listens already: so no command can put its own in that place."""
        self._whole = whole
        self._shown = [place for place in shown if os.path.isdir(place)]
        self._own_user = bool(order["user"])
        super().__init__(order, 0)

    def _mounts(self, overlay: bool) -> list[Step]:
        steps = [*super()._mounts(overlay), (self._share, ()), (self._open_door, ())]
        return [*steps, (self._change_root, ())] if self._whole else steps

    def _limits(self, memory: bool) -> list[Step]:
        steps = super()._limits(memory)
        if self._own_user:  # else it would count what others of that user run
            limit = struct.pack("QQ", _PROCESSES, _PROCESSES)
            steps.append(step("setrlimit", resource.RLIMIT_NPROC, limit))
        return steps

    def _share(self) -> int:
        os.chown(SHARED, 0, 0)  # so that neither sandbox can shut the other out
        os.chmod(SHARED, 0o777)  # noqa: S103
        with suppress(OSError):  # where there are no access lists, each leaves to the other what its umask lets it
            os.setxattr(SHARED, "system.posix_acl_default", _EVERYBODY)
        self.handles.append(kernel.clone_mount(SHARED))
        return 0

    def _open_door(self) -> int:
        """Listen for the agent, in a directory that only the main sandbox will see, and nobody can write."""
        os.chown(LINK, 0, 0)
        os.chmod(LINK, 0o755)  # noqa: S103
        door = socket.socket(socket.AF_UNIX)
        door.bind(SOCKET)
        os.chmod(SOCKET, 0o666)  # noqa: S103
        door.listen(_BACKLOG)
        self.door = door.detach()
        link = kernel.clone_mount(LINK)
        kernel.restrict_mount(link, RDONLY)
        self.handles.append(link)
        kernel.unmount(LINK)
        return 0

    def _change_root(self) -> int:
        """Let the task's own root be the root, with processes, devices and the shared directory in it."""
        for place in ("/proc", "/dev", SHARED):
            if os.path.islink(TASK + place):
                raise OSError(f"{place} of the task's root file system is a link, and must be a directory")
            os.makedirs(TASK + place, exist_ok=True)
        tmp = os.path.join(TASK, "tmp")
        if not os.path.lexists(tmp):
            os.mkdir(tmp)
            os.chmod(tmp, 0o1777)  # noqa: S103
        kernel.mount("proc", f"{TASK}/proc", "proc", NOSUID | NODEV | NOEXEC)
        for place in ("/dev", *self._shown):
            os.makedirs(TASK + place, exist_ok=True)
            kernel.mount(os.path.realpath(place), TASK + place, None, BIND | RECURSIVE)
        kernel.mount(SHARED, TASK + SHARED, None, BIND)
        for name in () if self._shown else ("hosts", "resolv.conf"):
            with suppress(OSError):  # where it has no /etc of its own, nobody there looks for it
                _replace(f"/etc/{name}", f"{TASK}/etc/{name}")
        os.chdir(TASK)
        kernel.pivot_root(".", ".")
        kernel.unmount(".")
        os.chdir("/")
        return 0


def _replace(source: str, target: str) -> None:
    with open(source, "rb") as file:
        content = file.read()
    with suppress(FileNotFoundError):
        os.unlink(target)
    opened = os.open(target, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o644)
    try:
        os.write(opened, content)
    finally:
        os.close(opened)
