"""System calls of Linux that Python has no name for. Imports nothing but the standard library."""

from __future__ import annotations

import ctypes
import mmap
import os
import platform
import signal
import socket
import struct
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, cast

NEWNS, NEWUTS, NEWIPC, NEWUSER, NEWPID, NEWNET = 1 << 17, 1 << 26, 1 << 27, 1 << 28, 1 << 29, 1 << 30
NEWCGROUP, NEWTIME = 1 << 25, 1 << 7
NAMESPACES = NEWNS | NEWUTS | NEWIPC | NEWUSER | NEWPID | NEWNET | NEWCGROUP | NEWTIME
CLONE_PARENT = 1 << 15
RDONLY, NOSUID, NODEV, NOEXEC = 1, 2, 4, 8
BIND, RECURSIVE, PRIVATE = 4096, 16384, 1 << 18

DETACH = 2
_SET_FLAG, _SET_STRING, _CREATE, _CLOSE_ON_EXEC, _IDMAP = 0, 1, 6, 1, 1 << 20
PR_SET_SECUREBITS, KEEP_CAPABILITIES = 28, 1 << 2
"""And a bit of these: a change of users leaves capabilities alone."""
PR_SET_DUMPABLE, PR_CAPBSET_DROP, PR_SET_CHILD_SUBREAPER, PR_SET_NO_NEW_PRIVS = 4, 24, 36, 38
CAPABILITIES = struct.pack("Ii", 0x20080522, 0)
"""The head of a call that sets this process's own, in their third version."""
AT_FDCWD, _AT_RECURSIVE, _AT_EMPTY_PATH = -100, 0x8000, 0x1000
_CLONE_TREE = 1
FROM_DESCRIPTOR = 4
"""A flag of ``move_mount``: what is moved is the descriptor itself."""
_SHARED = {
    "open_tree": 428,
    "move_mount": 429,
    "fsopen": 430,
    "fsconfig": 431,
    "fsmount": 432,
    "close_range": 436,
    "mount_setattr": 442,
}
_NUMBERS = {
    "x86_64": {**_SHARED, "pivot_root": 155, "seccomp": 317},
    "aarch64": {**_SHARED, "pivot_root": 41, "seccomp": 277},
}
MACHINE = platform.machine()

_libc = ctypes.CDLL(None, use_errno=True)
_python = ctypes.PyDLL(None, use_errno=True)
"""The same, with the interpreter's lock held during a call."""
# Looked up once: a fork that did it would read every library's table of symbols. Not every system has all of them.
_close, _clone, _ioctl, _setns, _sigaction, _socket = (
    cast("Callable[..., int]", getattr(_libc, name, None))
    for name in ("close", "clone", "ioctl", "setns", "sigaction", "socket")
)


def _checked(result: int, what: str) -> None:
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")


def _syscall(name: str, *arguments: object) -> int:
    result: int = _libc.syscall(ctypes.c_long(_NUMBERS[MACHINE][name]), *arguments)
    _checked(result, name)
    return result


Step = tuple[Callable[..., int], tuple[Any, ...]]
"""A call that is made later. It returns less than 0 when it fails."""


def step(name: str, *arguments: Any) -> Step:
    """A call of the C library, looked up now."""
    return getattr(_libc, name), arguments


def system_call(name: str, *arguments: Any) -> Step:
    """One that not every C library has a function for."""
    return _libc.syscall, (ctypes.c_long(_NUMBERS[MACHINE][name]), *arguments)


def take(steps: Iterable[Step]) -> None:
    """Make those calls, in this order; ``OSError`` at the first that fails."""
    for call, arguments in steps:
        if call(*arguments) < 0:
            number = ctypes.get_errno()
            raise OSError(number, f"{call.__name__}: {os.strerror(number)}")


def rehearse() -> None:
    """Go through calls that do nothing, so that going through a list is nothing new to a fork."""
    for _ in range(10):
        take([step("getpid")] * 4)


def unshare(flags: int) -> None:
    _checked(_libc.unshare(flags), "unshare")


def setns(descriptor: int, kind: int) -> None:
    _checked(_setns(descriptor, kind), "setns")


def prctl(option: int, value: int = 0) -> None:
    arguments = (ctypes.c_ulong(argument) for argument in (value, 0, 0, 0))
    _checked(_libc.prctl(option, *arguments), f"prctl {option}")


