"""How the agent is compiled. Needs nothing but Python's own library: the build of a wheel runs it, too."""

from __future__ import annotations

import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from pathlib import Path

ARCHITECTURES = ("x86_64", "aarch64")
"""What a wheel has the program for, where there is a compiler."""
FLAGS = (
    *("-std=c11", "-O2", "-Wall", "-Wextra", "-fPIE", "-static-pie", "-s"),
    *("-fstack-protector-strong", "-D_FORTIFY_SOURCE=2", "-Wl,-z,relro,-z,now,-z,noexecstack"),
)
_LIMIT = 120.0


class NotMade(Exception):
    """It cannot be compiled, and why."""


def file_name(architecture: str) -> str:
    return f"aenv-agent-{architecture}"


def package(architecture: str) -> str:
    """What brings a compiler on Debian."""
    if architecture == platform.machine():
        return "gcc libc6-dev"
    return f"gcc-{architecture.replace('_', '-')}-linux-gnu"


def compiler(architecture: str) -> str | None:
    """A compiler that makes programs for Linux machines of that kind, when there is one."""
    native = platform.system() == "Linux" and architecture == platform.machine()
    names = ("gcc", "cc") if native else ()
    return next(filter(None, map(shutil.which, (*names, f"{architecture}-linux-gnu-gcc"))), None)


def digest(sources: Path) -> str:
    """Names this state of the source."""
    found = hashlib.sha256(" ".join(FLAGS).encode())
    for file in sorted(sources.glob("*.[ch]")):
        found.update(file.read_bytes())
    return found.hexdigest()[:16]


def make(sources: Path, architecture: str, target: Path) -> Path:
    """Compile it to ``target``, in one step; ``NotMade`` when that does not go."""
    found = compiler(architecture)
    if found is None:
        raise NotMade("this machine has no compiler for it")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".agent-", dir=target.parent) as folder:
            made = Path(folder) / "agent"
            command = [found, *FLAGS, "-o", str(made), *map(str, sorted(sources.glob("*.c")))]
            done = subprocess.run(command, capture_output=True, text=True, timeout=_LIMIT, check=False)
            if done.returncode:
                raise NotMade(f"{found} failed: {done.stderr.strip()[:1000]}")
            made.chmod(0o755)
            os.replace(made, target)
    except (OSError, subprocess.TimeoutExpired) as exc:
        raise NotMade(str(exc)) from exc
    return target
