"""The two system call filters of a sandbox: one before the author's import, one when an instance seals itself.

They deny by list: author code is any program, and an allow-list would break the next library. What they deny is what
has no place in an environment and is most of the kernel's way out. Imports nothing but the standard library.
"""

from __future__ import annotations

import errno
import socket
import struct

from aenv.engines.process import kernel

_ARCHITECTURES = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
_CALLS: dict[str, tuple[int, int]] = {
    # name: (x86_64, aarch64); -1 where the architecture has none
    "ptrace": (101, 117),
    "process_vm_readv": (310, 270),
    "process_vm_writev": (311, 271),
    "kcmp": (312, 272),
    "keyctl": (250, 219),
    "add_key": (248, 217),
    "request_key": (249, 218),
    "bpf": (321, 280),
    "perf_event_open": (298, 241),
    "kexec_load": (246, 104),
    "kexec_file_load": (320, 294),
    "init_module": (175, 105),
    "finit_module": (313, 273),
    "delete_module": (176, 106),
    "io_uring_setup": (425, 425),
    "io_uring_enter": (426, 426),
    "io_uring_register": (427, 427),
    "userfaultfd": (323, 282),
    "open_by_handle_at": (304, 265),
    "name_to_handle_at": (303, 264),
    "reboot": (169, 142),
    "swapon": (167, 224),
    "swapoff": (168, 225),
    "acct": (163, 89),
    "quotactl": (179, 60),
    "settimeofday": (164, 170),
    "clock_settime": (227, 112),
    "clock_adjtime": (305, 266),
    "adjtimex": (159, 171),
    "syslog": (103, 116),
    "iopl": (172, -1),
    "ioperm": (173, -1),
    "modify_ldt": (154, -1),
    "uselib": (134, -1),
    "vhangup": (153, 58),
    "lookup_dcookie": (212, 18),
    "move_pages": (279, 239),
    "mbind": (237, 235),
    "set_mempolicy": (238, 237),
    "migrate_pages": (256, 238),
    "pidfd_getfd": (438, 438),
    "process_madvise": (440, 440),
    "memfd_secret": (447, -1),
    "mount": (165, 40),
    "umount2": (166, 39),
    "pivot_root": (155, 41),
    "chroot": (161, 51),
    "unshare": (272, 97),
    "setns": (308, 268),
    "open_tree": (428, 428),
    "move_mount": (429, 429),
    "fsopen": (430, 430),
    "fsconfig": (431, 431),
    "fsmount": (432, 432),
    "fspick": (433, 433),
    "mount_setattr": (442, 442),
    "sethostname": (170, 161),
    "setdomainname": (171, 162),
}
_SEALING = tuple(_CALLS)[tuple(_CALLS).index("mount") :]
"""What an instance needs in order to seal itself, and nobody needs afterwards."""
_NEVER = tuple(name for name in _CALLS if name not in _SEALING)
_CLONE, _UNSHARE, _CLONE3, _SOCKET = (56, 220), (272, 97), 435, (41, 198)
_FAMILIES = (socket.AF_UNIX, socket.AF_INET, socket.AF_INET6, getattr(socket, "AF_NETLINK", 16))
_LOAD, _IF_EQUAL, _IF_AT_LEAST, _IF_BITS, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
_ALLOW, _KILL, _ERRNO, _ASK = 0x7FFF0000, 0x80000000, 0x50000, 0x7FC00000
_X32 = 0x40000000


def available() -> bool:
    """Whether this machine's architecture is one that the filters know."""
    return kernel.MACHINE in _ARCHITECTURES


_UNUSED = kernel.NEWCGROUP | kernel.NEWTIME
"""Namespaces that nobody takes."""


def before_import(*, forkable: bool = False) -> bytes:
    """For a zygote: nobody needs these calls, or sockets of odd kinds, or namespaces that its forks do not take."""
    return _program(_NEVER, _UNUSED | (0 if forkable else kernel.NEWUSER))


def sealed() -> bytes:
    """For an instance: no mounts and no namespaces either, and no children that its zygote would have to reap."""
    return _program(_SEALING, kernel.NAMESPACES | kernel.CLONE_PARENT)


def forkable() -> bytes:
    """For an instance that may be forked while it lives: for a user namespace, which is the way to all others and to
    mounts, it has to ask."""
    return _program((), kernel.NAMESPACES | kernel.CLONE_PARENT, asking=True)


def _program(denied: tuple[str, ...], namespaces: int, *, asking: bool = False) -> bytes:
    column = 0 if kernel.MACHINE == "x86_64" else 1

    def ins(code: int, value: int, if_true: int = 0, if_false: int = 0) -> bytes:
        return struct.pack("HBBI", code, if_true, if_false, value)

    deny = ins(_RETURN, _ERRNO | errno.EPERM)
    lines = [
        ins(_LOAD, 4),
        ins(_IF_EQUAL, _ARCHITECTURES[kernel.MACHINE], 1, 0),
        ins(_RETURN, _KILL),
        ins(_LOAD, 0),
    ]
    if column == 0:
        lines += [ins(_IF_AT_LEAST, _X32, 0, 1), ins(_RETURN, _KILL)]
    # clone3 hides its flags in memory; told that it does not exist, libc falls back to clone.
    lines += [ins(_IF_EQUAL, _CLONE3, 0, 1), ins(_RETURN, _ERRNO | errno.ENOSYS)]
    for name in denied:
        if (number := _CALLS[name][column]) >= 0:
            lines += [ins(_IF_EQUAL, number, 0, 1), deny]
    if asking:
        lines += [
            ins(_IF_EQUAL, _UNSHARE[column], 0, 4),
            ins(_LOAD, 16),
            ins(_IF_BITS, kernel.NEWUSER, 0, 1),
            ins(_RETURN, _ASK),
            ins(_RETURN, _ALLOW),
        ]
    for call in (_CLONE, _UNSHARE):
        lines += [
            ins(_IF_EQUAL, call[column], 0, 4),
            ins(_LOAD, 16),
            ins(_IF_BITS, namespaces, 0, 1),
            deny,
            ins(_RETURN, _ALLOW),
        ]
    lines += [ins(_IF_EQUAL, _SOCKET[column], 0, len(_FAMILIES) + 3), ins(_LOAD, 16)]
    lines += [ins(_IF_EQUAL, family, len(_FAMILIES) - place, 0) for place, family in enumerate(_FAMILIES)]
    lines += [deny, ins(_RETURN, _ALLOW)]
    lines.append(ins(_RETURN, _ALLOW))
    return b"".join(lines)
