"""An instance, from its fork to its end: it seals itself, says so, is told its secrets, and serves.

It is the second process of its namespace; the first only lets the kernel reap (``kernel.Inits``). So a tool's orphans
are reaped without taking exit codes away from the author's own children, and no generator of random numbers believes
that it is in the process it was made in.
"""

from __future__ import annotations

import os
import random
import resource
import shutil
import socket
import sys
import tempfile
import traceback
from collections.abc import Iterable
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from aenv.engines.process import kernel, seccomp
from aenv.engines.process.jail import mount_overlay, receive
from aenv.engines.process.kernel import BIND, NODEV, NOEXEC, NOSUID, mount
from aenv.engines.process.wire import send
from aenv.errors import AEnvError

if TYPE_CHECKING:
    from aenv.project import Project
    from aenv.runtime.forked import Prepared

PROXY_PORT = 3128
_FILES = 4096
"""Most descriptors an instance may have open."""
_LOOPBACK = "http://127.0.0.1"


class Birth:
    """Everything that a zygote makes once, so that its children need not."""

    def __init__(self, found: Project, prepared: Prepared, *, jailed: bool) -> None:
        self._found = found
        self._prepared = prepared
        self._jailed = jailed
        self._last_capability = kernel.last_capability() if jailed else 0
        self._filter = seccomp.sealed() if seccomp.available() else b""
        files = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
        self._files = _FILES if files == resource.RLIM_INFINITY else min(_FILES, files)

    def begin(self, order: dict[str, Any], descriptors: list[int], handles: list[int]) -> NoReturn:
        """What a zygote's child does, from its first instruction on. ``handles`` are sent along when it is sealed."""
        listener, report, log, *tasks = descriptors
        try:
            for descriptor in tasks:
                os.write(descriptor, b"0")
            _keep(listener, report, log, *handles)
            channel = socket.socket(fileno=report)
            if self._jailed:
                self._seal(order, channel, handles)
            else:
                self._settle(order)
                send(channel, {"sealed": True})
            self._serve(socket.socket(fileno=listener), channel)
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stderr.flush()
            os._exit(1)

    def _seal(self, order: dict[str, Any], report: socket.socket, handles: list[int]) -> None:
        """Give up everything that a sandbox must not have. The spawner looks from outside whether it is so."""
        network, user = order["network"], order["user"]
        kernel.unshare(kernel.NEWNS | kernel.NEWIPC | kernel.NEWUTS | (kernel.NEWNET if network != "full" else 0))
        if network != "full":
            kernel.loopback_up()
        if network == "proxy":
            proxy = socket.create_server(("127.0.0.1", PROXY_PORT), backlog=128)
            handles.append(proxy.detach())
        kernel.set_hostname(order["id"])
        self._mount(order, user)
        kernel.bound_capabilities(self._last_capability)
        if user:
            os.setgroups([])
            os.setresgid(user, user, user)
            os.setresuid(user, user, user)
        kernel.clear_capabilities()
        self._limit(order)
        kernel.no_new_privileges()
        if order["seccomp"]:
            kernel.load_filter(self._filter)
        send(report, {"sealed": True}, handles)
        for handle in handles:
            os.close(handle)

    def _mount(self, order: dict[str, Any], user: int) -> None:
        mount("proc", "/proc", "proc", NOSUID | NODEV | NOEXEC)
        mount("devpts", "/dev/pts", "devpts", NOSUID | NOEXEC, "newinstance,ptmxmode=0666,mode=620")
        mount("tmpfs", "/stage", "tmpfs", NOSUID | NODEV, f"size={order['storage']},nr_inodes=100k,mode=755")
        for name, target in (("tmp", "/tmp"), ("home", "/home/sandbox"), ("shm", "/dev/shm")):  # noqa: S108
            os.mkdir(f"/stage/{name}", 0o700)
            os.chown(f"/stage/{name}", user, user)
            mount(f"/stage/{name}", target, None, BIND)
        if order["overlay"]:
            for name in ("upper", "work"):
                os.mkdir(f"/stage/{name}", 0o755)
                os.chown(f"/stage/{name}", user, user)
            mount_overlay()
        else:
            shutil.copytree("/project", "/stage/project", symlinks=True)
            for directory, _, files in os.walk("/stage/project"):
                for path in (directory, *(os.path.join(directory, name) for name in files)):
                    os.chown(path, user, user, follow_symlinks=False)
            mount("/stage/project", "/project", None, BIND)
        kernel.unmount("/stage")
        os.chdir("/project")

    def _settle(self, order: dict[str, Any]) -> None:
        """Where nothing can be sealed: a copy of the project, limits, and a group of processes to be ended by."""
        os.setsid()
        shutil.copytree(order["project"], order["directory"], symlinks=True, dirs_exist_ok=True)
        os.chdir(order["directory"])
        self._limit(order)
        if order["seccomp"]:
            kernel.no_new_privileges()
            kernel.load_filter(self._filter)

    def _limit(self, order: dict[str, Any]) -> None:
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        resource.setrlimit(resource.RLIMIT_NOFILE, (self._files, self._files))
        if (memory := order["memory"]) is not None:
            mapped = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
            resource.setrlimit(resource.RLIMIT_AS, (mapped + memory, mapped + memory))

    def _serve(self, listener: socket.socket, report: socket.socket) -> NoReturn:
        """Be the runtime: take the instance's own variables, import what is not imported yet, and serve."""
        _reseed()
        try:
            self._prepared.serve(listener, report, lambda: receive(report), lambda facts: send(report, facts))
        except AEnvError as exc:
            send(report, {"failed": exc.to_wire()})
            sys.stderr.write(f"error: {exc}\n")
            sys.stderr.flush()
            os._exit(1)
        except SystemExit as exc:
            os._exit(exc.code if isinstance(exc.code, int) else 1)
        os._exit(0)


def _keep(listener: int, report: int, log: int, *handles: int) -> None:
    """Standard output and error go to the log; every descriptor that is not named is closed."""
    nothing = os.open(os.devnull, os.O_RDONLY)
    for source, target in ((nothing, 0), (log, 1), (log, 2)):
        os.dup2(source, target)
    kept = sorted({listener, report, *handles})
    for low, high in pairwise([2, *kept, os.sysconf("SC_OPEN_MAX")]):
        os.closerange(low + 1, high)


def _reseed() -> None:
    """No two instances draw the same numbers."""
    random.seed()
    vars(tempfile)["_name_sequence"] = None
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        numpy.random.seed()
    torch = sys.modules.get("torch")
    if torch is not None:
        torch.seed()


def proxy_variables(allowed: Iterable[str]) -> dict[str, str]:
    """What tells a program inside where its only way out is. What is allowed out there is not looked for in here."""
    listed = {address.rpartition(":")[0].strip("[]") for address in allowed}
    own = ",".join(name for name in ("localhost", "127.0.0.1", "::1") if name not in listed)
    url = f"{_LOOPBACK}:{PROXY_PORT}"
    names = ("http_proxy", "https_proxy", "all_proxy")
    return {spelling: url for name in names for spelling in (name, name.upper())} | {
        "no_proxy": own,
        "NO_PROXY": own,
    }
