"""A look at an instance from outside, before anybody is told where it is: its own word counts for nothing."""

from __future__ import annotations

import os
from collections.abc import Mapping
from functools import cache

from aenv.errors import SandboxLost, StartFailed

_LONGEST = 64 * 1024
_CAPABILITIES = ("CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb")


def attest(
    pid: int,
    *,
    user: int,
    group: int,
    namespaces: tuple[str, ...],
    apart_from: int,
    filters: int,
    groups: Mapping[str, str],
    place: int = 2,
    nested: int = 3,
) -> None:
    """Raise unless the process is at that place in namespaces of its own, which neither this process nor
    ``apart_from`` is in, has that user and group and no other, no capability, the filters, and the control groups that
    were made for it. ``nested`` counts the process namespaces below this one: the stub's, the zygote's and its own."""
    try:
        status = dict(line.split(":\t", 1) for line in _read(f"/proc/{pid}/status").splitlines() if ":\t" in line)
        wrong = _wrong(status, user, group, filters, place, nested)
        others = {name: (_own(name), _namespace(apart_from, name)) for name in namespaces}
        shared = [name for name in namespaces if _namespace(pid, name) in others[name]]
        if _namespace(pid, "user") == _own("user"):
            shared.append("user")
        wrong += [f"it shares the {name} namespace" for name in shared]
        rows = (line.split(":", 2) for line in _read(f"/proc/{pid}/cgroup").splitlines())
        found = {controller: path for _, controllers, path in rows for controller in controllers.split(",")}
    except (OSError, KeyError, ValueError) as exc:
        raise SandboxLost(f"the instance ended before it was sealed ({exc})") from exc
    wrong += [f"it is not in its control group for {name}" for name in groups if found.get(name) != groups[name]]
    if wrong:
        raise StartFailed(f"the instance is not sealed: {'; '.join(wrong)}")


def first_of(pidfd: int, pid: int) -> bool:
    """Whether a handle is on the first process of the process namespace that ``pid`` is in."""
    try:
        facts = dict(line.split(":\t", 1) for line in _read(f"/proc/self/fdinfo/{pidfd}").splitlines())
        return facts["NSpid"].split()[-1] == "1" and _namespace(int(facts["Pid"]), "pid") == _namespace(pid, "pid")
    except (OSError, KeyError, ValueError):
        return False


def _wrong(status: Mapping[str, str], user: int, group: int, filters: int, place: int, nested: int) -> list[str]:
    places = status["NSpid"].split()
    checks = {
        "it has another user": status["Uid"].split() == [str(user)] * 4,
        "it has another group": status["Gid"].split() == [str(group)] * 4,
        f"it is not process {place} of its process namespace": places[-1] == str(place),
        "it has no process namespace of its own": len(places) == _depth() + nested,
        "it has groups": os.geteuid() != 0 or not status["Groups"].split(),
        "it has capabilities": not any(int(status[name], 16) for name in _CAPABILITIES),
        "it may gain privileges": status["NoNewPrivs"].strip() == "1",
        "it has threads": status["Threads"].strip() == "1",
        "its system calls are not filtered": not filters
        or (status["Seccomp"].strip() == "2" and int(status.get("Seccomp_filters", filters)) >= filters),
    }
    return [what for what, holds in checks.items() if not holds]


@cache
def _depth() -> int:
    with open("/proc/self/status") as file:
        return next(len(line.split()) - 1 for line in file if line.startswith("NSpid:"))


@cache
def _own(name: str) -> str:
    return _namespace("self", name)


def _read(file: str) -> str:
    """What the kernel says there, in one piece."""
    opened = os.open(file, os.O_RDONLY | os.O_CLOEXEC)
    try:
        return os.read(opened, _LONGEST).decode()
    finally:
        os.close(opened)


def _namespace(pid: int | str, name: str) -> str:
    return os.readlink(f"/proc/{pid}/ns/{name}")
