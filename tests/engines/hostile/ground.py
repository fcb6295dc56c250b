"""Help for the hostile tests: projects that attack, sandboxes of them, and what there is on this machine to be won."""

from __future__ import annotations

import asyncio
import functools
import hashlib
import json
import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import AsyncIterator, Awaitable, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from pathlib import Path
from typing import Any, TypeVar

import pytest

from aenv.engines.base import new_id
from aenv.engines.conformance.bench import Box
from aenv.engines.process import powers
from aenv.engines.process.engine import ProcessEngine
from aenv.errors import Unsupported
from aenv.models import EnvRef, SandboxSpec
from aenv.runtime.tokens import digest, new_owner_token

T = TypeVar("T")
PATIENCE = 60.0
"""Seconds that anything may take on a busy machine before a test calls it stuck."""
ATTACKS = Path(__file__).parent / "projects" / "attacks"
SMALL = {"memory": "128Mi", "ephemeralStorage": "32Mi", "cpu": "1"}


@functools.cache
def why_not() -> str:
    """Why strict isolation cannot be had here; empty when it can."""
    if sys.platform != "linux" or os.geteuid() != 0:
        return "strict isolation needs root on Linux"
    try:
        powers.choose("strict")
    except Unsupported as exc:
        return exc.message
    return ""


def project(folder: Path, module: str) -> Path:
    """A project of one module."""
    (folder / "src").mkdir(parents=True)
    (folder / "src" / "custom_env.py").write_text(module, encoding="utf-8")
    (folder / "config.json").write_text(json.dumps({"name": "hostile", "version": "1.0.0"}), encoding="utf-8")
    return folder


def attacks(folder: Path, plan: dict[str, Any] | None = None) -> Path:
    """The project of attacks, which carries out ``plan`` at its import."""
    shutil.copytree(ATTACKS, folder, ignore=shutil.ignore_patterns("__pycache__"))
    if plan is not None:
        (folder / "plan.json").write_text(json.dumps(plan), encoding="utf-8")
    return folder


def spec(path: Path, token: str = "", **fields: Any) -> SandboxSpec:
    given = {"startup_timeout": PATIENCE, "ttl": 600.0, "network": "none", "preload": False, **fields}
    owner = digest(token) if token else None
    return SandboxSpec(env=EnvRef("hostile", "1.0.0"), project=str(path), owner_token_sha256=owner, **given)


async def start(engine: ProcessEngine, path: Path, id: str = "", token: str = "", **fields: Any) -> Box:
    """A running sandbox of a project."""
    token = token or new_owner_token()
    return Box(await engine.create(id or new_id("hostile"), spec(path, token, **fields)), token)


async def soon(work: Awaitable[T], what: str, patience: float = PATIENCE) -> T:
    """The result of ``work``, which must not take for ever."""
    try:
        return await asyncio.wait_for(work, patience)
    except TimeoutError:
        pytest.fail(f"{what} did not end within {patience:g} s")


def processes_with(marker: str) -> list[int]:
    """Processes of this machine with that marker in their command line."""
    found = []
    for file in Path("/proc").glob("[0-9]*/cmdline"):
        with suppress(OSError):
            if marker.encode() in file.read_bytes():
                found.append(int(file.parent.name))
    return found


