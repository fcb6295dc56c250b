"""Virtual environments of the peers: one for each requirements file, made once and kept in ``.cache/peers``."""

from __future__ import annotations

import fcntl
import hashlib
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
CACHE = ROOT / ".cache" / "peers"
PATIENCE = 600


def peer(name: str) -> Path:
    """The interpreter of a peer of the benchmarks, with what its file in ``peers/`` lists."""
    return python(HERE / "peers" / f"{name}.txt")


def python(wanted: Path, *, with_package: bool = False, version: str = "") -> Path:
    """The interpreter of the environment for a requirements file, which is made when it is missing or out of date.

    ``with_package`` installs this repository in it, too. ``version`` is that of Python, such as 3.12, where it is not
    to be the one that runs this: see ``another``. A file ``NAME.no-deps.txt`` beside ``NAME.txt`` has packages that are
    installed after it and without what they depend on: trainers whose requirements are those of a machine with GPUs,
    and of whose modules the tests import some.
    """
    home = _home(wanted)
    interpreter = _interpreter(home)
    CACHE.mkdir(parents=True, exist_ok=True)
    with open(f"{home}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # processes side by side make it once
        if not is_made(wanted, with_package=with_package, version=version):
            sys.stderr.write(f"making the virtual environment {wanted.stem}\n")
            shutil.rmtree(home, ignore_errors=True)
            base = another(version) if version else Path(sys.executable)
            if base is None:
                raise SystemExit(f"{wanted.stem} needs Python {version}, and there is none")
            _make(base, home, wanted, with_package=with_package)
            (home / "made-from").write_text(_key(wanted, with_package, version))
    return interpreter


def is_made(wanted: Path, *, with_package: bool = False, version: str = "") -> bool:
    """Whether the environment is there and up to date."""
    home = _home(wanted)
    stamp = home / "made-from"
    return stamp.is_file() and stamp.read_text() == _key(wanted, with_package, version) and _interpreter(home).exists()


def another(version: str) -> Path | None:
    """A Python of that version on this machine: pyenv's, or on the PATH."""
    found = sorted(Path.home().glob(f".pyenv/versions/{version}*/bin/python"))
    on_path = shutil.which(f"python{version}")
    return found[-1] if found else Path(on_path) if on_path else None


def _home(wanted: Path) -> Path:
    """Its place, which that of a test is not where a benchmark has a file of the same name."""
    return CACHE / f"{wanted.relative_to(ROOT).parts[0]}-{wanted.stem}"


def _interpreter(home: Path) -> Path:
    return home / "bin" / "python"


def _alone(wanted: Path) -> Path:
    return wanted.with_suffix(".no-deps.txt")


def _key(wanted: Path, with_package: bool, version: str) -> str:
    """What an environment depends on. The repository is installed editable: its sources are not part of it."""
    files = [file for file in (wanted, _alone(wanted)) if file.exists()]
    parts = [*(file.read_text() for file in files), version or sys.version]
    if with_package:
        parts += [str(ROOT), *tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]]
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()


def _make(base: Path, home: Path, wanted: Path, *, with_package: bool) -> None:
    from uv import find_uv_bin  # which peers do not have, whose programs import this module, too

    _run(str(base), "-m", "venv", str(home))
    interpreter = str(_interpreter(home))
    pip, uv = (interpreter, "-m", "pip", "install", "--quiet"), (find_uv_bin(), "pip", "install", "--quiet")
    if torch := [line for line in wanted.read_text().splitlines() if line.startswith("torch==")]:
        # Only pip finds the builds of PyTorch that a machine has beside those of the registry.
        _run(*pip, "--disable-pip-version-check", "--no-compile", *torch)
    # A peer's start is measured, and not its first one; what has this repository in it is only tested.
    more = ("-e", str(ROOT)) if with_package else ("--compile-bytecode",)
    _run(*uv, "--python", interpreter, "-r", str(wanted), *more)
    if _alone(wanted).exists():
        _run(*uv, "--python", interpreter, "--no-deps", "-r", str(_alone(wanted)))


def _run(*command: str) -> None:
    done = subprocess.run(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=PATIENCE, check=False
    )
    if done.returncode:
        raise SystemExit(f"{' '.join(command)} failed:\n{done.stdout}")
