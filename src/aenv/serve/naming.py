"""What a server is called, and where it is reached."""

from __future__ import annotations

import hashlib
import re
import socket
from contextlib import suppress
from pathlib import Path


def url_of(host: str, sock: socket.socket) -> str:
    """How a client reaches a socket."""
    if host in ("0.0.0.0", "::"):  # noqa: S104 - it is asked for, not offered
        host = _address(sock.family)
    return f"http://{f'[{host}]' if ':' in host else host}:{sock.getsockname()[1]}"


def _address(family: int) -> str:
    """This machine's own address, as others see it."""
    with suppress(OSError), socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect(("192.0.2.1" if family == socket.AF_INET else "2001:db8::1", 9))  # nothing is sent
        return str(probe.getsockname()[0])
    return socket.gethostname()


def own_name(store: str, home: Path) -> str:
    """What a server is called: a file has one server, wherever the machine is; others go by machine and home."""
    if not store or store.startswith("sqlite:"):
        return "server"
    machine = re.sub(r"[^A-Za-z0-9.-]+", "-", socket.gethostname())[:48].strip("-.") or "server"
    return f"{machine}-{hashlib.sha256(str(home.resolve()).encode()).hexdigest()[:8]}"


def shared_name(engine: str, key: bytes) -> str:
    """What all servers are called that reach the same sandboxes by an engine: those on one store, and nobody else."""
    return f"{engine.partition('=')[0][:32]}-{hashlib.sha256(key + engine.encode()).hexdigest()[:12]}"
