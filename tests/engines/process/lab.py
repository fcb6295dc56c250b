"""Help for tests that break the process engine: who its processes are, doors that stop author code where a test wants
it, and what is left behind on this machine."""

from __future__ import annotations

import asyncio
import functools
import gc
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from aenv import http
from aenv.engines.conformance import projects
from aenv.engines.process import cgroups, powers
from aenv.engines.process.engine import ProcessEngine
from aenv.engines.specs import complete
from aenv.errors import NotFound, from_wire
from aenv.models import EnvRef, Sandbox, SandboxSpec
from aenv.project import read
from tests import support

PATIENCE = 20.0
"""Seconds that anything may take on a busy machine before a test calls it stuck."""
eventually = functools.partial(support.eventually, patience=PATIENCE)
ROOT = Path(__file__).parents[3]
"""Of the repository, from where ``tests`` can be imported."""
LIMIT = 75.0
"""Seconds after which a test is ended by force."""


# Author code that stops where a test wants it


class Door:
    """A pipe in a datasource at which author code waits until a test lets it through."""

    CODE = "def wait(name):\n    with open(f'{DATA}/{name}', 'rb', buffering=0) as door:\n        door.read()\n"

    def __init__(self, path: Path) -> None:
        self.path = path
        os.mkfifo(path)
        path.chmod(0o666)
        self._held: list[int] = []

    def _knock(self) -> bool:
        try:
            self._held.append(os.open(self.path, os.O_WRONLY | os.O_NONBLOCK | os.O_CLOEXEC))
        except OSError:
            return False
        return True

    async def reached(self) -> None:
        """Wait until somebody stands at the door. It stays shut."""
        await eventually(f"somebody at {self.path.name}", self._knock)

    def open(self) -> None:
        """Let through who stands there now."""
        while self._held:
            os.close(self._held.pop())

    def remove(self) -> None:
        """Let everybody through, from now on."""
        self.path.unlink(missing_ok=True)
        self.path.write_bytes(b"")
        self.path.chmod(0o666)
        self.open()


class Ear:
    """A pipe in a datasource into which author code can say something, also in its last moments."""

    CODE = (
        "def tell(name, text):\n    with open(f'{DATA}/{name}', 'wb', buffering=0) as ear:\n"
        "        ear.write(text.encode())\n"
    )

    def __init__(self, path: Path) -> None:
        os.mkfifo(path)
        path.chmod(0o666)
        self._reading = os.open(path, os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)

    def heard(self) -> str:
        try:
            return os.read(self._reading, 65536).decode()
        except BlockingIOError:
            return ""

    def close(self) -> None:
        os.close(self._reading)


class Study:
    """A project of one module, and a datasource with doors and ears that both sides know."""

    def __init__(self, folder: Path, isolation: str) -> None:
        self.folder = folder
        self.data = folder / "data"
        self.data.mkdir(mode=0o755)
        self._jailed = isolation != "none"
        self._ears: list[Ear] = []
        self._doors: list[Door] = []
        self._projects = 0

    def door(self, name: str) -> Door:
        self._doors.append(Door(self.data / name))
        return self._doors[-1]

    def ear(self, name: str) -> Ear:
        self._ears.append(Ear(self.data / name))
        return self._ears[-1]

    def write(self, body: str, **deploy: Any) -> Path:
        """A project whose module begins with ``wait``, ``tell`` and a tool, and goes on with ``body``."""
        self._projects += 1
        root = self.folder / f"project{self._projects}"
        (root / "src").mkdir(parents=True)
        data = "/datasource" if self._jailed else str(self.data)
        head = (
            f"import os\nfrom aenv import *\nDATA = {data!r}\n{Door.CODE}{Ear.CODE}"
            "@register_tool\ndef echo(text: str) -> str:\n    return text\n"
        )
        (root / "src" / "custom_env.py").write_text(head + body)
        config = {"name": "study", "version": "1.0.0", "deployConfig": deploy}
        (root / "config.json").write_text(json.dumps(config))
        return root

    def spec(self, body: str = "", **fields: Any) -> SandboxSpec:
        return spec(self.write(body), datasource=str(self.data), **fields)

    def close(self) -> None:
        for door in self._doors:
            door.open()
        for ear in self._ears:
            ear.close()


