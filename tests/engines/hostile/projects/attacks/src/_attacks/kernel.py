"""Attacks on the kernel: calls that have no place in a sandbox, other ways to make them, mounts and namespaces.

The numbers are those of x86-64. Every call is made so that nothing happens where it is not refused: with a file, a
type or a descriptor that does not exist.
"""

import ctypes
import errno
import mmap
import os
import platform
import signal
import struct
import subprocess
from pathlib import Path
from typing import Any

from _attacks.apart import apart, in_a_jail, is_jail

_libc = ctypes.CDLL(None, use_errno=True)
_libc.syscall.restype = ctypes.c_long
_NOTHING = b"/aenv-no-such"
_FLAGS = {
    "user": 1 << 28,
    "mount": 1 << 17,
    "pid": 1 << 29,
    "network": 1 << 30,
    "ipc": 1 << 27,
    "hostname": 1 << 26,
    "control group": 1 << 25,
    "time": 1 << 7,
}
_BIND, _REMOUNT, _DETACH = 4096, 32, 2
_ONLY = ctypes.create_string_buffer(256)

CALLS: dict[str, tuple[Any, ...]] = {
    "ptrace": (101, 0, 0, 0, 0),
    "process_vm_readv": (310, "pid", 0, 0, 0, 0, 0),
    "process_vm_writev": (311, "pid", 0, 0, 0, 0, 0),
    "kcmp": (312, "pid", "pid", 0, 0, 0),
    "keyctl": (250, 0, -3, 0),
    "add_key": (248, b"user", b"aenv-hostile", b"x", 1, -2),
    "request_key": (249, b"user", b"aenv-no-such", None, 0),
    "bpf": (321, 0, _ONLY, 32),
    "perf_event_open": (298, _ONLY, 0, -1, -1, 0),
    "kexec_load": (246, 0, 0, None, 0x7FFFFFFF),
    "kexec_file_load": (320, -1, -1, 0, None, 0x7FFFFFFF),
    "init_module": (175, None, 0, b""),
    "finit_module": (313, -1, b"", 0),
    "delete_module": (176, b"aenv_no_such", 2048),
    "io_uring_setup": (425, 0, _ONLY),
    "io_uring_enter": (426, -1, 0, 0, 0, None, 0),
    "io_uring_register": (427, -1, 0, None, 0),
    "userfaultfd": (323, 0),
    "open_by_handle_at": (304, -1, None, 0),
    "name_to_handle_at": (303, -100, b"/", None, None, 0),
    "reboot": (169, 0, 0, 0, None),
    "swapon": (167, _NOTHING, 0),
    "swapoff": (168, _NOTHING),
    "acct": (163, _NOTHING),
    "quotactl": (179, 0x7FFFFFFF, None, 0, None),
    "settimeofday": (164, None, None),
    "clock_settime": (227, 0, None),
    "clock_adjtime": (305, 0, None),
    "adjtimex": (159, None),
    "syslog": (103, 10, None, 0),
    "iopl": (172, 0),
    "ioperm": (173, 0, 1, 0),
    "modify_ldt": (154, 0, _ONLY, 0),
    "move_pages": (279, 0, 0, None, None, None, 0),
    "mbind": (237, 0, 0, 0, None, 0, 0),
    "set_mempolicy": (238, 0, None, 0),
    "migrate_pages": (256, 0, 0, None, None),
    "pidfd_getfd": (438, -1, -1, 0),
    "process_madvise": (440, -1, None, 0, 0, 0),
    "memfd_secret": (447, 0x7FFFFFFF),
    "mount": (165, b"none", b"/", b"aenv-no-such", 0, None),
    "umount2": (166, _NOTHING, 0),
    "pivot_root": (155, _NOTHING, _NOTHING),
    "chroot": (161, _NOTHING),
    "unshare": (272, 0),
    "setns": (308, -1, 0),
    "open_tree": (428, -100, _NOTHING, 0),
    "move_mount": (429, -100, _NOTHING, -100, _NOTHING, 0),
    "fsopen": (430, b"aenv-no-such", 0),
    "fsconfig": (431, -1, 0, None, None, 0),
    "fsmount": (432, -1, 0, 0),
    "fspick": (433, -100, _NOTHING, 0),
    "mount_setattr": (442, -100, _NOTHING, 0, _ONLY, 32),
    "sethostname": (170, None, -1),
    "setdomainname": (171, None, -1),
}


def _call(number: int, *arguments: Any) -> int:
    converted = [
        ctypes.c_long(os.getpid() if argument == "pid" else argument) if isinstance(argument, (int, str)) else argument
        for argument in arguments
    ]
    ctypes.set_errno(0)
    result: int = _libc.syscall(ctypes.c_long(number), *converted)
    if result < 0:
        raise OSError(ctypes.get_errno(), "refused")
    return result


def _on_x86() -> None:
    if platform.machine() != "x86_64":
        raise RuntimeError("the numbers of the calls are for x86-64")


