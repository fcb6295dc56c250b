"""The way into a jail: what runs between the spawner and a zygote, as root, before any author code.

The root and the outer namespaces are made before the zygote's user namespace, which locks the mounts and leaves an
import no power over them. Four processes, of which two stay:

    P0  takes new namespaces, maps the users of P1, tells the spawner who P1 is, and ends
    P1  first of the outer process namespace: builds the root, then is the stub that holds the lifeline
    P2  first of the inner one: loads the first filter and executes the zygote

Imports nothing but the standard library, since it runs before there is a jail.
"""

from __future__ import annotations

import json
import os
import select
import socket
import struct
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from aenv.engines.process import kernel, seccomp
from aenv.engines.process.kernel import BIND, NODEV, NOEXEC, NOSUID, PRIVATE, RDONLY, RECURSIVE, mount, restrict

SPAN = 10_000
"""Users of one spawner: 0 to 9,999 inside a jail."""
_FIRST_USERS, _RANGES = 1_000_000, 400_000
"""Where the users of sandboxes begin on this machine, and how many spans of them fit."""
_REMOUNT = 32
_DEVICES = ("null", "zero", "full", "random", "urandom")
SYSTEM = ("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/libx32")
"""Where this machine's programs and libraries are."""
_ETC = ("ld.so.cache", "ssl", "ca-certificates", "pki", "localtime", "alternatives", "mime.types", "terminfo", "fonts")
_ETC_OF_JAVA = "java-"
"""How directories begin in which distributions keep a part of each Java, which does not start without it."""
_LINKS = {"fd": "/proc/self/fd", "stdin": "/proc/self/fd/0", "stdout": "/proc/self/fd/1", "stderr": "/proc/self/fd/2"}
_ACCOUNTS = {
    "passwd": "root:x:0:0:root:/home/sandbox:/bin/sh\nsandbox:x:1000:1000:sandbox:/home/sandbox:/bin/sh\n",
    "group": "root:x:0:\nsandbox:x:1000:\n",
    "hosts": "127.0.0.1 localhost\n::1 localhost\n",
    "nsswitch.conf": "passwd: files\ngroup: files\nhosts: files dns\n",
}


def first_user(pid: int) -> int:
    """The first user of the span that belongs to a process. The last one is its proxy's."""
    return _FIRST_USERS + pid % _RANGES * SPAN


def python(executable: str, code: str, *, site: bool = False) -> list[str]:
    """A command that runs ``code`` with this very package, whatever package of its name the interpreter has.

    Without ``site``, the standard library and this package are all there is to import.
    """
    package = str(Path(__file__).resolve().parents[2])
    find = (
        "import sys, importlib.util as u; "
        f"s = u.spec_from_file_location('aenv', {package + '/__init__.py'!r}, "
        f"submodule_search_locations=[{package!r}]); "
        "m = sys.modules['aenv'] = u.module_from_spec(s); s.loader.exec_module(m); "
    )
    return [executable, "-I", *(() if site else ("-S",)), "-c", find + code]


Plan = dict[str, Any]


def main(control: int, lifeline: int, *tasks: int) -> None:
    """P0 of a zygote."""
    enter(control, lifeline, tasks, lambda plan: lambda: build_root(plan, plan["project"]), _become_zygote)


def enter(
    control: int,
    lifeline: int,
    tasks: Iterable[int],
    prepare: Callable[[Plan], Callable[[], None]],
    become: Callable[[socket.socket, Plan], None],
) -> None:
    """P0. The spawner's first message is the plan. ``prepare`` is done before anything is taken, and says how the root
    is built; ``become`` is what P2 goes on with."""
    for descriptor in tasks:
        os.write(descriptor, b"0")
        os.close(descriptor)
    spawner = socket.socket(fileno=control)
    plan = receive(spawner)
    build = prepare(plan)
    outer(plan["privileged"], network=plan["network"] != "full")
    stub = _inner(plan["privileged"], plan["users"], build, lambda: _stay(spawner, lifeline, plan, become))
    socket.send_fds(spawner, [struct.pack("I", 2) + b"{}"], [stub])
    os._exit(0)


def receive(sock: socket.socket) -> Any:
    """One message: its length in four bytes, then JSON."""
    return json.loads(receive_bytes(sock))


