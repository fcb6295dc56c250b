"""``python -m tests.peers [--changed]``: make the virtual environments that these tests need.

Those of trainers take minutes together. With ``--changed`` one is made only where the last day of the history changed
what its tests are about; the tests of the others are skipped.
"""

import argparse
import asyncio
import subprocess

from benchmarks import venvs

from aenv.engines.process.venvs import interpreter_for
from tests.peers.support import MINI_SWE, requirements

DAY = 24 * 3600
TRAINERS = {
    "ray": (
        *("ray.py", "rllib.py", "skyrl.py", "gymnasium", "examples/05-lights", "examples/06-keypad"),
        *("tests/peers/scripts/rllib.py", "tests/peers/scripts/skyrl.py"),
    ),
    "agentlightning": ("agent_lightning.py", "examples/06-keypad"),
    "areal": ("areal.py", "examples/06-keypad", "examples/07-tau2-areal"),
    "openenv": ("openenv.py", "src/aenv/runtime/openenv.py", "src/aenv/runtime/websocket.py", "examples/06-keypad"),
    "sb3": ("stable_baselines3.py", "gymnasium", "examples/05-lights"),
    "verl": (
        *("verl.py", "slime.py", "examples/06-keypad"),
        *("tests/integrations/test_slime.py", "tests/peers/scripts/slime*", "tests/peers/scripts/tiny.py"),
    ),
    "verifiers": ("verifiers.py", "src/aenv/runtime/openenv.py", "src/aenv/runtime/websocket.py", "examples/06-keypad"),
    "trl": ("trl.py", "examples/06-keypad"),
}
"""What is of a trainer, beside what has its name: modules of ``aenv.integrations``, and examples."""
VERSIONS = {"agentlightning": "3.12"}
"""Of Python, where a trainer needs another than the one that runs this."""


def is_changed(name: str, parts: tuple[str, ...]) -> bool:
    """Whether something of it is part of the last day before HEAD. So it is where there is no history to ask."""
    named = (f"tests/integrations/test_{name}.py", f"tests/peers/requirements/{name}*", f"tests/peers/scripts/{name}*")
    paths = [part if "/" in part else f"src/aenv/integrations/{part}" for part in parts]
    try:
        now = int(_git("log", "-1", "--format=%ct"))
        return bool(_git("log", "-1", "--format=%h", f"--since={now - DAY}", "--", *named, *paths))
    except (OSError, subprocess.CalledProcessError, ValueError):
        return True


def _git(*command: str) -> str:
    return subprocess.run(
        ("git", *command), cwd=venvs.ROOT, check=True, text=True, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
    ).stdout.strip()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="python -m tests.peers", description=__doc__)
    parser.add_argument("--changed", action="store_true", help="leave out trainers that did not change in a day")
    given = parser.parse_args()
    for name in ("mcp1", "mcp2"):
        venvs.python(requirements(name), with_package=True)
    for name, parts in TRAINERS.items():
        version = VERSIONS.get(name, "")
        if version and not venvs.another(version):
            print(f"{name}: there is no Python {version}; its tests are skipped")
            continue
        made = venvs.is_made(requirements(name), with_package=True, version=version)
        if made or not given.changed or is_changed(name, parts):
            venvs.python(requirements(name), with_package=True, version=version)
        else:
            print(f"{name}: nothing of it changed in the last day; its tests are skipped")
    for name in ("models", "seaweed", "wild"):
        venvs.python(requirements(name))
    if venvs.another("3.12"):
        venvs.python(requirements("harbor"), with_package=True, version="3.12")
    asyncio.run(interpreter_for(MINI_SWE, print))
