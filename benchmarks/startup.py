"""What starting costs: importing, the command line, a sandbox, and a new project."""

from __future__ import annotations

import http.client
import subprocess
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from benchmarks import venvs, wire
from benchmarks.measure import Effort, Line, interleave, line
from benchmarks.processes import (
    CONSOLE_SCRIPT,
    OURS,
    Server,
    cpu_of,
    environment,
    fastmcp,
    resident_mb,
    server,
)

WARM_UP_CALLS = 100


def imports(effort: Effort) -> list[Line]:
    """CPU of ``import aenv`` and of ``aenv --help``, beside that of a Python that does nothing."""
    nothing, ours, shown = interleave(
        effort.rounds(40),
        lambda: cpu_of([OURS, "-c", "pass"]),
        lambda: cpu_of([OURS, "-c", "import aenv"]),
        lambda: cpu_of([CONSOLE_SCRIPT, "--help"]),
    )
    return [
        line("import aenv, CPU", "ms", ours, "python -c pass", nothing, limit=3, scale=1e3),
        line("aenv --help, CPU", "ms", shown, "python -c pass", nothing, limit=6, scale=1e3),
    ]


class Started(NamedTuple):
    seconds: float
    resident: float


def run(effort: Effort) -> list[Line]:
    """``aenv run --quiet``: from the start of its process to its first answer, and its memory after 100 calls."""
    project = venvs.HERE / "projects" / "few"
    peer = fastmcp(venvs.peer("fastmcp"))
    mine: list[str | Path] = [CONSOLE_SCRIPT, "run", "--quiet", "--work-dir", project, "--port", "PORT"]
    ours, other = interleave(effort.rounds(11), lambda: _start(mine), lambda: _start(peer))
    seconds, other_seconds = [x.seconds for x in ours], [x.seconds for x in other]
    memory, other_memory = [x.resident for x in ours], [x.resident for x in other]
    return [
        line("aenv run, start to first answer", "ms", seconds, "FastMCP", other_seconds, limit=1 / 4, scale=1e3),
        line("aenv run, resident memory", "MB", memory, "FastMCP", other_memory, limit=1 / 2),
    ]


def _start(command: Sequence[str | Path]) -> Started:
    with server(command) as started:
        _call(started, WARM_UP_CALLS)
        return Started(started.first_answer, resident_mb(started.pid))


def _call(target: Server, times: int) -> None:
    connection = http.client.HTTPConnection("127.0.0.1", target.port, timeout=30)
    try:
        for _ in range(times):
            wire.check(*wire.ask(connection, "add", wire.add()))
    finally:
        connection.close()


def init(effort: Effort) -> list[Line]:
    """``aenv init``, ``aenv run`` and a first call: with nothing compiled (Python's own library neither), and again."""
    cold, warm = [], []
    for _ in range(2 if effort.quick else 5):
        with tempfile.TemporaryDirectory() as compiled:
            cold.append(_init_to_call(compiled))
            warm.append(_init_to_call(compiled))
    return [
        line("aenv init to first call, cold", "ms", cold, scale=1e3),
        line("aenv init to first call, warm", "ms", warm, scale=1e3),
    ]


def _init_to_call(compiled: str) -> float:
    env = environment(PYTHONPYCACHEPREFIX=compiled)
    with tempfile.TemporaryDirectory() as folder:
        begin = time.perf_counter()
        subprocess.run(
            [CONSOLE_SCRIPT, "init", "demo"], cwd=folder, env=env, check=True, capture_output=True, timeout=60
        )
        message = wire.body("echo", {"content": "hello"})
        command: list[str | Path] = [CONSOLE_SCRIPT, "run", "--quiet", "--port", "PORT"]
        with server(command, cwd=Path(folder) / "demo", env=env, tool="echo", message=message):
            return time.perf_counter() - begin
