"""Virtual environments of the peers: one for each requirements file, made once and kept in ``.cache/peers``."""

from __future__ import annotations

import fcntl
import hashlib
import shutil
import subprocess
import sys
import tomllib
import venv
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
CACHE = ROOT / ".cache" / "peers"
PATIENCE = 600


def peer(name: str) -> Path:
    """The interpreter of a peer of the benchmarks, with what its file in ``peers/`` lists."""
    return python(HERE / "peers" / f"{name}.txt")


def python(wanted: Path, *, with_package: bool = False) -> Path:
    """The interpreter of the environment for a requirements file, which is made when it is missing or out of date.

    ``with_package`` installs this repository in it, too.
    """
    home = CACHE / wanted.stem
    interpreter = _interpreter(home)
    CACHE.mkdir(parents=True, exist_ok=True)
    with open(home.with_suffix(".lock"), "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # processes side by side make it once
        if not is_made(wanted, with_package=with_package):
            sys.stderr.write(f"making the virtual environment {wanted.stem}\n")
            shutil.rmtree(home, ignore_errors=True)
            _make(home, interpreter, ["-r", str(wanted), *(("-e", str(ROOT)) if with_package else ())])
            (home / "made-from").write_text(_key(wanted, with_package))
    return interpreter


def is_made(wanted: Path, *, with_package: bool = False) -> bool:
    """Whether the environment is there and up to date."""
    home = CACHE / wanted.stem
    stamp = home / "made-from"
    return stamp.is_file() and stamp.read_text() == _key(wanted, with_package) and _interpreter(home).exists()


def _interpreter(home: Path) -> Path:
    return home / "bin" / "python"


def _key(wanted: Path, with_package: bool) -> str:
    """What an environment depends on. The repository is installed editable: its sources are not part of it."""
    parts = [wanted.read_text(), sys.version]
    if with_package:
        parts += [str(ROOT), *tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]]
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()


def _make(home: Path, interpreter: Path, what: list[str]) -> None:
    if uv := shutil.which("uv"):
        _run(uv, "venv", "--quiet", "--python", sys.executable, str(home))
        # Compiled, as pip leaves it: a peer's start is measured, and not its first one.
        _run(uv, "pip", "install", "--quiet", "--compile-bytecode", "--python", str(interpreter), *what)
    else:
        venv.create(home, with_pip=True, symlinks=True)
        _run(str(interpreter), "-m", "pip", "install", "--quiet", "--disable-pip-version-check", *what)


def _run(*command: str) -> None:
    done = subprocess.run(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=PATIENCE, check=False
    )
    if done.returncode:
        raise SystemExit(f"{' '.join(command)} failed:\n{done.stdout}")
