"""How an instance gives up everything that a sandbox must not have: a list of calls that its zygote writes down once.

A fork copies each page of memory that it touches, and that is most of what a start costs. So nothing is put together
after the fork: the zygote fills in what differs from one instance to the next, and the fork goes through the list.
"""

from __future__ import annotations

import ctypes
import os
import resource
import shutil
import socket
import struct
from typing import Any

from aenv.engines.process import kernel, seccomp
from aenv.engines.process.kernel import BIND, DETACH, NODEV, NOEXEC, NOSUID, Step, step, system_call

PROXY_PORT = 3128
_FILES = 4096
"""Most descriptors an instance may have open."""
_END = 2**32 - 1
"""Higher than any descriptor."""
_OVERLAY = b"lowerdir=%b,upperdir=/stage/upper,workdir=/stage/work,userxattr"
STAGE = "/stage"
"""Where everything is that an instance writes. Only what is made of it stays in sight, unless it may be forked."""
SHOWN = ((b"/stage/tmp", b"/tmp"), (b"/stage/home", b"/home/sandbox"), (b"/stage/shm", b"/dev/shm"))
"""Directories that are empty at the start: where they are made, and where they are seen."""
_NAMESPACES = kernel.NEWNS | kernel.NEWIPC | kernel.NEWUTS


