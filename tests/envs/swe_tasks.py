"""Tasks for tests of swebench from sdists of PyPI: ``make components`` makes them, and keeps them in ``.cache``."""

from __future__ import annotations

import hashlib
import importlib.util
import json
import shutil
import sys
from pathlib import Path
from types import ModuleType

from aenv.project.builtin import builtin_root

PROJECT = builtin_root() / "swebench"
CACHE = Path(__file__).parents[2] / ".cache"


def kept() -> Path:
    """Where they are kept, by what makes them."""
    made_by = b"".join((PROJECT / name).read_bytes() for name in ("make_tasks.py", "with_rows.py"))
    return CACHE / f"swebench-{hashlib.sha256(made_by).hexdigest()[:16]}"


def prepare() -> None:
    """Make them, where they are not there."""
    if kept().exists():
        return
    maker = _module("make_tasks")
    fresh = kept().with_suffix(".new")
    shutil.rmtree(fresh, ignore_errors=True)
    fresh.mkdir(parents=True)
    rows = maker.write(fresh, CACHE / "sdists", maker.PACKAGES)
    (fresh / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    fresh.rename(kept())


def project(target: Path) -> None:
    """A project with them."""
    maker = _module("with_rows")
    maker.make(maker.load(str(kept() / "rows.jsonl")), kept(), target)


def _module(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, PROJECT / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module
