"""Small packages made by hand, so that installing them needs no index. A build backend below imports this too."""

from __future__ import annotations

import io
import tarfile
import zipfile
from collections.abc import Mapping
from pathlib import Path

BACKEND = """
import pathlib, sys
sys.path.insert(0, {here!r})
from tests.engines.packages import wheel
pathlib.Path({witness!r}).touch()

def build_wheel(folder, settings=None, metadata=None):
    return wheel(pathlib.Path(folder), {name!r}, "1.0").name
"""
"""A build backend that needs nothing, and leaves a witness that it ran."""


def wheel(folder: Path, name: str, version: str, files: Mapping[str, str] | None = None, needs: str = "") -> Path:
    """A wheel with one module of the package's name, and more files at its top. ``needs`` is what it depends on."""
    folder.mkdir(parents=True, exist_ok=True)
    info = f"{name}-{version}.dist-info"
    depends = f"Requires-Dist: {needs}\n" if needs else ""
    content = {
        f"{name}.py": f"version = {version!r}\n",
        **(files or {}),
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n{depends}",
        f"{info}/WHEEL": "Wheel-Version: 1.0\nGenerator: hand\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    path = folder / f"{name}-{version}-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        for file, text in content.items():
            archive.writestr(file, text)
        archive.writestr(f"{info}/RECORD", "".join(f"{file},,\n" for file in [*content, f"{info}/RECORD"]))
    return path


def source(folder: Path, name: str, witness: Path) -> Path:
    """A source tree; ``witness`` appears when it is built."""
    folder.mkdir(parents=True)
    build = '[build-system]\nrequires = []\nbuild-backend = "backend"\nbackend-path = ["."]\n'
    (folder / "pyproject.toml").write_text(f'{build}[project]\nname = "{name}"\nversion = "1.0"\n')
    here = str(Path(__file__).parent.parent.parent)
    (folder / "backend.py").write_text(BACKEND.format(here=here, witness=str(witness), name=name))
    return folder


def source_archive(folder: Path, name: str, witness: Path) -> Path:
    """A source distribution of ``source``."""
    tree = source(folder.parent / f"{name}-source", name, witness)
    path = folder / f"{name}-1.0.tar.gz"
    with tarfile.open(path, "w:gz") as archive:
        archive.add(tree, f"{name}-1.0")
        text = f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n".encode()
        record = tarfile.TarInfo(f"{name}-1.0/PKG-INFO")
        record.size = len(text)
        archive.addfile(record, io.BytesIO(text))
    return path


def stand_ins(folder: Path) -> None:
    """Empty packages under the names of what the runtime needs, newer than any real one."""
    from packaging.requirements import Requirement

    from aenv.engines.process import requirements

    for text in requirements.of_runtime():
        wheel(folder, Requirement(text).name, "9999")


def project(root: Path, *lines: str) -> Path:
    """A project that installs from its own ``vendor`` folder only."""
    (root / "src").mkdir(parents=True)
    stand_ins(root / "vendor")
    (root / "requirements.txt").write_text("\n".join(["--no-index", "--find-links ./vendor", *lines, ""]))
    return root