def reached_calls() -> list[str]:
    """Calls that got further than being refused."""
    _on_x86()
    reached = []
    for name, (number, *arguments) in CALLS.items():
        done = apart(lambda number=number, arguments=arguments: _call(number, *arguments))
        if "value" in done or ("errno" in done and done["errno"] not in (errno.EPERM, errno.ENOSYS)):
            reached.append(name)
    return reached


def made_namespaces() -> list[str]:
    """Namespaces that could be made, by each of the calls that make them."""
    _on_x86()
    made = []

    def clone(flag: int) -> None:
        if _call(56, flag | signal.SIGCHLD, 0, 0, 0, 0) == 0:
            os._exit(0)
        os.wait()

    def clone3(flag: int) -> None:
        if _call(435, struct.pack("8Q", flag, 0, 0, 0, signal.SIGCHLD, 0, 0, 0), 64) == 0:
            os._exit(0)
        os.wait()

    for name, flag in _FLAGS.items():
        ways = {"unshare": lambda flag=flag: _call(272, flag), "clone3": lambda flag=flag: clone3(flag)}
        if name != "time":  # where clone keeps the signal
            ways["clone"] = lambda flag=flag: clone(flag)
        made += [f"{way} {name}" for way, make in ways.items() if "value" in apart(make)]
    return made


def joined_namespaces() -> list[str]:
    """Namespaces of visible processes that could be entered, this process's own excepted."""
    joined = []
    for pid in sorted(name for name in os.listdir("/proc") if name.isdigit()):
        for kind in ("user", "mnt", "pid", "net", "ipc", "uts", "cgroup"):
            path = f"/proc/{pid}/ns/{kind}"
            if _namespace(path) == _namespace(f"/proc/self/ns/{kind}"):
                continue

            def join(path: str = path) -> None:
                opened = os.open(path, os.O_RDONLY)
                if _libc.setns(opened, 0) < 0:
                    raise OSError(ctypes.get_errno(), "refused")

            if "value" in apart(join):
                joined.append(path)
    return joined


def _namespace(path: str) -> str:
    try:
        return os.readlink(path)
    except OSError:
        return path


def other_abis() -> list[str]:
    """Calls by the gates of other kinds of programs, which a filter for one kind does not see."""
    _on_x86()

    def interrupt() -> int:
        # mov eax, 20 (getpid of i386); int 0x80; ret
        code = mmap.mmap(-1, 4096, prot=mmap.PROT_READ | mmap.PROT_WRITE | mmap.PROT_EXEC)
        code.write(b"\xb8\x14\x00\x00\x00\xcd\x80\xc3")
        address = ctypes.addressof(ctypes.c_char.from_buffer(code))
        return int(ctypes.CFUNCTYPE(ctypes.c_int)(address)())

    ways = {
        "int 0x80": interrupt,
        "x32": lambda: _call(0x40000000 | 39),
        "x32 bpf": lambda: _call(0x40000000 | 321, 0, None, 0),
    }
    # Anything but a violent end: even "there is no such call" would say that the filter let it through.
    return [name for name, way in ways.items() if apart(way).get("signal") not in (signal.SIGSYS, signal.SIGSEGV)]


def settings() -> list[str]:
    """Files of the kernel that can be written. What is written is what they say already."""
    found = []
    named = ("/proc/sysrq-trigger", "/proc/kcore", "/proc/1/oom_score_adj", "/proc/1/coredump_filter", "/proc/1/mem")
    for path in (*named, *(os.path.join(folder, name) for folder, _, names in os.walk("/proc/sys") for name in names)):
        try:
            descriptor = os.open(path, os.O_WRONLY)
        except OSError:
            continue
        with open(descriptor, "wb", buffering=0) as file:
            try:
                file.write(Path(path).read_bytes())
            except OSError:
                continue
        found.append(path)
    return found


def maps() -> list[str]:
    """Changes to who this process is mapped to."""
    changed = []
    for name, text in (("uid_map", "0 0 1"), ("gid_map", "0 0 1"), ("setgroups", "allow")):

        def write(name: str = name, text: str = text) -> None:
            with open(f"/proc/self/{name}", "w") as file:
                file.write(text)

        if "value" in apart(write):
            changed.append(name)
    return changed


def secrets_of_the_kernel() -> list[str]:
    """Files that tell about the machine's memory, keys or log."""
    found = []
    for path in (
        "/proc/kcore",
        "/proc/kmsg",
        "/dev/mem",
        "/dev/kmsg",
        "/dev/port",
        "/proc/vmallocinfo",
        "/proc/slabinfo",
    ):
        try:
            descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
            if os.read(descriptor, 64):
                found.append(path)
            os.close(descriptor)
        except OSError:
            continue
    addresses = {line.split()[0].strip("0") for line in Path("/proc/kallsyms").read_text().splitlines()[:50]}
    if addresses - {""}:
        found.append("/proc/kallsyms")
    if Path("/proc/keys").read_text().strip():
        found.append("/proc/keys")
    return found


