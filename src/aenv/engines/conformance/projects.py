"""The projects that the checks run: the probe, and small ones that start badly or look around at import."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

PROBE = Path(__file__).parent / "probe"
NAME, VERSION = "aenv-probe", "1.0.0"

BAD_IMPORT = """
raise RuntimeError("broken on purpose at import")
"""

BAD_SETUP = """
from aenv import register_setup, register_tool

@register_tool
def echo(text: str) -> str:
    return text

@register_setup
def prepare() -> None:
    raise RuntimeError("broken on purpose in setup")
"""

NEVER_HEALTHY = """
from aenv import register_health, register_tool

@register_tool
def echo(text: str) -> str:
    return text

@register_health
def health() -> dict[str, str]:
    return {"status": "sick on purpose"}
"""

SLOWLY_HEALTHY = """
from aenv import register_health, register_tool

asked = 0

@register_tool
def echo(text: str) -> str:
    return text

@register_health
def health() -> bool:
    global asked
    asked += 1
    return asked > 3
"""

AT_IMPORT = """
import os
import random
import sys

from aenv import register_tool

SEEN = {"value": os.environ.get("PROBE_VALUE"), "arguments": sys.argv[1:], "random": random.random()}

@register_tool
def seen() -> dict[str, object]:
    return SEEN
"""

SMALL = {
    "bad-import": BAD_IMPORT,
    "bad-setup": BAD_SETUP,
    "never-healthy": NEVER_HEALTHY,
    "slowly-healthy": SLOWLY_HEALTHY,
    "at-import": AT_IMPORT,
}
"""Projects of one module, by name."""


def write(folder: Path) -> None:
    """Make every project in ``folder``; the probe is called ``probe``."""
    shutil.copytree(PROBE, folder / "probe", ignore=shutil.ignore_patterns("__pycache__"))
    for name, module in SMALL.items():
        source = folder / name / "src"
        source.mkdir(parents=True)
        (source / "custom_env.py").write_text(module, encoding="utf-8")
        config = {"name": NAME, "version": VERSION}
        (folder / name / "config.json").write_text(json.dumps(config), encoding="utf-8")