def receive_bytes(sock: socket.socket) -> bytes:
    """The same, as it came."""
    return _exactly(sock, struct.unpack("I", _exactly(sock, 4))[0])


def _exactly(sock: socket.socket, size: int) -> bytes:
    parts = bytearray()
    while len(parts) < size:
        part = sock.recv(min(size - len(parts), 65536))
        if not part:
            os._exit(0)  # who asked is gone
        parts += part
    return bytes(parts)


def outer(privileged: bool, *, network: bool) -> None:
    """New namespaces, owned by whoever runs the spawner. Without root, a user namespace is what makes it possible."""
    if not privileged:
        uid, gid = os.getuid(), os.getgid()
        kernel.unshare(kernel.NEWUSER)
        _write("/proc/self/setgroups", "deny")
        _write("/proc/self/uid_map", f"0 {uid} 1")
        _write("/proc/self/gid_map", f"0 {gid} 1")
    kernel.unshare(kernel.NEWNS | kernel.NEWPID | kernel.NEWIPC | kernel.NEWUTS | (kernel.NEWNET if network else 0))
    if network:
        kernel.loopback_up()
    mount("none", "/", None, RECURSIVE | PRIVATE)


def _inner(privileged: bool, users: int, build: Callable[[], None], stay: Callable[[], None]) -> int:
    """Fork P1, which builds and takes its user namespace; map its users; its pidfd."""
    ready, is_ready = os.pipe()
    mapped, is_mapped = os.pipe()
    processes = os.open("/proc", os.O_PATH | os.O_DIRECTORY)  # P1 changes the root under us
    pid = os.fork()
    if pid == 0:
        try:
            for descriptor in (ready, is_mapped, processes):
                os.close(descriptor)
            build()
            kernel.unshare(kernel.NEWUSER | kernel.NEWNS | kernel.NEWPID)
            os.write(is_ready, b"y")
            if not os.read(mapped, 1):
                os._exit(1)
            os.close(is_ready)
            os.close(mapped)
            if privileged:
                os.setgroups([])
            os.setresgid(0, 0, 0)
            os.setresuid(0, 0, 0)
            stay()
        except BaseException as exc:
            os.write(2, f"the jail could not be built: {exc}\n".encode())
        finally:
            os._exit(1)
    os.close(is_ready)
    os.close(mapped)
    pidfd = os.pidfd_open(pid)
    if not os.read(ready, 1):
        os._exit(1)
    os.close(ready)
    row = f"0 {users} {SPAN}" if privileged else "0 0 1"
    for name in ("uid_map", "gid_map"):
        file = os.open(f"{pid}/{name}", os.O_WRONLY, dir_fd=processes)
        os.write(file, row.encode())
        os.close(file)
    os.close(processes)
    os.write(is_mapped, b"y")
    os.close(is_mapped)
    return pidfd


def _stay(spawner: socket.socket, lifeline: int, plan: Plan, become: Callable[[socket.socket, Plan], None]) -> None:
    """P1 and P2: the one waits, the other becomes what the jail is for."""
    pid = os.fork()
    if pid == 0:
        os.close(lifeline)
        mount("proc", "/proc", "proc", NOSUID | NODEV | NOEXEC)
        kernel.no_new_privileges()
        if plan["seccomp"]:
            kernel.load_filter(seccomp.before_import(forkable=plan.get("forkable", False)))
        become(spawner, plan)
    spawner.close()
    for descriptor in (0, 1, 2):
        os.close(descriptor)
    kernel.not_dumpable()  # its own zygote may be hostile, and has the same user
    # Either end ends both: with this process, the first of its namespace, everything inside dies.
    select.select([lifeline, os.pidfd_open(pid)], [], [])
    os._exit(0)


def _become_zygote(spawner: socket.socket, plan: Plan) -> None:
    os.set_inheritable(spawner.fileno(), True)
    os.chdir("/project")
    command = [part.replace("{}", str(spawner.fileno())) for part in plan["command"]]
    os.execve(command[0], command, {"PATH": "/usr/local/bin:/usr/bin:/bin"})  # noqa: S606