def unlocked_mounts(paths: list[str]) -> list[str]:
    """Make read-only parts of the root writable, take them away, or see what is under them."""
    in_a_jail()

    def attempt() -> list[str]:
        got = []
        _unshare(1 << 17)
        for path in paths:
            encoded = path.encode()
            for flags in (_REMOUNT, _REMOUNT | _BIND):
                _libc.mount(None, encoded, None, ctypes.c_ulong(flags), None)
            try:
                probe = Path(path, ".aenv-hostile") if os.path.isdir(path) else Path(path)
                os.close(os.open(probe, os.O_WRONLY | os.O_CREAT | os.O_APPEND))
                got.append(f"wrote {path}")
            except OSError:
                pass
            if path != "/" and _libc.umount2(encoded, _DETACH) == 0:
                got.append(f"took {path} away")
        return got

    return list(apart(attempt).get("value", []))


def new_mounts() -> list[str]:
    """File systems of the kernel that could be mounted."""
    in_a_jail()

    def attempt() -> list[str]:
        got = []
        for flag in (1 << 17, 1 << 30, 1 << 25):
            _libc.unshare(flag)
        for kind in (
            "sysfs",
            "cgroup",
            "cgroup2",
            "devtmpfs",
            "debugfs",
            "tracefs",
            "securityfs",
            "bpf",
            "configfs",
            "ext4",
        ):
            for options in (None, b"none,name=aenv") if kind == "cgroup" else (None,):
                if _libc.mount(b"none", b"/tmp", kind.encode(), ctypes.c_ulong(0), options) == 0:
                    got.append(kind)
                    _libc.umount2(b"/tmp", _DETACH)
        return got

    return list(apart(attempt).get("value", []))


def control_groups() -> list[str]:
    """Files of control groups that open for writing, after mounting whichever hierarchies there are."""
    in_a_jail()

    def attempt() -> list[str]:
        got: list[str] = []
        for flag in (1 << 17, 1 << 25):
            _libc.unshare(flag)
        kinds = [(b"cgroup2", None)]
        kinds += [(b"cgroup", name.encode()) for name in ("memory", "pids", "cpu", "devices", "freezer", "cpuset")]
        for kind, options in kinds:
            if _libc.mount(b"none", b"/tmp", kind, ctypes.c_ulong(0), options) != 0:
                continue
            got += _writable("/tmp")
            _libc.umount2(b"/tmp", _DETACH)
        return got + _writable("/sys")

    return list(apart(attempt).get("value", []))


def _writable(root: str) -> list[str]:
    found = []
    for folder, _, names in os.walk(root):
        for name in names:
            try:
                os.close(os.open(os.path.join(folder, name), os.O_WRONLY))
            except OSError:
                continue
            found.append(os.path.join(folder, name))
        try:
            os.mkdir(os.path.join(folder, "aenv-hostile"))
            os.rmdir(os.path.join(folder, "aenv-hostile"))
            found.append(f"{folder}/")
        except OSError:
            continue
    return found


def under_proc() -> dict[str, Any]:
    """Take /proc away, and look at what was mounted there before: who is to be seen, and what can be opened of it."""
    in_a_jail()

    def attempt() -> dict[str, Any]:
        _unshare(1 << 17)
        if _libc.umount2(b"/proc", _DETACH) != 0:
            raise OSError(ctypes.get_errno(), "refused")
        from _attacks.processes import look_into

        pids = [name for name in os.listdir("/proc") if name.isdigit()]
        environments = [Path(f"/proc/{pid}/cmdline").read_text() for pid in pids]
        return {"first": look_into("1"), "commands": environments}

    return dict(apart(attempt).get("value", {}))


def escape_root(paths: list[str]) -> list[str]:
    """Leave the root by a second one inside it, as is done where chroot is all there is; which of these files can
    then be read."""

    def attempt() -> list[str]:
        os.makedirs("/tmp/second", exist_ok=True)
        here = os.open(".", os.O_RDONLY)
        os.chroot("/tmp/second")
        os.fchdir(here)
        for _ in range(64):
            os.chdir("..")
        os.chroot(".")
        return [path for path in paths if os.path.exists(path)]

    return list(apart(attempt).get("value", []))


def debug() -> list[str]:
    """Take hold of another process: a child of one's own, and the first of the namespace."""
    got = []
    child = subprocess.Popen(["/bin/sleep", "60"])
    try:
        for name, pid in (("child", child.pid), *((("first", 1),) if is_jail() else ())):
            attach = [apart(lambda pid=pid, way=way: _call(101, way, pid, 0, 0)) for way in (16, 0x4206)]
            got += [name for done in attach if "value" in done]
    finally:
        child.kill()
        child.wait()
    return got


def _unshare(flag: int) -> None:
    if _libc.unshare(flag) < 0:
        raise OSError(ctypes.get_errno(), "refused")
