"""Real Docker, Podman and an image registry for tests: one of each for all the processes of a run.

They are shut in process, mount and network namespaces of their own, and end with the last process that uses them, also
when that is killed. The network of the machine is not touched. Containers have a bridge, and reach nothing beyond it.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from scripts import base_image as building

from aenv.engines.docker.daemon import Daemon, failure
from aenv.errors import AEnvError, NotFound
from tests.daemons import rootfs

PLACE = Path(tempfile.gettempdir()) / "aenv-daemons"
"""A directory for each run that has daemons. Whoever uses one holds its file ``users``."""
PATIENCE = 120.0
DEBIAN = "aenv-test/debian:bookworm"
BASE = "aenv-base:test"
GROUPS = Path("/sys/fs/cgroup")
REGISTRY = "127.0.0.1:5000"
"""Where the registry is, in the network of the daemons."""
_HOLDER = Path(__file__).parent / "holder.py"
_ENGINE_CONF = """\
[engine]
runtime = "runc"
[containers]
default_ulimits = ["nofile=20000:20000", "nproc=20000:20000"]
[network]
network_config_dir = "{folder}/podman/networks"
"""
_REGISTRIES_CONF = f"""\
unqualified-search-registries = ["docker.io"]
[[registry]]
location = "{REGISTRY}"
insecure = true
"""
_REGISTRY_CONF = """\
version: 0.1
log: {{level: error}}
storage: {{filesystem: {{rootdirectory: "{folder}/registry"}}, delete: {{enabled: true}}}}
http: {{addr: "{address}"}}
"""


class Ground:
    """The namespaces that daemons live in, and their directory."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def command(self, *words: str) -> list[str]:
        """A command as it is run in there."""
        pid = (self.folder / "holder").read_text()
        return ["nsenter", f"--target={pid}", "--pid", "--mount", "--net", "--", *words]

    def run(self, *words: str) -> str:
        """Run a command in there; what it prints."""
        done = subprocess.run(self.command(*words), capture_output=True, text=True, timeout=PATIENCE, check=True)
        return done.stdout

    def dockerd(self, *options: str) -> str:
        """The address of a Docker daemon, which is started when it is not there, with more options."""
        home = self.folder / "docker"
        address = f"unix://{home}/docker.sock"
        self.started(
            "docker",
            [
                *("dockerd", "--data-root", f"{home}/data", "--exec-root", f"{home}/exec"),
                *("--pidfile", f"{home}/docker.pid", "--host", address, "--group", "root"),
                *("--insecure-registry", REGISTRY),
                *options,
            ],
            lambda: answers(address),
        )
        return address

    def podman(self) -> str:
        """The address of a Podman service, which is started when it is not there."""
        home = self.folder / "podman"
        address = f"unix://{home}/podman.sock"
        self.started(
            "podman",
            [
                *("env", f"CONTAINERS_CONF={home}/containers.conf"),
                f"CONTAINERS_REGISTRIES_CONF={home}/registries.conf",
                *("podman", "--root", f"{home}/root", "--runroot", f"{home}/run", "--storage-driver", "overlay"),
                *("system", "service", "--time=0", address),
            ],
            lambda: answers(address),
            {
                "containers.conf": _ENGINE_CONF.format(folder=self.folder),
                "registries.conf": _REGISTRIES_CONF,
            },
        )
        return address

    def registry(self) -> str:
        """The address of a registry as the daemons see it; it is started when it is not there."""
        config = self.folder / "registry" / "config.yml"
        self.started(
            "registry",
            ["docker-registry", "serve", str(config)],
            lambda: self.listens(int(REGISTRY.rpartition(":")[2])),
            {"config.yml": _REGISTRY_CONF.format(folder=self.folder, address=REGISTRY)},
        )
        return REGISTRY

    def listens(self, port: int) -> bool:
        """Whether anything does in there, on the loopback."""
        probe = f"import socket; socket.create_connection(('127.0.0.1', {port}), 5)"
        tried = subprocess.run(self.command(sys.executable, "-c", probe), capture_output=True, check=False)
        return tried.returncode == 0

    def kill(self, name: str) -> None:
        """End a daemon at once, and wait until it has ended. What it started lives on."""
        with contextlib.suppress(subprocess.CalledProcessError):
            self.signal(name, "KILL")
        deadline = time.monotonic() + PATIENCE
        while self.runs(name):
            assert time.monotonic() < deadline, f"{name} does not end"
            time.sleep(0.01)

    def signal(self, name: str, signal: str) -> None:
        """Send a signal to a daemon."""
        self.run("kill", f"-{signal}", (self.folder / name / "started").read_text().strip())

    def runs(self, name: str) -> bool:
        """Whether a daemon that was started is still there, answering or not."""
        holder = (self.folder / "holder").read_text()
        with contextlib.suppress(OSError):
            pid = (self.folder / name / "started").read_text().strip() or "1"  # until it is written
            state = Path(f"/proc/{holder}/root/proc/{pid}/stat").read_text()
            return state.rpartition(")")[2].split()[0] != "Z"
        return False

    def started(
        self,
        name: str,
        command: list[str],
        is_up: Callable[[], bool],
        files: dict[str, str] | None = None,
        *,
        pass_fds: Sequence[int] = (),
    ) -> None:
        """Start a daemon, unless it is there, and wait until it is. It gets files, and descriptors of ours."""
        home = self.folder / name
        with locked(self.folder / f"{name}.starting"):
            if home.exists() and is_up():
                return
            home.mkdir(exist_ok=True)
            if not self.runs(name):
                for file, text in (files or {}).items():
                    (home / file).write_text(text)
                self._begin(home, command, pass_fds)
            deadline = time.monotonic() + PATIENCE
            while not is_up():
                said = (home / "log").read_text(errors="replace")[-4000:]
                assert not (home / "started").exists() or self.runs(name), f"{command[0]} ended:\n{said}"
                assert time.monotonic() < deadline, f"{command[0]} does not answer:\n{said}"
                time.sleep(0.05)

    def _begin(self, home: Path, command: list[str], pass_fds: Sequence[int]) -> None:
        (home / "started").unlink(missing_ok=True)
        # The shell tells its process id, as it is in there, and becomes the daemon, a child of the holder: nsenter
        # would stop with one that is stopped, and then keep it from ending with the others.
        told = ["setsid", "--fork", "sh", "-c", 'echo $$ > "$0"; exec "$@"', f"{home}/started", *command]
        with (home / "log").open("ab") as log:
            subprocess.run(
                self.command(*told),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                pass_fds=pass_fds,
                timeout=PATIENCE,
                check=True,
            )


