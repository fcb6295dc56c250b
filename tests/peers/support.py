"""Running a peer's scripts, and the sandboxes they talk to."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from benchmarks import venvs

HERE = Path(__file__).resolve().parent
LIBRARY = HERE / "projects" / "library"
"""A project that brings an MCP server of the library that it is told."""
TALK = HERE / "projects" / "talk"
"""A project of an agent, which is talked to by A2A, too."""
OBJECTS = HERE / "projects" / "frameworks"
"""A project of agents that are objects of the frameworks that are there."""
MINI_SWE = HERE / "projects" / "mini-swe"
"""A project whose requirements name an agent of others, which plays in its sandbox."""
PATIENCE = 60


class Client(NamedTuple):
    """A client: a script, the environment it runs in, and the mode it is asked for."""

    venv: str
    script: str
    mode: str | None = None

    @property
    def modern(self) -> bool:
        """Whether it speaks 2026-07-28 to a server that does."""
        return self.mode == "auto"

    def __str__(self) -> str:
        return "-".join(filter(None, (self.script.removesuffix("_client"), self.venv, self.mode)))


OFFICIAL_1 = Client("mcp1", "official1")
OFFICIAL_2 = Client("mcp2", "official2", "auto")
OFFICIAL_2_LEGACY = Client("mcp2", "official2", "legacy")
FASTMCP_3 = Client("mcp1", "fastmcp_client")
FASTMCP_4 = Client("mcp2", "fastmcp_client", "auto")
FASTMCP_4_LEGACY = Client("mcp2", "fastmcp_client", "legacy")
CLIENTS = [OFFICIAL_1, OFFICIAL_2, OFFICIAL_2_LEGACY, FASTMCP_3, FASTMCP_4, FASTMCP_4_LEGACY]


def interpreter(venv: str) -> str:
    """The python of a peer's environment; the test is skipped when there is none."""
    wanted = requirements(venv)
    if not venvs.is_made(wanted, with_package=True):
        pytest.skip(f"needs the virtual environment {venv}: run 'make components'")
    return str(venvs.python(wanted, with_package=True))


def requirements(venv: str) -> Path:
    return HERE / "requirements" / f"{venv}.txt"


def command(client: Client, journeys: Mapping[str, Mapping[str, str]]) -> list[str]:
    """What runs a client. A journey is known by its name, and its order has the ``url`` of a sandbox's ``/mcp``."""
    order = json.dumps({"mode": client.mode, "journeys": journeys})
    return [interpreter(client.venv), str(HERE / "scripts" / f"{client.script}.py"), order]


def travel(client: Client, journeys: Mapping[str, Mapping[str, str]]) -> dict[str, Any]:
    """Let a client make journeys, one after the other; its reports by name."""
    ended = subprocess.run(command(client, journeys), capture_output=True, text=True, timeout=PATIENCE)
    assert ended.returncode == 0, ended.stderr
    report: dict[str, Any] = json.loads(ended.stdout.splitlines()[-1])
    return report


@contextlib.contextmanager
def reloading(project: Path, python: str = sys.executable) -> Iterator[str]:
    """The MCP address of a project that is loaded again when it changes."""
    code = (
        "from pathlib import Path; import sys; from aenv.runtime.server import run;"
        "run(Path(sys.argv[1]), port=0, reload=True, on_ready=lambda s: print(s.url + '/mcp', flush=True))"
    )
    process = subprocess.Popen([python, "-c", code, str(project)], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    try:
        yield process.stdout.readline().strip()
    finally:
        process.terminate()
        process.wait(20)
        process.stdout.close()
