"""A real registry that asks for a password, in the network of a daemon."""

from __future__ import annotations

import contextlib
import re
import shutil
import signal
import socket
import struct
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

USER, PASSWORD = "ada", "hunter2-secret"
_HASHED = "$2b$04$2GMpyCRFSXrTS8dtphO4aObdpuC0npF.qNRl5mflfWxWDqEt84ipa"
_PATIENCE = 60.0


def network_of(address: str) -> str:
    """The network namespace of who listens on that socket."""
    path = address.removeprefix("unix:").removeprefix("//")
    with socket.socket(socket.AF_UNIX) as probe:
        probe.connect(path)
        pid, _, _ = struct.unpack("3i", probe.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i")))
    return f"/proc/{pid}/ns/net"


@contextlib.contextmanager
def locked_registry(address: str, folder: Path) -> Iterator[str]:
    """``127.0.0.1:port``, where the daemon at that address finds the registry until the block ends."""
    if not shutil.which("docker-registry"):
        pytest.skip("docker-registry is not installed: apt install docker-registry")
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "users").write_text(f"{USER}:{_HASHED}\n")
    (folder / "registry.yml").write_text(
        "version: 0.1\nlog: {level: info}\n"
        f"storage: {{filesystem: {{rootdirectory: {folder}/data}}}}\n"
        f"auth: {{htpasswd: {{realm: tests, path: {folder}/users}}}}\n"
        "http: {addr: '127.0.0.1:0'}\n"
    )
    process = subprocess.Popen(
        ["nsenter", f"--net={network_of(address)}", "docker-registry", "serve", str(folder / "registry.yml")],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        yield f"127.0.0.1:{_port(process)}"
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _port(process: subprocess.Popen[str]) -> int:
    """The port that it says it listens on; what it says after that is passed over, so that it never waits for us."""
    assert process.stderr is not None
    said: list[str] = []
    found: list[int] = []
    ready = threading.Event()

    def read() -> None:
        with contextlib.suppress(ValueError):
            for line in process.stderr or ():
                said.append(line)
                if match := re.search(r"listening on \S*:(\d+)", line):
                    found.append(int(match[1]))
                    ready.set()
        ready.set()

    threading.Thread(target=read, daemon=True).start()
    assert ready.wait(_PATIENCE), "the registry does not start"
    assert found, f"the registry ended: {''.join(said)}"
    return found[0]
