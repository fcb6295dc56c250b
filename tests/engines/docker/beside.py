"""Help for tests of second containers: images without Python, and what both containers are asked."""

from __future__ import annotations

import io
import secrets
import tarfile
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from typing import Any

from aenv.engines.docker import second as module
from aenv.engines.docker.daemon import Daemon
from aenv.errors import NotFound
from aenv.models import Sandbox, SandboxSpec, Second
from tests.engines.docker.lab import Harbour, call, probe


def tar(files: Mapping[str, bytes], links: Mapping[str, str] | None = None) -> bytes:
    """The files of an image."""
    held = io.BytesIO()
    with tarfile.open(fileobj=held, mode="w") as archive:
        for name, data in files.items():
            entry = tarfile.TarInfo(name)
            entry.size, entry.mode = len(data), 0o755
            archive.addfile(entry, io.BytesIO(data))
        for name, target in (links or {}).items():
            entry = tarfile.TarInfo(name)
            entry.type, entry.linkname = tarfile.SYMTYPE, target
            archive.addfile(entry)
    return held.getvalue()


def with_links(image: bytes, *names: str) -> bytes:
    """An image of ``busybox`` with more of its tools."""
    held = io.BytesIO(image)
    with tarfile.open(fileobj=held, mode="a") as archive:
        for name in names:
            entry = tarfile.TarInfo(f"bin/{name}")
            entry.type, entry.linkname = tarfile.SYMTYPE, "busybox"
            archive.addfile(entry)
    return held.getvalue()


async def take(daemon: Daemon, name: str, image: bytes, **query: Any) -> None:
    """Have a daemon import an image. No layer of it is one of another image, which somebody may remove meanwhile:
    Podman then cannot find it."""
    held = io.BytesIO(image)
    with tarfile.open(fileobj=held, mode="a") as archive:
        archive.addfile(tarfile.TarInfo(name.rpartition("/")[2]))
    query = {"fromSrc": "-", "repo": name, "tag": "latest", **query}
    async for line in daemon.lines("POST", "/images/create", query=query, content=held.getvalue()):
        assert "error" not in line, line


@asynccontextmanager
async def imported(daemon: str, content: bytes, *changes: str, **query: str) -> AsyncIterator[str]:
    """An image with those files."""
    asked = Daemon(daemon)
    name = f"localhost/aenv-test-second-{secrets.token_hex(6)}"
    await take(asked, name, content, changes=changes, **query)
    try:
        yield f"{name}:latest"
    finally:
        with suppress(NotFound):
            await asked.ask("DELETE", f"/images/{name}:latest", query={"force": "1"})


def dual(image: str, **fields: Any) -> SandboxSpec:
    return probe(second=Second(image=image), **fields)


async def run(made: Sandbox, command: str | Sequence[str], **options: Any) -> str:
    """What a command in the second container prints; it must go well."""
    done = await call(made, "second", command=command, **options)
    assert done["returncode"] == 0, done
    printed: str = done["stdout"]
    return printed


async def inspected(harbour: Harbour, id: str) -> dict[str, Any]:
    """What the daemon says of a second container."""
    found: dict[str, Any] = await harbour.daemon.ask("GET", f"/containers/{module.name(harbour.state, id)}/json")
    return found


async def kill(harbour: Harbour, container: str) -> None:
    await harbour.daemon.ask("POST", f"/containers/{container}/kill", query={"signal": "SIGKILL"})
