"""Attacks on processes: seeing them, signalling them, looking into them, and taking what was left open."""

import os
import resource
import signal
import socket
import stat
import struct
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from _attacks.apart import apart, in_a_jail


def seen(marker: str) -> dict[str, Any]:
    """How many processes are in /proc, and which of them have a marker in their command line."""
    pids = [name for name in os.listdir("/proc") if name.isdigit()]
    marked = []
    for pid in pids:
        try:
            if marker.encode() in Path(f"/proc/{pid}/cmdline").read_bytes():
                marked.append(pid)
        except OSError:
            continue
    return {"number": len(pids), "marked": marked}


def find_signalled(pids: list[int]) -> list[int]:
    """Those of these processes that can be signalled, by any of the ways there are."""
    found = []
    ways: tuple[Callable[[int], object], ...] = (
        lambda pid: os.kill(pid, 0),
        lambda pid: os.killpg(pid, 0),
        lambda pid: os.close(os.pidfd_open(pid)),
    )
    for pid in pids:
        for reach in ways:
            try:
                reach(pid)
            except OSError:
                continue
            found.append(pid)
    return found


def kill_all() -> bool:
    """Kill whatever can be killed, except this process."""
    in_a_jail()
    os.kill(-1, signal.SIGKILL)
    return True


def kill_first() -> str:
    """End the first process of the namespace, by each signal."""
    in_a_jail()
    for number in range(1, 65):
        try:
            os.kill(1, number)
        except OSError:
            continue
        if not os.path.exists("/proc/1"):
            return f"signal {number}"
    return ""


def look_into(pid: str) -> list[str]:
    """What can be opened of another process: its memory, descriptors, root, environment."""
    base, found = f"/proc/{pid}", []
    for name in ("mem", "environ", "maps", "auxv", "pagemap", "stack", "syscall"):
        try:
            descriptor = os.open(f"{base}/{name}", os.O_RDONLY)
        except OSError:
            continue
        try:
            # Some open for anybody, and refuse when they are read; memory is not mapped at its beginning.
            if name == "mem" or os.pread(descriptor, 64, 0):
                found.append(name)
        except OSError:
            pass
        os.close(descriptor)
    for name in ("root", "cwd", "exe", "fd", "map_files", "ns/mnt", "ns/pid", "ns/net"):
        try:
            os.listdir(f"{base}/{name}") if name in ("fd", "map_files") else os.readlink(f"{base}/{name}")
        except OSError:
            continue
        found.append(name)
    return found


def descriptors() -> list[dict[str, Any]]:
    """What this process has open."""
    found = []
    for name in sorted(os.listdir("/proc/self/fd"), key=int):
        try:
            target = os.readlink(f"/proc/self/fd/{name}")
        except OSError:
            continue
        row: dict[str, Any] = {"fd": int(name), "target": target}
        if stat.S_ISSOCK(os.fstat(int(name)).st_mode):
            with socket.socket(fileno=os.dup(int(name))) as sock:
                row["family"] = sock.family.name
                row["listening"] = bool(sock.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN))
                row["name"] = str(sock.getsockname())
                row["peer"] = struct.unpack("3i", sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))[0]
        found.append(row)
    return found


def rise() -> list[str]:
    """Ask for more than the share: priority, real time, a safe place from the killer, higher limits."""
    got = []

    def limits() -> None:
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard + 1))

    def safe() -> None:
        with open("/proc/self/oom_score_adj", "w") as file:
            file.write("-1000")

    ways = {
        "priority": lambda: os.setpriority(os.PRIO_PROCESS, 0, -10),
        "real time": lambda: os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(1)),
        "spared by the killer": safe,
        "more descriptors": limits,
        "root": lambda: os.setresuid(0, 0, 0),
        "a group of root's": lambda: os.setgroups([0]),
    }
    for name, way in ways.items():
        if "value" in apart(way):
            got.append(name)
    return got


def core_limit() -> int:
    """How large a core dump of this process may be."""
    return resource.getrlimit(resource.RLIMIT_CORE)[0]


def ids() -> dict[str, Any]:
    """Who this process and a program that it starts are, as the kernel says."""
    with open("/proc/self/status") as file:
        own = file.read()
    show = "import sys; sys.stdout.write(open('/proc/self/status').read())"
    child = subprocess.run([sys.executable, "-I", "-c", show], capture_output=True, text=True, check=True).stdout
    return {"own": _status(own), "child": _status(child)}


def set_user_id_programs() -> dict[str, list[str]]:
    """Start programs that give their user root's rights; who they are once they run."""
    found = {}
    for path in (
        "/usr/bin/su",
        "/usr/bin/sudo",
        "/usr/bin/passwd",
        "/usr/bin/newgrp",
        "/usr/bin/mount",
        "/usr/bin/chsh",
    ):
        if os.path.exists(path) and os.stat(path).st_mode & stat.S_ISUID:
            process = subprocess.Popen(
                [path], stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
            )
            status = _status(Path(f"/proc/{process.pid}/status").read_text())
            found[path] = [*status["Uid"].split(), status["CapEff"]]
            process.kill()
            process.communicate()
    return found


def _status(text: str) -> dict[str, str]:
    return {name: value.strip() for name, _, value in (line.partition(":") for line in text.splitlines())}