# Sandboxes


def spec(root: Path, **fields: Any) -> SandboxSpec:
    """A spec of a project, completed as whoever resolves an env does."""
    fields.setdefault("startup_timeout", PATIENCE)
    return complete(SandboxSpec(env=EnvRef("any"), **fields), read(root))


def probe(**fields: Any) -> SandboxSpec:
    """A spec of the project whose tools tell how things look from inside."""
    return spec(projects.PROBE, **fields)


async def call(sandbox: Sandbox, tool: str, /, **arguments: Any) -> Any:
    """What a tool returns; a failure is raised."""
    token = f"Authorization: Bearer {sandbox.token}\r\n".encode() if sandbox.token else b""
    response = await http.request(
        "POST",
        sandbox.url,
        f"/tools/{tool}",
        headers=b"Content-Type: application/json\r\n" + token,
        body=json.dumps(arguments).encode(),
        retries=0,
    )
    body = json.loads(response.body)
    if response.status != 200:
        raise from_wire({**body, "message": body.get("error")})
    return body["data"]


async def works(engine: ProcessEngine, given: SandboxSpec | None = None) -> None:
    """A sandbox can be made, used and deleted."""
    id = f"works-{os.urandom(4).hex()}"
    sandbox = await engine.create(id, given or probe())
    assert await call(sandbox, "echo", text="still there") == "still there"
    await engine.delete(id)
    with pytest.raises(NotFound):
        await engine.get(id)


async def over(engine: ProcessEngine, id: str) -> Sandbox:
    """The sandbox once it has ended."""

    async def look() -> Sandbox | None:
        found = await engine.get(id)
        return found if found.state.over else None

    return await eventually(f"the end of {id}", look)


async def noticed(engine: ProcessEngine) -> None:
    """Wait until an engine knows that its spawner is gone."""
    connection = engine._connection
    assert connection is not None
    await eventually("the engine to notice", lambda: not connection.alive)


# Processes


class Process:
    """One process of the engine, as the machine sees it."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.command = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
        status = dict(
            line.split(":\t", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines() if ":\t" in line
        )
        self.parent = int(status["PPid"])
        self.places = [int(place) for place in status["NSpid"].split()]
        """Its number in each process namespace that it is in, ours first."""
        self.zombie = status["State"].startswith("Z")

    def kill(self, number: int = signal.SIGKILL) -> None:
        with suppress(ProcessLookupError):
            os.kill(self.pid, number)

    def __repr__(self) -> str:
        return f"{self.pid}{' (zombie)' if self.zombie else ''}: {self.command[-100:]}"


def processes(pids: Iterator[int] | set[int]) -> list[Process]:
    found = []
    for pid in sorted(pids):
        with suppress(OSError, KeyError):
            found.append(Process(pid))
    return found


def _space(process: Process) -> str:
    """The process namespace that it is in; empty when it has just ended."""
    with suppress(OSError):
        return os.readlink(f"/proc/{process.pid}/ns/pid")
    return ""


class Family:
    """The processes of the engines that live in a home."""

    def __init__(self, home: Path) -> None:
        self._home = home

    def spawners(self) -> list[Process]:
        found = []
        for file in self._home.glob("run/*/spawner.json"):
            with suppress(OSError, ValueError, KeyError):
                found.append(Process(json.loads(file.read_text())["pid"]))
        return found

    @property
    def spawner(self) -> Process:
        (found,) = self.spawners()
        return found

    def _children(self, parents: list[Process]) -> list[Process]:
        pids = {parent.pid for parent in parents}
        everybody = {int(name) for name in os.listdir("/proc") if name.isdigit()}
        return [process for process in processes(everybody) if process.parent in pids and not process.zombie]

    def stubs(self) -> list[Process]:
        """The outer process of each jail; none where there are no jails."""
        return [found for found in self._children(self.spawners()) if "process.jail" in found.command]

    def zygotes(self) -> list[Process]:
        found = self._children([*self.spawners(), *self.stubs()])
        return [child for child in found if "process.zygote" in child.command]

    def instances(self) -> list[Process]:
        """Each runtime, sealed or not."""
        return [found for found in self._children(self.zygotes()) if found.places[-1] != 1]

    def firsts(self) -> list[Process]:
        """The first process of each instance's namespace."""
        return [found for found in self._children(self.zygotes()) if found.places[-1] == 1]

    def get(self, role: str) -> Process:
        """The only process of a role."""
        if role == "spawner":
            return self.spawner
        (found,) = {
            "stub": self.stubs,
            "zygote": self.zygotes,
            "instance": self.instances,
            "first": self.firsts,
        }[role]()
        return found

    async def runtime(self, engine: ProcessEngine, id: str) -> Process:
        """The process that serves one sandbox."""
        if engine.isolation == "none":
            done = await engine.exec(id, ["sh", "-c", "echo $PPID"])
            return Process(int(done.stdout))
        done = await engine.exec(id, ["readlink", "/proc/self/ns/pid"])
        everybody = {int(name) for name in os.listdir("/proc") if name.isdigit()}  # a live fork has no zygote above it
        there = [
            found for found in processes(everybody) if found.places[-1] != 1 and _space(found) == done.stdout.strip()
        ]
        return min(there, key=lambda found: found.places[-1])