def build_root(plan: Plan, shown: str, work: str = "/project") -> None:
    """Make the plan's root the root: this machine's programs and libraries, its binds (inside: outside), what is
    ``shown`` as the work directory, empty directories at its points, and nothing else. What is to be hidden of all that
    is empty."""
    root, binds = plan["root"], plan["binds"]
    mount("tmpfs", root, "tmpfs", NOSUID | NODEV, "mode=755,size=1m")
    for path in ("proc", "tmp", "dev/pts", "dev/shm", "etc", "stage", "home/sandbox", "run"):
        os.makedirs(f"{root}/{path}")
    for name, text in _ACCOUNTS.items():
        Path(root, "etc", name).write_text(text)
    for name, target in _LINKS.items():
        os.symlink(target, f"{root}/dev/{name}")
    os.symlink("pts/ptmx", f"{root}/dev/ptmx")
    for path in SYSTEM:
        if os.path.islink(path):
            os.symlink(os.readlink(path), root + path)
        elif os.path.isdir(path):
            _bind(root, path, path)
    names = {*_ETC, *(name for name in os.listdir("/etc") if name.startswith(_ETC_OF_JAVA))}
    etc = {f"/etc/{name}": f"/etc/{name}" for name in names | ({"resolv.conf"} if plan["network"] == "full" else set())}
    for inside, outside in sorted((etc | binds).items()):
        if os.path.exists(outside) and not os.path.exists(root + inside):  # unless another bind shows it already
            _bind(root, os.path.realpath(outside), inside)
    for inside in _below({path: path for path in SYSTEM} | binds, plan["hidden"]):
        if os.path.isdir(root + inside):
            mount("tmpfs", root + inside, "tmpfs", RDONLY | NOSUID | NODEV | NOEXEC, "mode=555,size=4k")
    for name in _DEVICES:
        _bind(root, f"/dev/{name}", f"/dev/{name}", NOSUID | NOEXEC)
    _bind(root, shown, work)
    mount("tmpfs", f"{root}/tmp", "tmpfs", NOSUID | NODEV, "mode=1777,size=64m")  # noqa: S108
    # Only where a process file system is visible as a whole may another be mounted later, and it shows nothing else.
    mount("proc", f"{root}/proc", "proc", NOSUID | NODEV | NOEXEC)
    os.chdir(root)
    kernel.pivot_root(".", ".")
    kernel.unmount(".")
    os.chdir("/")
    for path in plan["points"]:  # whatever link is on the way, it leads to no place of this machine any more
        os.makedirs(path, exist_ok=True)
    mount("none", "/", None, _REMOUNT | BIND | RDONLY | NOSUID | NODEV)


def _below(shown: dict[str, str], places: list[str]) -> Iterator[str]:
    """Where places of this machine are seen, of which what is shown (inside: outside) holds some."""
    for inside, outside in shown.items():
        real = os.path.realpath(outside)
        for place in places:
            if place.startswith(f"{real}/"):
                yield inside + place.removeprefix(real)


def _bind(root: str, source: str, target: str, flags: int = RDONLY | NOSUID | NODEV) -> None:
    where = root + target
    if os.path.isdir(source):
        os.makedirs(where, exist_ok=True)
    else:
        os.makedirs(os.path.dirname(where), exist_ok=True)
        if not os.path.lexists(where):
            Path(where).touch()
    mount(source, where, None, BIND | RECURSIVE)
    restrict(where, flags)


def rehearse(directory: str, act: Callable[[], None], *, privileged: bool) -> None:
    """Everything up to an instance, for whoever wants to know whether it is possible. ``act`` plays the instance."""
    root, project = f"{directory}/root", f"{directory}/project"
    os.makedirs(root)
    os.makedirs(project)
    os.chmod(directory, 0o755)  # noqa: S103
    outer(privileged, network=True)

    def fork() -> None:
        pid = os.fork()
        if pid == 0:
            act()
            os._exit(0)
        _, status = os.waitpid(pid, 0)
        os._exit(os.waitstatus_to_exitcode(status) != 0)

    plan = {"root": root, "binds": {}, "network": "none", "points": (), "hidden": ()}
    child = _inner(privileged, os.getuid() or 100_000, lambda: build_root(plan, project), fork)
    ended = os.waitid(os.P_PIDFD, child, os.WEXITED)
    if ended is None or ended.si_status != 0:
        os._exit(1)


def _write(file: str, text: str) -> None:
    with open(file, "w") as opened:
        opened.write(text)


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
