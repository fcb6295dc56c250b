"""An image of programs of this machine and of the libraries that they are linked with, where none can be pulled."""

from __future__ import annotations

import io
import re
import shutil
import subprocess
import tarfile
from pathlib import Path

from aenv.engines.docker.daemon import Daemon, failure

_LIBRARY = re.compile(r"(/\S+) \(0x")


def pack(*programs: str) -> bytes:
    """A root file system with those programs, as a tar archive."""
    files = {}
    for name in programs:
        found = shutil.which(name)
        assert found, f"{name} is not installed"
        files[f"/bin/{name}"] = Path(found).resolve()
        linked = subprocess.run(["ldd", found], capture_output=True, text=True, timeout=60, check=True).stdout
        files |= {path: Path(path).resolve() for path in _LIBRARY.findall(linked)}
    held = io.BytesIO()
    with tarfile.open(fileobj=held, mode="w") as archive:
        for folder in ("data", "tmp"):
            entry = tarfile.TarInfo(folder)
            entry.type, entry.mode = tarfile.DIRTYPE, 0o1777
            archive.addfile(entry)
        for place, path in files.items():
            archive.add(path, place.lstrip("/"), recursive=False)
    return held.getvalue()


async def make(daemon: Daemon, name: str, *programs: str) -> None:
    """An image of that name."""
    query = {"fromSrc": "-", "repo": name, "changes": ("ENV PATH=/bin",)}
    async for line in daemon.lines("POST", "/images/create", query=query, content=pack(*programs)):
        assert not failure(line), line
