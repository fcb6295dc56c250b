"""The environments that come with the package, each a project as ``aenv init`` makes one."""

from __future__ import annotations

from pathlib import Path

from aenv.models import NAME
from aenv.project import CONFIG

ALIASES = {"swe-env": "swebench"}
"""Other names by which one can be asked for, where nothing else bears them."""


def builtin_root() -> Path:
    """Where they are: in the installed package, or in the repository that it is worked on in."""
    installed = Path(__file__).parent.parent / "envs"
    return installed if installed.is_dir() else Path(__file__).parents[3] / "envs"


def builtin_names() -> list[str]:
    """What they are called."""
    root = builtin_root()
    return sorted(path.name for path in root.iterdir() if (path / CONFIG).is_file()) if root.is_dir() else []


def needs_packages(root: Path) -> bool:
    """Whether it asks for packages beside ours, as benchmarks do: some are large, and not everybody wants them."""
    for file in root.glob("requirements*.txt"):
        if any(line.strip() and not line.lstrip().startswith("#") for line in file.read_text().splitlines()):
            return True
    return False


def builtin(name: str) -> Path | None:
    """The directory of the one with that name; None when there is none."""
    found = builtin_root() / name
    return found if NAME.fullmatch(name) and (found / CONFIG).is_file() else None