# What is left


def _descendants() -> set[int]:
    """This process, its children, and theirs."""
    everybody = processes({int(name) for name in os.listdir("/proc") if name.isdigit()})
    found, before = {os.getpid()}, set[int]()
    while found != before:
        before = found
        found = before | {process.pid for process in everybody if process.parent in before}
    return found


class Pen:
    """Control groups for this test process, so that whatever it starts can be counted, whoever its parent is now."""

    def __init__(self) -> None:
        self.roots: dict[str, Path] = {}
        self._before: dict[str, Path] = {}

    def enter(self) -> None:
        mounts, own = cgroups._mounts(), cgroups._own()
        if not {"memory", "pids", "cpu"} <= mounts.keys():
            return  # version 2 does not let a group that holds a process have groups with limits below it
        for controller in ("memory", "pids", "cpu", *([""] if "" in mounts else [])):
            before = mounts[controller] / own[controller].lstrip("/")
            pen = before / f"pen-{os.getpid()}"
            try:
                pen.mkdir(exist_ok=True)  # an old one with our number is empty
                (pen / "cgroup.procs").write_text(str(os.getpid()))
            except OSError:
                self.leave()
                return
            self._before[controller], self.roots[controller] = before, pen

    def leave(self) -> None:
        for controller, pen in self.roots.items():
            (self._before[controller] / "cgroup.procs").write_text(str(os.getpid()))
            cgroups.remove_soon(cgroups.Version1({controller: pen}))
        self.roots.clear()

    def processes(self) -> list[Process]:
        """Everything that runs because of this process, and the dead that it has not buried."""
        # Never more than what is ours: what is found here is killed when a test fails.
        pids = cgroups.Version1(self.roots).processes() if self.roots else set()
        return [process for process in processes(pids | _descendants()) if process.pid != os.getpid()]

    def groups(self) -> set[str]:
        roots = self.roots or {
            controller: mounted / cgroups._own().get(controller, "/").lstrip("/")
            for controller, mounted in cgroups._mounts().items()
        }
        return {str(path) for root in roots.values() for path in root.glob(f"{cgroups.PREFIX}*")}


