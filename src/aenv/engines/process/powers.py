"""What this machine lets a sandbox have, found by trying, and what to say about what it does not."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from functools import cache
from typing import NamedTuple

from aenv.engines.process import cgroups, freezer, kernel, loops, seccomp
from aenv.engines.process.jail import python, rehearse
from aenv.engines.process.seal import Seal
from aenv.errors import Invalid, Unsupported, did_you_mean

MODES = ("auto", "strict", "none")
_SYS_ADMIN = 1 << 21
_FREEZER = "run as root, on Linux 5.2 or newer with version 2 of control groups mounted; nothing else depends on it"


class Lack(NamedTuple):
    """Something a sandbox cannot have here."""

    what: str
    why: str
    fix: str


class Powers(NamedTuple):
    """The parts of a sandbox's isolation that are to be had, and why others are not."""

    privileged: bool = False
    """Real root: each instance has a user of its own."""
    namespaces: bool = False
    """Its own processes, mounts, network, hostname and root, which is read-only and minimal."""
    overlay: bool = False
    """Its own files by overlay; otherwise the project is copied."""
    cgroups: bool = False
    """Limits on cpu, memory and processes; otherwise by rlimits as far as they go."""
    seccomp: bool = False
    lacks: tuple[Lack, ...] = ()

    @property
    def no_volumes(self) -> str:
        """Why sandboxes can have no volumes; nothing when they seem to be able to."""
        if not self.namespaces:
            return "without namespaces nothing can be mounted in a sandbox"
        if not self.privileged:
            return "only root can mount a file system that keeps to its size"
        return loops.missing()

    @property
    def no_suspending(self) -> str:
        """Why sandboxes that nobody calls go on running; nothing when they can stand still."""
        if not (self.namespaces and self.cgroups):
            return "it takes namespaces and control groups"
        return freezer.missing()


def choose(isolation: str, found: Powers | None = None) -> Powers:
    """The powers to use under a mode; ``strict`` raises when anything is missing."""
    if isolation not in MODES:
        raise Invalid(f"isolation {isolation!r} is not known", hint=did_you_mean(isolation, MODES))
    if isolation == "none":
        return Powers()
    found = probe() if found is None else found
    if isolation == "strict" and found.lacks:
        missing = "; ".join(f"{lack.what}: {lack.why}" for lack in found.lacks)
        fixes = "; ".join(dict.fromkeys(lack.fix for lack in found.lacks))
        raise Unsupported(f"strict isolation cannot be had here: {missing}", hint=fixes)
    return found


@cache
def probe() -> Powers:
    """Try each part for real, once, in processes that end at once."""
    if sys.platform != "linux":
        why = f"{sys.platform} has neither namespaces nor control groups"
        return Powers(lacks=(Lack("isolation", why, "run on Linux, or in a container on this machine"),))
    privileged = os.geteuid() == 0 and bool(kernel.effective_capabilities() & _SYS_ADMIN)
    refused = _refused(privileged) | _refused_groups()
    fixes = {
        "users": "run as root",
        "namespaces": _namespace_fix(),
        "overlay": "use Linux 5.11 or newer",
        "limits": _cgroup_fix(privileged),
        "filters": "use an x86-64 or arm64 Linux with seccomp",
    }
    if "namespaces" in refused:
        refused["users"] = "it takes namespaces"
    elif not privileged:
        refused["users"] = "only root can give each instance a user of its own"
    lacks = tuple(Lack(what, refused[what], fix) for what, fix in fixes.items() if what in refused)
    return Powers(
        privileged,
        namespaces="namespaces" not in refused,
        overlay=not {"namespaces", "overlay"} & refused.keys(),
        cgroups="limits" not in refused,
        seccomp="filters" not in refused,
        lacks=lacks,
    )


def explain() -> list[tuple[str, str, str, str]]:
    """Rows for ``aenv doctor``: name, ``ok`` or ``warn``, what is so, and how to mend it."""
    found = probe()
    lacks = {lack.what: lack for lack in found.lacks}
    if "isolation" in lacks:
        return [("isolation", "warn", lacks["isolation"].why, lacks["isolation"].fix)]
    promises = {
        "namespaces": "own processes, network, hostname and a minimal read-only root",
        "users": "a user of its own for each instance",
        "overlay": "files by overlay",
        "limits": "cpu, memory and processes by control groups",
        "filters": "system calls filtered by seccomp",
    }
    without = {
        "namespaces": "instances are plain processes that see this machine",
        "users": "instances run as you, in a user namespace where there is one",
        "overlay": "each instance gets a copy of the project",
        "limits": "memory is limited by an rlimit only, cpu and processes are not",
        "filters": "system calls are not filtered",
    }
    rows = []
    for what, promise in promises.items():
        if lack := lacks.get(what):
            rows.append((f"isolation: {what}", "warn", f"{without[what]} ({lack.why})", lack.fix))
        else:
            rows.append((f"isolation: {what}", "ok", promise, ""))
    if why := found.no_volumes:
        rows.append(("volumes", "warn", f"services of the process engine keep nothing: {why}", loops.HINT))
    else:
        rows.append(("volumes", "ok", "storage of services, each kept to its size", ""))
    if why := found.no_suspending:
        rows.append(("suspend", "warn", f"sandboxes that nobody calls go on running: {why}", _FREEZER))
    else:
        rows.append(("suspend", "ok", "sandboxes that nobody calls stand still, where that is asked for", ""))
    return rows