@contextmanager
def own_home() -> Iterator[Path]:
    """A home directory of the owner's, where engines keep their state too: short, since sockets are below it."""
    path = Path(tempfile.mkdtemp(prefix="ae", dir="/tmp"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HOME", str(path))
        patch.setenv("AENV_HOME", str(path / ".aenv"))
        yield path
    shutil.rmtree(path, ignore_errors=True)


class Treasure:
    """What an attack looks for: secrets of the owner, a process, and services of this machine."""

    def __init__(self, home: Path) -> None:
        self.home = home
        self.secret = secrets.token_hex(24)
        self.half = len(self.secret) // 2
        self.digest = hashlib.sha256(self.secret.encode()).hexdigest()
        self.marker = f"aenv-victim-{secrets.token_hex(8)}"
        self.abstract = f"aenv-hostile-{secrets.token_hex(8)}"
        self.files: list[Path] = []
        self.victim: subprocess.Popen[bytes] | None = None
        self.unix = home / "service.sock"
        self.ports: list[int] = []
        self.datagrams: list[bytes] = []
        self.visits: list[int] = []
        """Ports on which somebody came."""
        self._sockets: list[socket.socket] = []

    def __enter__(self) -> Treasure:
        (self.home / ".ssh").mkdir(mode=0o700)
        self._hide(self.home / ".ssh" / "id_ed25519")
        self._hide(self.home / "notes.txt", 0o644)
        self._hide(Path("/root", f".{self.marker}"))
        self._hide(Path("/tmp", f"{self.marker}.txt"), 0o644)
        self.victim = subprocess.Popen(
            [sys.executable, "-c", "import time; time.sleep(600)", self.marker],
            env={**os.environ, "OWNERS_SECRET": self.secret},
        )
        for _ in range(2):
            self._serve()
        self._listen(socket.AF_UNIX, str(self.unix))
        os.chmod(self.unix, 0o777)
        self._listen(socket.AF_UNIX, "\0" + self.abstract)
        return self

    def __exit__(self, *_: object) -> None:
        for file in self.files:
            file.unlink(missing_ok=True)
        for sock in self._sockets:
            with suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)
            sock.close()
        if self.victim is not None:
            self.victim.kill()
            self.victim.wait()

    @property
    def addresses(self) -> list[list[Any]]:
        """The services by every address of this machine: whoever gets through gets no further than here."""
        hosts = ["127.0.0.1", "localhost", "::1", "0.0.0.0"]
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            with suppress(OSError):
                probe.connect(("192.0.2.1", 9))  # sends nothing: it only says which address would be used
                hosts.append(probe.getsockname()[0])
        return [[host, port] for host in hosts for port in self.ports]

    def _hide(self, file: Path, mode: int = 0o600) -> None:
        file.write_text(f"key {self.secret}\n")
        file.chmod(mode)
        self.files.append(file)

    def _serve(self) -> None:
        """A web service on every address of this machine; it answers with the secret."""
        sock = socket.create_server(("0.0.0.0", 0))
        port = sock.getsockname()[1]
        self.ports.append(port)
        self._sockets.append(sock)
        body = f"served {self.secret}".encode()
        answer = b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\nConnection: close\r\n\r\n%b" % (len(body), body)

        def serve() -> None:
            with suppress(OSError):
                while True:
                    connection, _ = sock.accept()
                    self.visits.append(port)
                    with connection, suppress(OSError):
                        connection.settimeout(PATIENCE)
                        connection.recv(65536)
                        connection.sendall(answer)

        threading.Thread(target=serve, daemon=True).start()
        datagrams = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        datagrams.bind(("0.0.0.0", port))
        self._sockets.append(datagrams)

        def receive() -> None:
            with suppress(OSError):
                while data := datagrams.recv(4096):
                    self.datagrams.append(data)

        threading.Thread(target=receive, daemon=True).start()

    def _listen(self, family: socket.AddressFamily, address: str) -> None:
        sock = socket.socket(family)
        sock.bind(address)
        sock.listen()
        self._sockets.append(sock)


@asynccontextmanager
async def strict_engine(home: Path, isolation: str = "strict") -> AsyncIterator[ProcessEngine]:
    """An engine. A spawner that no longer answers is killed, so that the next test can run."""
    engine = ProcessEngine(isolation=isolation)
    try:
        yield engine
    finally:
        closing = asyncio.create_task(engine.close())
        await asyncio.wait((closing,), timeout=PATIENCE)
        if not closing.done():
            for file in home.glob(".aenv/run/*/spawner.json"):
                with suppress(OSError, ValueError):
                    os.kill(json.loads(file.read_text())["pid"], signal.SIGKILL)
            await closing
            pytest.fail("the spawner did not end")


class Outside:
    """The spawner and its control groups, as this machine sees them."""

    def __init__(self, home: Path) -> None:
        (file,) = home.glob(".aenv/run/*/spawner.json")
        facts = json.loads(file.read_text())
        self.pid: int = facts["pid"]
        self.groups = {name: Path(path) for name, path in facts["control_groups"].items()}

    def leaves(self, kind: str = "i") -> set[Path]:
        root = self.groups.get("pids", self.groups.get(""))
        assert root is not None
        return set(root.glob(f"{kind}[0-9]*"))

    def memory(self) -> int:
        """MiB that the spawner uses."""
        rows = Path(f"/proc/{self.pid}/status").read_text().splitlines()
        return next(int(row.split()[1]) for row in rows if row.startswith("VmRSS")) // 1024

    def descriptors(self) -> int:
        """How many the spawner has open."""
        return len(os.listdir(f"/proc/{self.pid}/fd"))