_running: dict[Path, list[subprocess.Popen[bytes]]] = {}
"""The holders that this process started, by the directory of their ground."""


def answers(address: str) -> bool:
    """Whether a daemon does."""
    try:
        awaited(Daemon(address).greet())
    except AEnvError:
        return False
    return True


def missing(*programs: str) -> str:
    """Why daemons cannot be started here; empty when they can."""
    if sys.platform != "linux":
        return "needs Linux, for its namespaces"
    if os.geteuid() != 0:
        return "needs root, to start daemons in namespaces of their own"
    absent = [name for name in ("unshare", "nsenter", "setsid", "ip", *programs) if shutil.which(name) is None]
    return f"not installed: {', '.join(absent)}" if absent else ""


@contextlib.contextmanager
def ground(run: str) -> Iterator[Ground]:
    """The ground of a run, shared by all its processes, until the block ends. The last one leaves nothing there."""
    folder = PLACE / run[:8]  # Podman wants short paths
    with contextlib.ExitStack() as stack:
        with _place():
            for other in PLACE.iterdir():
                if other.is_dir() and other != folder:
                    _remove(other)
            folder.mkdir(exist_ok=True)
            users = stack.enter_context((folder / "users").open("a"))
            fcntl.flock(users, fcntl.LOCK_SH)
            if not _holds(folder):
                _hold(folder)
        try:
            yield Ground(folder)
        finally:
            with _place():
                users.close()
                _remove(folder)


def _hold(folder: Path) -> None:
    """Make the namespaces."""
    for name in ("docker/docker.pid", "*/started", "kube/*/started", "kube/port"):
        for stale in folder.glob(name):
            stale.unlink()
    command = ["unshare", "--pid", "--mount", "--net", "--fork", "--kill-child", "--mount-proc", sys.executable]
    process = subprocess.Popen(
        [*command, str(_HOLDER), str(folder / "users")],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )
    assert process.stdout is not None
    with process.stdout as said:
        words = said.readline()
    if words != b"ready\n":
        process.kill()
        process.wait()
        pytest.skip(f"no namespaces can be made: {words.decode(errors='replace').strip()}")
    pid = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()[0]
    (folder / "holder").write_text(pid)
    _running.setdefault(folder, []).append(process)


def _holds(folder: Path) -> bool:
    """Whether the first process of the namespaces lives."""
    try:
        pid = (folder / "holder").read_text()
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        return state != "Z" and str(folder).encode() in Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return False


