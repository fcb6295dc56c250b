"""Virtual environments of the peers: one for each file in ``requirements/``, with this repository installed in it too.

Each is made once, kept in ``.cache/peers`` and made again when what it was made from has changed.
"""

from __future__ import annotations

import fcntl
import functools
import hashlib
import shutil
import subprocess
import sys
import tomllib
import venv
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
CACHE = ROOT / ".cache" / "peers"
PATIENCE = 600


class Unavailable(Exception):
    """The environment could not be made; the text says why."""


@functools.cache
def _attempt(name: str) -> Path | Unavailable:
    try:
        return _ready(name)
    except Unavailable as exc:
        return exc


def python(name: str) -> Path:
    """The interpreter of a peer's environment. Raises ``Unavailable``, every time without trying again."""
    found = _attempt(name)
    if isinstance(found, Unavailable):
        raise found
    return found


def _ready(name: str) -> Path:
    wanted = HERE / "requirements" / f"{name}.txt"
    home = CACHE / name
    interpreter = home / "bin" / "python"
    stamp = home / "made-from"
    key = _key(wanted)
    CACHE.mkdir(parents=True, exist_ok=True)
    with open(CACHE / f"{name}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # test processes side by side make it once
        if not (stamp.is_file() and stamp.read_text() == key and interpreter.exists()):
            shutil.rmtree(home, ignore_errors=True)
            _make(home, interpreter, wanted)
            stamp.write_text(key)
    return interpreter


def _key(wanted: Path) -> str:
    """What an environment depends on. The repository is installed editable: its sources are not part of it."""
    ours = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    parts = [wanted.read_text(), sys.version, str(ROOT), *ours]
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()


def _make(home: Path, interpreter: Path, wanted: Path) -> None:
    if uv := shutil.which("uv"):
        _run(uv, "venv", "--quiet", "--python", sys.executable, str(home))
        install = (uv, "pip", "install", "--quiet", "--compile-bytecode", "--python", str(interpreter))
    else:
        venv.create(home, with_pip=True, symlinks=True)
        options = ("--quiet", "--disable-pip-version-check", "--retries", "1")
        install = (str(interpreter), "-m", "pip", "install", *options)
    _run(*install, "-r", str(wanted), "-e", str(ROOT))


def _run(*command: str) -> None:
    try:
        done = subprocess.run(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=PATIENCE, check=False
        )
    except subprocess.TimeoutExpired:
        raise Unavailable(f"{' '.join(command)} took more than {PATIENCE} s") from None
    if done.returncode:
        raise Unavailable(f"{' '.join(command)} failed: {done.stdout.strip()[-600:]}")
