"""A root file system of Debian with Python, to make images of without a network; made once, and kept in ``.cache``."""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
from pathlib import Path

from tests.support import ROOT

SUITE = "bookworm"
PACKAGES = ("ca-certificates", "python3", "python3-venv")
_OPTIONS = tuple(f"--dpkgopt=path-exclude=/usr/share/{name}/*" for name in ("doc", "info", "lintian", "locale", "man"))
_CACHE = ROOT / ".cache" / "rootfs"
_PATIENCE = 900


def archive() -> Path:
    """Where it is, or will be. The name tells what is in it."""
    key = hashlib.sha256(" ".join((SUITE, *PACKAGES, *_OPTIONS)).encode()).hexdigest()
    return _CACHE / f"{SUITE}-{key[:16]}.tar"


def make() -> None:
    """Make it, unless it is there."""
    made = archive()
    _CACHE.mkdir(parents=True, exist_ok=True)
    with (_CACHE / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # processes side by side make it once
        if made.exists():
            return
        if os.geteuid() != 0 or shutil.which("mmdebstrap") is None:
            sys.stderr.write("no root file system is made for tests of containers: that needs root, and mmdebstrap\n")
            return
        sys.stderr.write("making a root file system for tests of containers\n")
        half = made.with_suffix(f".{os.getpid()}.tar")
        include = f"--include={','.join(PACKAGES)}"
        try:
            done = subprocess.run(
                ["mmdebstrap", "--variant=minbase", include, *_OPTIONS, SUITE, str(half)],
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                timeout=_PATIENCE,
                check=False,
            )
            if done.returncode:
                raise SystemExit(f"mmdebstrap failed:\n{done.stdout[-4000:]}")
            half.rename(made)
        finally:
            half.unlink(missing_ok=True)