def _remove(folder: Path) -> None:
    """End what lives in a directory that nobody uses any more, and remove it."""
    try:
        users = (folder / "users").open("a")
    except FileNotFoundError:
        shutil.rmtree(folder, ignore_errors=True)
        return
    with users:
        deadline = time.monotonic() + PATIENCE
        while True:
            try:
                fcntl.flock(users, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:  # somebody uses it, or its holder is about to end
                if _is_used(folder):
                    return
                assert time.monotonic() < deadline, f"{folder}: what holds it does not end"
                time.sleep(0.02)
        if _holds(folder):
            with contextlib.suppress(ProcessLookupError):
                os.kill(int((folder / "holder").read_text()), 9)
        while _holds(folder):
            assert time.monotonic() < deadline, f"{folder}: what holds it does not end"
            time.sleep(0.02)
        for process in _running.pop(folder, []):
            process.wait(PATIENCE)
        _remove_cgroups(folder)
        shutil.rmtree(folder)


def _is_used(folder: Path) -> bool:
    """Whether any process but the holder, who waits for it, holds the file."""
    inode = (folder / "users").stat().st_ino
    lines = Path("/proc/locks").read_text().splitlines()
    return any(f":{inode} " in line and "->" not in line and " READ " in line for line in lines)


def group_of(folder: Path) -> str:
    """The control group of a ground, below which the node of its cluster has its pods."""
    return f"aenv-test-{folder.name}"


def _remove_cgroups(folder: Path) -> None:
    """Remove the control groups of containers that were killed with their daemon."""
    ids = [f"docker/{path.name}" for path in (folder / "docker" / "data" / "containers").glob("*")]
    for path in (folder / "podman" / "root" / "overlay-containers").glob("*"):
        ids += [f"libpod_parent/{kind}-{path.name}" for kind in ("libpod", "libpod-conmon")]
    for group in (top / id for id in [*ids, group_of(folder)] for top in [GROUPS, *GROUPS.glob("*/")]):
        for inner, _, _ in os.walk(group, topdown=False):
            _remove_cgroup(inner)


def _remove_cgroup(path: str) -> None:
    """Remove a control group, the processes of which may take a moment to end."""
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline:
        try:
            os.rmdir(path)
        except FileNotFoundError:
            return
        except OSError:
            time.sleep(0.02)
        else:
            return


@contextlib.contextmanager
def _place() -> Iterator[None]:
    """The place of all runs, for this process alone; it is removed when nothing is there."""
    while (lock := _lock_of_place()) is None:
        pass
    try:
        yield
        if [path.name for path in PLACE.iterdir()] == ["lock"]:
            shutil.rmtree(PLACE)
    finally:
        os.close(lock)


def _lock_of_place() -> int | None:
    """The lock, held; None when who held it before removed it meanwhile."""
    PLACE.mkdir(mode=0o700, exist_ok=True)
    path = PLACE / "lock"
    lock = None
    with contextlib.suppress(FileNotFoundError):
        lock = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
        fcntl.flock(lock, fcntl.LOCK_EX)
        if path.stat().st_ino == os.fstat(lock).st_ino:
            return lock
    if lock is not None:
        os.close(lock)
    return None


@contextlib.contextmanager
def locked(path: Path) -> Iterator[None]:
    """For this process alone, for the length of a block."""
    with path.open("a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def awaited(work: Coroutine[Any, Any, Any]) -> Any:
    """The result of a coroutine, from wherever: a loop may run already."""
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(asyncio.run, work).result()


def base_image(address: str) -> str:
    """The base image on the daemon at that address, built of the sources as they are; once, on a daemon of this run."""
    home = Path(address.removeprefix("unix://")).parent
    run = home.parent
    if run.parent != PLACE:
        return str(awaited(_build(Daemon(address), None)))
    with locked(run / "building"):
        if not (home / "built").exists():
            awaited(_build(Daemon(address), run / "wheels"))
            (home / "built").touch()
    return BASE


async def _build(daemon: Daemon, wheels: Path | None) -> str:
    await debian_on(daemon)
    return await building.build(daemon, base=DEBIAN, tags=[BASE], folder=wheels)


def platform_image(address: str, base: str, name: str) -> None:
    """The image of ``aenv serve`` on the daemon at that address, built on its base image; once, on one of this run."""
    home = Path(address.removeprefix("unix://")).parent

    def build() -> None:
        awaited(building.build(Daemon(address), what="platform", base=base, tags=[name]))

    if home.parent.parent != PLACE:
        build()
        return
    with locked(home.parent / "building"):
        if not (home / "platform-built").exists():
            build()
            (home / "platform-built").touch()


async def debian_on(daemon: Daemon) -> str:
    """An image of Debian with Python on that daemon, and nothing of ours in it."""
    try:
        await daemon.ask("GET", f"/images/{DEBIAN}/json")
        return DEBIAN
    except NotFound:
        made = rootfs.archive()
        if not made.exists():
            pytest.skip("needs a root file system: run 'make components' as root, with mmdebstrap")
    query = {"fromSrc": "-", "repo": DEBIAN}
    headers = {"Content-Type": "application/x-tar"}
    async for line in daemon.lines(
        "POST", "/images/create", query=query, content=_pieces(made), headers=headers, patience=PATIENCE
    ):
        assert not failure(line), line
    return DEBIAN


async def _pieces(path: Path) -> AsyncIterator[bytes]:
    with path.open("rb") as file:
        while piece := file.read(1024 * 1024):
            yield piece
