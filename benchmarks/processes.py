"""The processes that are measured: servers, clients and one-off commands, their CPU time, and their end."""

from __future__ import annotations

import http.client
import json
import os
import select
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any, NamedTuple

from benchmarks import wire
from benchmarks.venvs import ROOT

START = 60.0
"""Seconds a server or client has to become ready."""
ROUND = 120.0
"""Seconds a round may take."""
STOP = 5.0
OURS = Path(sys.executable)
CONSOLE_SCRIPT = OURS.parent / "aenv"
_UNWANTED = ("AENV_", "DUMMY_", "PYTHON")


def environment(**more: str) -> dict[str, str]:
    """This process's variables without those that would change what is measured."""
    kept = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(_UNWANTED) and not name.lower().endswith("_proxy")
    }
    return {**kept, **more}


def cpu_seconds(pid: int) -> float:
    """CPU time that the process, with all its threads, has used."""
    try:
        # The process's CPU clock, as clock_getcpuclockid(3) names it: nanoseconds, where /proc counts in hundredths.
        return time.clock_gettime((~pid << 3) | 2)
    except OSError:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def resident_mb(pid: int) -> float:
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1]) / 1024
    raise RuntimeError(f"process {pid} has no VmRSS")


def cpu_of(command: Sequence[str | Path]) -> float:
    """CPU seconds of a command from its start to its end."""
    process = subprocess.Popen(
        command, env=environment(), cwd=tempfile.gettempdir(), stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL
    )
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise RuntimeError(f"{' '.join(map(str, command))} ended with {process.returncode}")
    return usage.ru_utime + usage.ru_stime


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port: int = sock.getsockname()[1]
        return port


@contextmanager
def running(
    command: Sequence[str | Path], *, cwd: Path = ROOT, env: dict[str, str] | None = None, piped: bool = False
) -> Iterator[subprocess.Popen[bytes]]:
    """A child process, ended with the block. What it wrote to stderr is shown when the block fails."""
    with tempfile.TemporaryFile() as log:
        process = subprocess.Popen(
            command,
            cwd=cwd,
            env=env or environment(PYTHONPATH=str(ROOT)),
            stdin=subprocess.PIPE if piped else subprocess.DEVNULL,
            stdout=subprocess.PIPE if piped else log,
            stderr=log,
        )
        try:
            yield process
        except Exception:
            log.seek(0)
            sys.stderr.write(log.read()[-4000:].decode(errors="replace"))
            raise
        finally:
            _end(process)


def asked(process: subprocess.Popen[bytes], request: Any) -> Any:
    """What a program of ``benchmarks.workers.owner``'s kind answers."""
    assert process.stdin is not None
    process.stdin.write(json.dumps(request).encode() + b"\n")
    process.stdin.flush()
    return told(process)


def told(process: subprocess.Popen[bytes]) -> Any:
    """What it says next."""
    assert process.stdout is not None
    if not select.select([process.stdout], [], [], ROUND)[0]:
        raise RuntimeError(f"no answer within {ROUND:g} s")
    return json.loads(process.stdout.readline())


def _end(process: subprocess.Popen[bytes]) -> None:
    if process.stdin is not None:
        with suppress(BrokenPipeError):
            process.stdin.close()
        with suppress(subprocess.TimeoutExpired):
            process.wait(STOP)
    if process.poll() is None:
        process.terminate()
        try:
            process.wait(STOP)
        except subprocess.TimeoutExpired:
            process.kill()
    process.wait()
    if process.stdout is not None:
        process.stdout.close()


class Server(NamedTuple):
    """A server that has answered its first call."""

    pid: int
    port: int
    first_answer: float
    """Seconds from the start of its process to its first answer."""

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"


@contextmanager
def server(
    command: Sequence[str | Path],
    *,
    cwd: Path = ROOT,
    env: dict[str, str] | None = None,
    tool: str = "add",
    message: bytes | None = None,
) -> Iterator[Server]:
    """Run a server whose command has ``PORT`` where the port belongs, and have it answer one call."""
    port = free_port()
    started = time.perf_counter()
    with running([str(port) if part == "PORT" else part for part in command], cwd=cwd, env=env) as process:
        _first_answer(process, port, tool, message or wire.add(tool), check=message is None)
        yield Server(process.pid, port, time.perf_counter() - started)


def _first_answer(process: subprocess.Popen[bytes], port: int, tool: str, message: bytes, *, check: bool) -> None:
    deadline = time.monotonic() + START
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=START)
    try:
        while True:
            if process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"the server did not answer (exit code {process.returncode})")
            try:
                connection.connect()
                break
            except ConnectionRefusedError:
                time.sleep(0.002)
        status, answer = wire.ask(connection, tool, message)
    finally:
        connection.close()
    if check:
        wire.check(status, answer)
    elif status != 200:
        raise RuntimeError(f"wrong answer (status {status}): {answer[:500]!r}")


def ours(project: str) -> list[str | Path]:
    """The command that serves one of our fixture projects."""
    return [OURS, "-m", "aenv.runtime", ROOT / "benchmarks" / "projects" / project, "--port", "PORT"]


def fastmcp(python: Path) -> list[str | Path]:
    """The command that serves the same tools on FastMCP."""
    return [python, "-m", "benchmarks.servers.fastmcp_server", "PORT"]


class Round(NamedTuple):
    """Seconds of one round, a call."""

    client_cpu: float
    client_user: float
    """The part of it that is not the kernel's: what waking another process costs is the machine's matter."""
    server_cpu: float
    wall: float


class Worker:
    """A client process and the server it talks to."""

    def __init__(self, process: subprocess.Popen[bytes], target: Server) -> None:
        assert process.stdin is not None
        assert process.stdout is not None
        self._stdin: IO[bytes] = process.stdin
        self._stdout: IO[bytes] = process.stdout
        self._target = target
        self._read(START)

    def round(self, call: str, calls: int, callers: int) -> Round:
        """Make the calls and say what each cost."""
        calls -= calls % callers
        before = cpu_seconds(self._target.pid)
        self._stdin.write(json.dumps({"call": call, "calls": calls, "callers": callers}).encode() + b"\n")
        self._stdin.flush()
        spent = self._read(ROUND)
        server_cpu = cpu_seconds(self._target.pid) - before
        return Round(spent["cpu"] / calls, spent["user"] / calls, server_cpu / calls, spent["wall"] / calls)

    def _read(self, patience: float) -> dict[str, float]:
        if not select.select([self._stdout], [], [], patience)[0]:
            raise RuntimeError(f"the client did not answer within {patience:g} s")
        line = self._stdout.readline()
        if not line:
            raise RuntimeError("the client ended")
        found: dict[str, float] = json.loads(line)
        return found


@contextmanager
def worker(module: str, target: Server, python: Path = OURS, **variables: str) -> Iterator[Worker]:
    """A client of ``benchmarks.workers`` that talks to ``target``; with variables of its own."""
    env = environment(PYTHONPATH=str(ROOT), **variables)
    with running([python, "-m", f"benchmarks.workers.{module}", target.url], env=env, piped=True) as process:
        yield Worker(process, target)