class Leftovers:
    """What there is now that was not there when this was made."""

    def __init__(self, pen: Pen, home: Path) -> None:
        self._pen = pen
        self._home = home
        self._before = self._count()
        self.stuck = False
        self._watchdog = threading.Timer(LIMIT, self._bite)
        self._watchdog.daemon = True
        self._watchdog.start()

    def _bite(self) -> None:
        """End what the engine runs, so that a test that hangs for it fails instead."""
        self.stuck = True
        self.clear()

    def clear(self) -> None:
        """Remove by force what is there still, so that one failure does not become many."""
        for process in self._pen.processes():
            process.kill()
        for group in self._pen.groups() if self._pen.roots else ():  # elsewhere they may be somebody else's
            cgroups.remove_soon(cgroups.Version1({"": Path(group)}))

    async def finish(self) -> None:
        """Nothing may be left, and nothing may have hung."""
        self._watchdog.cancel()
        self._watchdog.join()
        try:
            assert not self.stuck, f"it was stuck for {LIMIT:g} s, and its processes were killed"
            await self.none()
        finally:
            self.clear()

    def _count(self) -> dict[str, set[str]]:
        gc.collect()
        run = self._home / "run"
        processes = self._pen.processes()
        return {
            "processes": {repr(process) for process in processes if not process.zombie},
            "zombies": {repr(process) for process in processes if process.zombie},
            "control groups": self._pen.groups(),
            "mounts": {line for line in Path("/proc/self/mounts").read_text().splitlines() if self._ours(line)},
            "files": {
                os.path.join(directory, name)
                for directory, folders, files in os.walk(run)  # which does not mind when something goes meanwhile
                for name in (*folders, *files)
                if name != ".lock"
            },
            "descriptors": set(_descriptors()),
        }

    def _ours(self, mount: str) -> bool:
        where = mount.split()[1]
        return where.startswith((str(self._home), "/project", "/stage", "/datasource"))

    def found(self, *kinds: str) -> dict[str, set[str]]:
        """By kind, all or those that are named."""
        now = self._count()
        return {
            kind: new
            for kind, before in self._before.items()
            if (not kinds or kind in kinds) and (new := now[kind] - before)
        }

    async def none(self, *kinds: str, patience: float = PATIENCE) -> None:
        """Wait until nothing is left, all or of those kinds. Zombies count only where they are named."""
        kinds = kinds or tuple(kind for kind in self._before if kind != "zombies")
        deadline = time.monotonic() + patience
        while found := self.found(*kinds):
            assert time.monotonic() < deadline, f"left behind: {found}"
            await asyncio.sleep(0.02)


def _descriptors() -> Iterator[str]:
    for name in os.listdir("/proc/self/fd"):
        with suppress(OSError):
            what = os.readlink(f"/proc/self/fd/{name}")
            if not what.startswith("/proc/"):
                yield f"{name} {what}"


# Owners


@contextmanager
def owner(
    script: str, home: Path, *arguments: str, cwd: Path | None = None, **variables: str
) -> Iterator[subprocess.Popen[str]]:
    """A program of its own that uses the engine. Its lines can be read; it is killed at the end."""
    process = subprocess.Popen(
        [sys.executable, "-u", "-c", script, *arguments],
        env={**os.environ, "AENV_HOME": str(home), **variables},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=cwd,
    )
    try:
        yield process
    finally:
        process.kill()
        process.wait()
        for stream in (process.stdin, process.stdout):
            assert stream is not None
            with suppress(BrokenPipeError):
                stream.close()


async def line(process: subprocess.Popen[str]) -> str:
    """The next line that an owner prints."""
    assert process.stdout is not None
    async with asyncio.timeout(PATIENCE):
        return (await asyncio.to_thread(process.stdout.readline)).rstrip("\n")


def isolation_or_skip(mode: str) -> str:
    """A mode of isolation, where this machine has what it is about."""
    if mode != "none":
        found = powers.probe()
        if not (found.namespaces and found.cgroups and found.privileged):
            pytest.skip(f"needs root, namespaces and control groups: {[lack.what for lack in found.lacks]} missing")
    return mode