def become_subreaper() -> None:
    """Orphans below this process become its children."""
    prctl(PR_SET_CHILD_SUBREAPER, 1)


def no_new_privileges() -> None:
    prctl(PR_SET_NO_NEW_PRIVS, 1)


def not_dumpable() -> None:
    """Nobody with fewer rights may look into this process."""
    prctl(PR_SET_DUMPABLE, 0)


def mount(source: str, target: str, kind: str | None = None, flags: int = 0, data: str | None = None) -> None:
    encoded = [None if text is None else os.fsencode(text) for text in (source, target, kind, data)]
    result = _libc.mount(*encoded[:3], ctypes.c_ulong(flags), encoded[3])
    _checked(result, f"mount {kind or source} on {target}")


def unmount(target: str) -> None:
    _checked(_libc.umount2(os.fsencode(target), DETACH), f"unmount {target}")


def restrict(target: str, flags: int) -> None:
    """Add flags such as read-only to a mount and all below it."""
    attributes = struct.pack("QQQQ", flags, 0, 0, 0)
    _syscall("mount_setattr", AT_FDCWD, os.fsencode(target), _AT_RECURSIVE, attributes, ctypes.c_size_t(32))


def detached_mount(kind: str, source: str, flags: int, *options: str) -> int:
    """A descriptor of a mounted file system that is nowhere to be seen. It goes when the last who has it goes."""
    context = _syscall("fsopen", kind.encode(), _CLOSE_ON_EXEC)
    try:
        _syscall("fsconfig", context, _SET_STRING, b"source", os.fsencode(source), 0)
        for option in options:
            _syscall("fsconfig", context, _SET_FLAG, option.encode(), None, 0)
        _syscall("fsconfig", context, _CREATE, None, None, 0)
        return _syscall("fsmount", context, _CLOSE_ON_EXEC, flags)
    finally:
        os.close(context)


def clone_mount(path: str) -> int:
    """A descriptor of a detached mount that shows what is at ``path``, without what is mounted below it."""
    return _syscall("open_tree", AT_FDCWD, os.fsencode(path), _CLONE_TREE | os.O_CLOEXEC)


def attach_mount(mounted: int, target: str) -> None:
    """Put a detached mount where it can be seen."""
    _syscall("move_mount", mounted, b"", AT_FDCWD, os.fsencode(target), FROM_DESCRIPTOR)


def restrict_mount(mounted: int, flags: int) -> None:
    """Add flags such as read-only to a detached mount."""
    attributes = struct.pack("QQQQ", flags, 0, 0, 0)
    _syscall("mount_setattr", mounted, b"", _AT_EMPTY_PATH, attributes, ctypes.c_size_t(32))


def map_owners(mounted: int, users: int) -> None:
    """Show the owners of files in a detached mount as that user namespace, a descriptor, maps them."""
    attributes = struct.pack("QQQQ", _IDMAP, 0, 0, users)
    _syscall("mount_setattr", mounted, b"", _AT_EMPTY_PATH, attributes, ctypes.c_size_t(32))


def pivot_root(new: str, old: str) -> None:
    _syscall("pivot_root", os.fsencode(new), os.fsencode(old))


def close_all() -> None:
    """Close every descriptor of this process."""
    _syscall("close_range", ctypes.c_uint(0), ctypes.c_uint(2**32 - 1), 0)


def last_capability() -> int:
    with open("/proc/sys/kernel/cap_last_cap") as file:
        return int(file.read())


def fork() -> int:
    """Fork without what Python does around it, which touches hundreds of pages that the child would have to copy.

    Right only where there is one thread, and nobody asked to be told of forks (``os.register_at_fork``).
    """
    pid: int = _python.fork()
    _checked(pid, "fork")
    return pid


class Hooks:
    """Notices whether anybody asks to be told of forks, in this process and all that are forked from it."""

    def __init__(self) -> None:
        self.asked = sys.platform != "linux"  # elsewhere ours has not been tried
        self._register = os.register_at_fork
        os.register_at_fork = self._noticed

    def _noticed(self, **hooks: Any) -> None:
        self.asked = True
        self._register(**hooks)

    def fork(self) -> int:
        """Fork, with what Python does around it where somebody asked for it."""
        return os.fork() if self.asked else fork()


