"""Virtual environments of the peers: one for each file in ``peers/``, made once and kept in ``.cache/peers``."""

from __future__ import annotations

import hashlib
import shutil
import subprocess
import sys
import venv
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
CACHE = ROOT / ".cache" / "peers"
PATIENCE = 600


def python(name: str) -> Path:
    """The interpreter of the peer's environment, which is made when it is missing or out of date."""
    wanted = HERE / "peers" / f"{name}.txt"
    home = CACHE / name
    key = hashlib.sha256(wanted.read_bytes() + sys.version.encode()).hexdigest()
    stamp = home / "made-from"
    interpreter = home / "bin" / "python"
    if stamp.is_file() and stamp.read_text() == key and interpreter.exists():
        return interpreter
    sys.stderr.write(f"making the virtual environment of {name}\n")
    shutil.rmtree(home, ignore_errors=True)
    _make(home, interpreter, wanted)
    stamp.write_text(key)
    return interpreter


def _make(home: Path, interpreter: Path, wanted: Path) -> None:
    if uv := shutil.which("uv"):
        _run(uv, "venv", "--quiet", "--python", sys.executable, str(home))
        # Compiled, as pip leaves it: a peer's start is measured, and not its first one.
        _run(uv, "pip", "install", "--quiet", "--compile-bytecode", "--python", str(interpreter), "-r", str(wanted))
    else:
        venv.create(home, with_pip=True, symlinks=True)
        _run(str(interpreter), "-m", "pip", "install", "--quiet", "-r", str(wanted))


def _run(*command: str) -> None:
    done = subprocess.run(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=PATIENCE, check=False
    )
    if done.returncode:
        raise SystemExit(f"{' '.join(command)} failed:\n{done.stdout}")
