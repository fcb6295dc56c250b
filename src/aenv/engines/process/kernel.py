"""System calls of Linux that Python has no name for. Imports nothing but the standard library."""

from __future__ import annotations

import ctypes
import fcntl
import mmap
import os
import platform
import signal
import socket
import struct
import sys

NEWNS, NEWUTS, NEWIPC, NEWUSER, NEWPID, NEWNET = 1 << 17, 1 << 26, 1 << 27, 1 << 28, 1 << 29, 1 << 30
NEWCGROUP, NEWTIME = 1 << 25, 1 << 7
NAMESPACES = NEWNS | NEWUTS | NEWIPC | NEWUSER | NEWPID | NEWNET | NEWCGROUP | NEWTIME
CLONE_PARENT = 1 << 15
RDONLY, NOSUID, NODEV, NOEXEC = 1, 2, 4, 8
BIND, RECURSIVE, PRIVATE = 4096, 16384, 1 << 18

_DETACH = 2
_PR_SET_DUMPABLE, _PR_CAPBSET_DROP, _PR_SET_CHILD_SUBREAPER, _PR_SET_NO_NEW_PRIVS = 4, 24, 36, 38
_CAPABILITY_VERSION_3 = 0x20080522
_AT_FDCWD, _AT_RECURSIVE = -100, 0x8000
_NUMBERS = {
    "x86_64": {"mount_setattr": 442, "pivot_root": 155},
    "aarch64": {"mount_setattr": 442, "pivot_root": 41},
}
MACHINE = platform.machine()

_libc = ctypes.CDLL(None, use_errno=True)
_python = ctypes.PyDLL(None, use_errno=True)
"""The same, with the interpreter's lock held during a call."""


def _checked(result: int, what: str) -> None:
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")


def _syscall(name: str, *arguments: object) -> None:
    _checked(_libc.syscall(ctypes.c_long(_NUMBERS[MACHINE][name]), *arguments), name)


def unshare(flags: int) -> None:
    _checked(_libc.unshare(flags), "unshare")


def setns(descriptor: int, kind: int) -> None:
    _checked(_libc.setns(descriptor, kind), "setns")


def prctl(option: int, value: int = 0) -> None:
    arguments = (ctypes.c_ulong(argument) for argument in (value, 0, 0, 0))
    _checked(_libc.prctl(option, *arguments), f"prctl {option}")


def become_subreaper() -> None:
    """Orphans below this process become its children."""
    prctl(_PR_SET_CHILD_SUBREAPER, 1)


def no_new_privileges() -> None:
    prctl(_PR_SET_NO_NEW_PRIVS, 1)


def not_dumpable() -> None:
    """Nobody with fewer rights may look into this process."""
    prctl(_PR_SET_DUMPABLE, 0)


def mount(source: str, target: str, kind: str | None = None, flags: int = 0, data: str | None = None) -> None:
    encoded = [None if text is None else os.fsencode(text) for text in (source, target, kind, data)]
    result = _libc.mount(*encoded[:3], ctypes.c_ulong(flags), encoded[3])
    _checked(result, f"mount {kind or source} on {target}")


def unmount(target: str) -> None:
    _checked(_libc.umount2(os.fsencode(target), _DETACH), f"unmount {target}")


def restrict(target: str, flags: int) -> None:
    """Add flags such as read-only to a mount and all below it."""
    attributes = struct.pack("QQQQ", flags, 0, 0, 0)
    _syscall("mount_setattr", _AT_FDCWD, os.fsencode(target), _AT_RECURSIVE, attributes, ctypes.c_size_t(32))


def pivot_root(new: str, old: str) -> None:
    _syscall("pivot_root", os.fsencode(new), os.fsencode(old))


def last_capability() -> int:
    with open("/proc/sys/kernel/cap_last_cap") as file:
        return int(file.read())


def bound_capabilities(last: int) -> None:
    """Nothing that this process executes may have a capability."""
    drop = _libc.prctl
    for capability in range(last + 1):
        _checked(drop(_PR_CAPBSET_DROP, capability, 0, 0, 0), "prctl")


def clear_capabilities() -> None:
    """Give up those that this process has."""
    header = struct.pack("Ii", _CAPABILITY_VERSION_3, 0)
    _checked(_libc.capset(header, bytes(24)), "capset")


def fork() -> int:
    """Fork without what Python does around it, which touches hundreds of pages that the child would have to copy.

    Right only where there is one thread, and nobody asked to be told of forks (``os.register_at_fork``).
    """
    pid: int = _python.fork()
    _checked(pid, "fork")
    return pid


class Inits:
    """First processes for new process namespaces, which do nothing but let the kernel reap for them.

    Each shares the memory of its maker and waits in ``pause`` for ever, so it costs next to nothing. It ignores
    SIGCHLD, and the kernel then reaps the orphans of its namespace. It dies by SIGKILL, and its namespace with it.
    """

    _VM = 0x100
    _STACK = 16 * 1024

    def __init__(self) -> None:
        self._stack = mmap.mmap(-1, self._STACK)
        # All of them may stand on one stack: pause writes nothing but the same return address.
        self._top = ctypes.addressof(ctypes.c_char.from_buffer(self._stack)) + self._STACK - 64
        self._pause = ctypes.cast(_libc.pause, ctypes.c_void_p)

    def make(self) -> int:
        """The process id of a new one, in a new process namespace."""
        before = signal.signal(signal.SIGCHLD, signal.SIG_IGN)
        try:
            flags = self._VM | NEWPID | signal.SIGCHLD
            pid: int = _libc.clone(self._pause, ctypes.c_void_p(self._top), flags, None)
        finally:
            signal.signal(signal.SIGCHLD, before)
        _checked(pid, "clone")
        return pid


def loopback_up() -> None:
    """Bring the loopback interface of this network namespace up."""
    set_flags, up_and_running = 0x8914, 1 | 64
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        fcntl.ioctl(probe, set_flags, struct.pack("16sh14x", b"lo", up_and_running))


def set_hostname(name: str) -> None:
    socket.sethostname(name[:63])


def load_filter(program: bytes) -> None:
    """Load a seccomp filter: classic BPF, eight bytes an instruction."""
    set_seccomp, filter_mode = 22, 2
    code = ctypes.create_string_buffer(program, len(program))
    header = struct.pack("HxxxxxxQ", len(program) // 8, ctypes.addressof(code))
    holder = ctypes.create_string_buffer(header, len(header))
    arguments = (ctypes.c_ulong(value) for value in (filter_mode, ctypes.addressof(holder), 0, 0))
    _checked(_libc.prctl(set_seccomp, *arguments), "seccomp")


def effective_capabilities() -> int:
    """This process's capabilities, as a set of bits; 0 where the system has none."""
    if sys.platform != "linux":
        return 0
    with open("/proc/self/status") as file:
        return next(int(line.split()[1], 16) for line in file if line.startswith("CapEff"))