_SIGCHLD = int(signal.SIGCHLD)
_VFORK = 0x4000
"""A flag of ``clone``: it returns when the child has ended."""
_IGNORE = struct.pack("Q144x", 1)
"""A ``struct sigaction`` of the C library."""


class Inits:
    """First processes for new process namespaces, which do nothing but let the kernel reap for them.

    Each shares the memory of its maker and waits in ``pause`` for ever, so it costs next to nothing. It ignores
    SIGCHLD, and the kernel then reaps the orphans of its namespace. It dies by SIGKILL, and its namespace with it.
    """

    _STACK = 16 * 1024
    _FLAGS = 0x100 | 0x400 | _SIGCHLD
    """It shares the memory and the descriptors, of which it keeps none open, and its end is told to its maker."""

    def __init__(self) -> None:
        # Private: what is forked later must have no way to it.
        self._stack = mmap.mmap(-1, self._STACK, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        # All of them may stand on one stack: pause writes nothing but the same return address.
        self._top = ctypes.c_void_p(ctypes.addressof(ctypes.c_char.from_buffer(self._stack)) + self._STACK - 64)
        self._before = ctypes.create_string_buffer(len(_IGNORE))
        self._pause, self._exit = (ctypes.cast(call, ctypes.c_void_p) for call in (_libc.pause, _libc._exit))

    def make(self, *, namespace: bool = True) -> int:
        """The process id of a new one, in a new process namespace; or in the one that this process has taken for its
        children."""
        with self._reaped():
            pid = _clone(self._pause, self._top, self._FLAGS | (NEWPID if namespace else 0), None)
            _checked(pid, "clone")
        return pid

    def skip(self, count: int) -> None:
        """Have so many process ids used up, by processes that end at once."""
        lower = ctypes.c_void_p((self._top.value or 0) - self._STACK // 2)  # the first processes stand above it
        with self._reaped():
            for _ in range(count):
                pid = _clone(self._exit, lower, self._FLAGS | _VFORK, None)
                _checked(pid, "clone")
                with suppress(ChildProcessError):  # back when it is gone: the kernel has reaped it
                    os.waitpid(pid, 0)

    @contextmanager
    def _reaped(self) -> Iterator[None]:
        """Within the block, the kernel reaps children, and for good those of whoever is made in it."""
        _sigaction(_SIGCHLD, _IGNORE, self._before)
        try:
            yield
        finally:
            _sigaction(_SIGCHLD, self._before, None)


def load_filter(program: bytes) -> None:
    """Load a seccomp filter: classic BPF, eight bytes an instruction."""
    take([filter_step(program)])


def filter_step(program: bytes) -> Step:
    """The call that loads a seccomp filter."""
    set_seccomp, filter_mode = 22, 2
    code = ctypes.create_string_buffer(program, len(program))
    _kept.append(code)
    header = struct.pack("HxxxxxxQ", len(program) // 8, ctypes.addressof(code))
    return step("prctl", set_seccomp, filter_mode, header, 0, 0)


class FilterWithAnswers:
    """A seccomp filter some of whose calls somebody else decides on."""

    _SET_FILTER, _NEW_LISTENER = 1, 8

    def __init__(self, program: bytes) -> None:
        self._code = ctypes.create_string_buffer(program, len(program))
        self._header = struct.pack("HxxxxxxQ", len(program) // 8, ctypes.addressof(self._code))

    def load(self) -> int:
        """Load it; the descriptor at which is asked."""
        return _syscall("seccomp", self._SET_FILTER, self._NEW_LISTENER, self._header)


_kept: list[object] = []
"""What a call that is made later points at."""


_INTERNET, _DATAGRAMS = int(socket.AF_INET), int(socket.SOCK_DGRAM)
_SET_FLAGS, _LO = 0x8914, struct.pack("16sh14x", b"lo", 1 | 64)


def loopback() -> int:
    """Bring the loopback interface of this network namespace up."""
    probe = _socket(_INTERNET, _DATAGRAMS, 0)
    result = _ioctl(probe, _SET_FLAGS, _LO)
    _close(probe)
    return result


def loopback_up() -> None:
    """The same, or ``OSError``."""
    take([(loopback, ())])


def effective_capabilities() -> int:
    """This process's capabilities, as a set of bits; 0 where the system has none."""
    if sys.platform != "linux":
        return 0
    with open("/proc/self/status") as file:
        return next(int(line.split()[1], 16) for line in file if line.startswith("CapEff"))
