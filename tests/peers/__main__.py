"""``python -m tests.peers``: make the virtual environments that these tests need.

Those of frameworks, and their tests, take minutes together. With ``--changed`` one is made only where what its tests
are about is not what ``tested.json`` has of it; the tests of the others are skipped. ``--tested`` writes that file, for
the environments that are there: after their tests have passed.
"""

import argparse
import asyncio
import hashlib
import json
import subprocess
from pathlib import Path

from benchmarks import venvs

from aenv.engines.process.venvs import interpreter_for
from tests.peers.support import MINI_SWE, TALK, requirements

TESTED = Path(__file__).with_name("tested.json")
GUIDES = (
    "toolbox.py",
    "telling.py",
    "tests/integrations/test_guides.py",
    "tests/peers/scripts/guide_*",
    "examples/06-keypad",
)
"""Of agents that play as their guides say."""
FRAMEWORKS = {
    "agents": (
        *("toolbox.py", "telling.py", "listening.py", "src/aenv/client/vendors.py"),
        *("anthropic.py", "langchain.py", "openai_agents.py", "pydantic_ai.py", "tests/peers/scripts/agent_loops.py"),
        *("google_adk.py", "smolagents.py", "autogen.py", *GUIDES),
        *(f"docs/guides/{guide}.md" for guide in ("anthropic", "langchain", "openai-agents", "pydantic-ai")),
        *(f"docs/guides/{guide}.md" for guide in ("google-adk", "smolagents", "autogen")),
    ),
    "camel": ("camel.py", "docs/guides/camel.md", *GUIDES),
    "crewai": ("crewai.py", "docs/guides/crewai.md", *GUIDES),
    "ray": (
        *("ray.py", "rllib.py", "skyrl.py", "gymnasium", "published.py", "examples/05-lights", "examples/06-keypad"),
        *("tests/peers/scripts/rllib.py", "tests/peers/scripts/skyrl.py"),
    ),
    "agentlightning": ("agent_lightning.py", "examples/06-keypad"),
    "areal": ("areal.py", "examples/06-keypad", "examples/07-tau2-areal"),
    "openenv": (
        *("openenv.py", "published.py", "src/aenv/runtime/openenv.py", "src/aenv/runtime/websocket.py"),
        "examples/06-keypad",
    ),
    "pettingzoo": (
        *("pettingzoo", "gymnasium/spaces.py", "published.py", "tests/peers/projects/games"),
        "src/aenv/client/agents.py",
    ),
    "sb3": ("stable_baselines3.py", "gymnasium", "published.py", "examples/05-lights"),
    "verl": (
        *("verl.py", "slime.py", "examples/06-keypad"),
        *("tests/integrations/test_slime.py", "tests/peers/scripts/slime*", "tests/peers/scripts/tiny.py"),
    ),
    "verifiers": (
        *("verifiers", "published.py", "src/aenv/runtime/openenv.py", "src/aenv/runtime/websocket.py"),
        *("examples/06-keypad", "tests/peers/projects/sums"),
    ),
    "trl": ("trl.py", "examples/06-keypad"),
}
"""What is of a framework, beside what has its name: modules of ``aenv.integrations``, and examples."""
VERSIONS = {"agentlightning": "3.12"}
"""Of Python, where a framework needs another than the one that runs this."""


def state(name: str) -> str:
    """What a framework's tests are about, as one number: none where git does not know."""
    named = (f"tests/integrations/test_{name}.py", f"tests/peers/requirements/{name}*", f"tests/peers/scripts/{name}*")
    paths = [part if "/" in part else f"src/aenv/integrations/{part}" for part in FRAMEWORKS[name]]
    line = ("git", "ls-files", "--stage", "--", *named, *paths)
    try:
        listed = subprocess.run(line, cwd=venvs.ROOT, check=True, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    except (OSError, subprocess.CalledProcessError):
        return ""
    return hashlib.sha256(listed.stdout).hexdigest()[:16]


def is_made(name: str) -> bool:
    return venvs.is_made(requirements(name), with_package=True, version=VERSIONS.get(name, ""))


def make(*, changed: bool) -> None:
    """The environments, or those of changed frameworks only, beside those that are no framework's."""
    tested = json.loads(TESTED.read_text())
    for name in ("mcp1", "mcp2"):
        venvs.python(requirements(name), with_package=True)
    for name in FRAMEWORKS:
        version = VERSIONS.get(name, "")
        if version and not venvs.another(version):
            print(f"{name}: there is no Python {version}; its tests are skipped")
        elif changed and not is_made(name) and state(name) == tested.get(name):
            print(f"{name}: nothing of it changed since its tests passed; they are skipped")
        else:
            venvs.python(requirements(name), with_package=True, version=version)
    for name in ("models", "seaweed", "wild"):
        venvs.python(requirements(name))
    if venvs.another("3.12"):
        venvs.python(requirements("harbor"), with_package=True, version="3.12")
    for project in (MINI_SWE, TALK):
        asyncio.run(interpreter_for(project, print))


def note_tested() -> None:
    """What was made has been tested as it is."""
    found = json.loads(TESTED.read_text()) | {name: state(name) for name in FRAMEWORKS if is_made(name)}
    TESTED.write_text(json.dumps(found, indent=2, sort_keys=True) + "\n")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="python -m tests.peers", description=__doc__)
    parser.add_argument("--changed", action="store_true", help="leave out frameworks whose tests passed as they are")
    parser.add_argument("--tested", action="store_true", help="note that the tests of those that are made passed")
    given = parser.parse_args()
    if given.tested:
        note_tested()
    else:
        make(changed=given.changed)