class Seal:
    """The seal of a zygote's instances. The first of them decides what it consists of: they differ in values only."""

    name = b"sandbox"
    """What the machine is called inside."""
    work = b"/project"
    """The work directory: what the jail shows there, and the sandbox's own changes to it."""
    own: tuple[tuple[bytes, bytes], ...] = SHOWN

    def __init__(self, order: dict[str, Any], tasks: int) -> None:
        self._user, self._log = ctypes.c_uint(), ctypes.c_int()
        self._tasks = [ctypes.c_int() for _ in range(tasks)]
        self._volumes = [(ctypes.c_int(), mount) for mount in order.get("volumes", ())]
        self._gaps = [(ctypes.c_uint(), ctypes.c_uint()) for _ in range(4 + len(self._volumes))]
        self._size = ctypes.create_string_buffer(64)
        self._memory = 0
        self._forkable = bool(order.get("forkable"))
        self.handles: list[int] = []
        """Descriptors that are sent along when it is sealed."""
        self.steps = [
            *(step("write", descriptor, b"0", 1) for descriptor in self._tasks),
            *self._descriptors(),
            *self._network(order["network"]),
            step("sethostname", self.name, len(self.name)),
            *self._mounts(order["overlay"]),
            *self._privileges(bool(order["user"])),
            *self._limits(order["memory"] is not None),
            step("prctl", kernel.PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0),
            *self._filters(order["seccomp"]),
        ]

    def fit(self, order: dict[str, Any], descriptors: list[int], handles: list[int]) -> None:
        """Fill in what is this instance's own."""
        listener, report, self._log.value, *rest = descriptors
        volumes, tasks = rest[: len(self._volumes)], rest[len(self._volumes) :]
        for blank, task in zip(self._tasks, tasks, strict=True):
            blank.value = task
        for (blank, _), volume in zip(self._volumes, volumes, strict=True):
            blank.value = volume
        kept = sorted((listener, report, *handles, *volumes))
        for (low, high), before, after in zip(self._gaps, (2, *kept), (*kept, _END + 1), strict=False):
            low.value, high.value = (before + 1, after - 1) if after - before > 1 else (_END, _END)
        self._user.value = order["user"]
        self._size.value = b"size=%d,nr_inodes=100k,mode=755" % order["storage"]
        self._memory = order["memory"] or 0
        self.handles = handles

    def _descriptors(self) -> list[Step]:
        """Standard output and error go to the log; every descriptor that is not named is closed."""
        nothing = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
        standard = [step("dup2", source, target) for source, target in ((nothing, 0), (self._log, 1), (self._log, 2))]
        return standard + [system_call("close_range", low, high, 0) for low, high in self._gaps]

    def _network(self, network: str) -> list[Step]:
        if network == "full":
            return [step("unshare", _NAMESPACES)]
        steps = [step("unshare", _NAMESPACES | kernel.NEWNET), (kernel.loopback, ())]
        return [*steps, (self._listen, ())] if network == "proxy" else steps

    def _listen(self) -> int:
        """The only way out, which is handed to the proxy."""
        self.handles.append(socket.create_server(("127.0.0.1", PROXY_PORT), backlog=128).detach())
        return 0

    def _mounts(self, overlay: bool) -> list[Step]:
        """Its own processes, terminals and home, and a project that it may change; one size for all that it writes.
        One that may be forked keeps the way to all this, which without capabilities it cannot go."""
        steps = [
            _mount(b"proc", b"/proc", b"proc", NOSUID | NODEV | NOEXEC),
            _mount(b"devpts", b"/dev/pts", b"devpts", NOSUID | NOEXEC, b"newinstance,ptmxmode=0666,mode=620"),
            _mount(b"tmpfs", b"/stage", b"tmpfs", NOSUID | NODEV, self._size),
        ]
        for stage, target in self.own:
            steps += [*self._directory(stage, 0o700), _mount(stage, target, None, BIND)]
        if overlay:
            if self._forkable:
                lower = b"/stage/lower"
                steps += [*self._directory(lower, 0o755), _mount(self.work, lower, None, BIND)]
            for stage in (b"/stage/upper", b"/stage/work"):
                steps += self._directory(stage, 0o755)
            steps.append(_mount(b"overlay", self.work, b"overlay", NOSUID | NODEV, _OVERLAY % self.work))
        else:
            steps += [(self._copy, ()), _mount(b"/stage/project", self.work, None, BIND)]
        for volume, mount in self._volumes:
            steps += self._mount_volume(volume, mount)
        last = step("chmod", b"/stage", 0o700) if self._forkable else step("umount2", b"/stage", DETACH)
        return [*steps, last, step("chdir", self.work)]

    def _mount_volume(self, volume: ctypes.c_int, mount: str) -> list[Step]:
        """Put what the spawner mounted where the sandbox finds it."""
        return [
            (self._make_way, (mount,)),
            system_call("move_mount", volume, b"", kernel.AT_FDCWD, os.fsencode(mount), kernel.FROM_DESCRIPTOR),
            step("close", volume),
        ]

    def _make_way(self, mount: str) -> int:
        """Make the directories that lead there, where they are the sandbox's own to make."""
        missing = []
        while not os.path.isdir(mount):
            missing.append(mount)
            mount = os.path.dirname(mount)
        for path in reversed(missing):
            os.mkdir(path)
            os.chown(path, self._user.value, self._user.value)
        return 0

    def _directory(self, path: bytes, mode: int) -> list[Step]:
        return [step("mkdir", path, mode), step("chown", path, self._user, self._user)]

    def _copy(self) -> int:
        user = self._user.value
        shutil.copytree(os.fsdecode(self.work), "/stage/project", symlinks=True)
        for directory, _, files in os.walk("/stage/project"):
            for path in (directory, *(os.path.join(directory, name) for name in files)):
                os.chown(path, user, user, follow_symlinks=False)
        return 0

    def _privileges(self, user: bool) -> list[Step]:
        last = kernel.last_capability()
        steps = [step("prctl", kernel.PR_CAPBSET_DROP, number, 0, 0, 0) for number in range(last + 1)]
        if user:
            steps += [
                step("setgroups", 0, None),
                step("setresgid", self._user, self._user, self._user),
                step("setresuid", self._user, self._user, self._user),
            ]
        return [*steps, step("capset", kernel.CAPABILITIES, bytes(24))]

    def _limits(self, memory: bool) -> list[Step]:
        steps = [step("setrlimit", kind, struct.pack("QQ", most, most)) for kind, most in limits().items()]
        return [*steps, (self._limit_memory, ())] if memory else steps

    def _filters(self, wanted: bool) -> list[Step]:
        if not wanted:
            return []
        if self._forkable:
            return [(self._ask, (kernel.FilterWithAnswers(seccomp.forkable()),))]
        return [kernel.filter_step(seccomp.sealed())]

    def _ask(self, filters: kernel.FilterWithAnswers) -> int:
        """Load the filter, whose other end the spawner gets."""
        self.handles.append(listener := filters.load())
        return listener

    def _limit_memory(self) -> int:
        limit_memory(self._memory)
        return 0


def limits() -> dict[int, int]:
    """What every instance is limited to, sealed or not."""
    files = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    most = _FILES if files == resource.RLIM_INFINITY else min(_FILES, files)
    return {resource.RLIMIT_CORE: 0, resource.RLIMIT_NOFILE: most}


def limit_memory(more: int) -> None:
    """Let this process map so many bytes more than it has, where no control group counts them."""
    with open("/proc/self/statm") as file:
        most = int(file.read().split()[0]) * resource.getpagesize() + more
    resource.setrlimit(resource.RLIMIT_AS, (most, most))


def _mount(source: bytes, target: bytes, kind: bytes | None, flags: int, data: Any = None) -> Step:
    return step("mount", source, target, kind, flags, data)