def _namespace_fix() -> str:
    for file in ("/proc/sys/kernel/unprivileged_userns_clone", "/proc/sys/user/max_user_namespaces"):
        try:
            with open(file) as opened:
                if opened.read().strip() == "0":
                    return f"write a number over 0 to {file}"
        except OSError:
            continue
    restricted = "/proc/sys/kernel/apparmor_restrict_unprivileged_userns"
    if os.path.exists(restricted):
        return f"run as root, or write 0 to {restricted}"
    return "run as root; in a container, give it CAP_SYS_ADMIN and an unmasked /proc"


def _cgroup_fix(privileged: bool) -> str:
    if privileged:
        return "mount the control groups of cpu, memory and pids writable"
    return "run as root, or under 'systemd-run --user --scope -p Delegate=yes'"


def _refused_groups() -> dict[str, str]:
    try:
        cgroups.make(f"probe-{os.getpid()}").remove()
    except OSError as exc:
        return {"limits": exc.strerror or str(exc)}
    return {}


def _refused(privileged: bool) -> dict[str, str]:
    """What a process of its own could not take, and why."""
    command = python(sys.executable, f"from aenv.engines.process.powers import _try; _try({privileged})")
    done = subprocess.run(command, capture_output=True, text=True, check=False, env={})
    try:
        found: dict[str, str] = json.loads(done.stdout)
    except ValueError:
        words = done.stderr.strip().rpartition("\n")[2] or f"the probe ended with {done.returncode}"
        return dict.fromkeys(("namespaces", "overlay", "filters"), words)
    return found


def _try(privileged: bool) -> None:
    """In a process of its own: take what a sandbox takes, and print what was refused."""
    attempts: dict[str, Callable[[], str]] = {
        "namespaces": lambda: _rehearsed(privileged, overlay=False),
        "overlay": lambda: _rehearsed(privileged, overlay=True),
        "filters": lambda: _apart(_filtered),
    }
    if not attempts["overlay"]():  # which takes the namespaces, too
        del attempts["namespaces"], attempts["overlay"]
    refused = {what: why for what, attempt in attempts.items() if (why := attempt())}
    json.dump(refused, sys.stdout)


def _rehearsed(privileged: bool, *, overlay: bool) -> str:
    directory = tempfile.mkdtemp(prefix="aenv-probe-")
    try:
        return _apart(lambda: rehearse(directory, lambda: _sealed(privileged, overlay), privileged=privileged))
    finally:
        shutil.rmtree(directory, ignore_errors=True)


def _sealed(privileged: bool, overlay: bool) -> None:
    """Give up everything that an instance gives up, which nothing comes after."""
    user = 1000 if privileged else 0
    order = {"network": "none", "overlay": overlay, "user": user, "memory": None, "seccomp": False, "storage": 2**20}
    try:
        seal = Seal(order, 0)
        seal.fit(order, [os.open("/dev/null", os.O_RDONLY), os.open("/dev/null", os.O_RDONLY), 2], [])
        kernel.take(seal.steps)
    except (OSError, AttributeError) as exc:  # the second, where the C library has no such function
        os.write(2, f"{exc}\n".encode())
        os._exit(1)


def _filtered() -> None:
    if not seccomp.available():
        raise OSError(f"the filters do not know {kernel.MACHINE}")
    kernel.no_new_privileges()
    kernel.load_filter(seccomp.before_import())
    kernel.load_filter(seccomp.sealed())


def _apart(attempt: Callable[[], None]) -> str:
    """Do it in a child; why it failed, or nothing."""
    heard, said = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.dup2(said, 2)
        try:
            attempt()
        except OSError as exc:
            os.write(2, f"{exc.strerror or exc}\n".encode())
            os._exit(1)
        os._exit(0)
    os.close(said)
    with os.fdopen(heard) as words:
        last = words.read().strip().rpartition("\n")[2]
    _, status = os.waitpid(pid, 0)
    return (last or f"it ended with {status}") if status else ""
