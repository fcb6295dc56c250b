"""A terminal for agents: commands in one shell that stays, files, and a reward made of checks."""

import math
import os
import threading
from typing import Any

from mini_terminal import carried, files, processes
from mini_terminal.baseline import Baseline, TooMuch, is_private
from mini_terminal.checks import Check, judge
from mini_terminal.dialects import find
from mini_terminal.shell import ShellError
from mini_terminal.terminal import Terminal

from aenv import (
    Context,
    Invalid,
    ToolError,
    register_health,
    register_load,
    register_reset,
    register_reward,
    register_save,
    register_teardown,
    register_tool,
)


class _Files:
    """The work directory as it was before the first call that could change it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._baseline: Baseline | None = None
        self._reason: str | None = None

    def remember(self, directory: str) -> None:
        with self._lock:
            if self._baseline is None and self._reason is None:
                try:
                    if is_private(directory):
                        self._baseline = Baseline(directory)
                    else:
                        self._reason = "the work directory is not the sandbox's own"
                except (OSError, TooMuch) as exc:
                    self._reason = str(exc)

    def save(self) -> dict[str, Any]:
        with self._lock:
            return {
                "baseline": carried.from_baseline(self._baseline) if self._baseline else None,
                "reason": self._reason,
            }

    def load(self, given: dict[str, Any]) -> None:
        with self._lock:
            self._baseline = carried.to_baseline(given["baseline"]) if given["baseline"] else None
            self._reason = given["reason"]

    def put_back(self) -> str:
        """What became of the files, in words."""
        with self._lock:
            if self._baseline is None:
                return f"kept: {self._reason}" if self._reason else "unchanged"
            try:
                failed = self._baseline.put_back()
            except OSError as exc:
                failed = [exc]
            return f"put back, but for {len(failed)}: {failed[0]}" if failed else "put back"


terminal = Terminal()
work_files = _Files()


def _directory(ctx: Context | None) -> str:
    return os.path.abspath(ctx.working_directory) if ctx else os.getcwd()


def _variables(ctx: Context | None) -> dict[str, str]:
    return dict(ctx.environment_variables) if ctx else dict(os.environ)


@register_tool
def execute_command(command: str, timeout: float = 60, ctx: Context | None = None) -> dict[str, Any]:
    """Run a command in a shell that keeps its directory and variables from one command to the next.

    The answer holds output, a pair of what was printed (stdout, then stderr) and whether the command finished in
    time; returncode; stdout and stderr apart; truncated, when the middle of a long output is left out; and note, when
    there is more to say. Standard input is empty. A command that takes too long is ended, with exit code 124, and the
    shell keeps the directory and variables from before it. To leave a program running, end the command with & and
    send its output to a file.

    Args:
        command: One or more lines, as for bash.
        timeout: Seconds after which the command is ended.
    """
    if not (timeout > 0 and math.isfinite(timeout)):
        raise ToolError(f"timeout must be a number of seconds over 0, found {timeout:g}")
    work_files.remember(_directory(ctx))
    try:
        answer = terminal.run(command, timeout, _directory(ctx), _variables(ctx))
    except (ShellError, ValueError) as exc:
        raise ToolError(str(exc)) from exc
    stdout, stderr = answer.stdout.text, answer.stderr.text
    between = "\n" if stdout and stderr and not stdout.endswith("\n") else ""
    return {
        "output": [f"{stdout}{between}{stderr}", answer.finished],
        "returncode": answer.returncode,
        "stdout": stdout,
        "stderr": stderr,
        "truncated": answer.stdout.truncated or answer.stderr.truncated,
        "note": answer.note,
    }


def _path(path: str, ctx: Context | None) -> str:
    return files.at(path, terminal.directory or _directory(ctx))


@register_tool(annotations={"readOnlyHint": True})
def read_file(path: str, offset: int = 0, limit: int = 65536, ctx: Context | None = None) -> dict[str, Any]:
    """Read a file as text, a piece at a time. next_offset is where the next piece begins, or null at the end.

    Args:
        path: The file; a relative path begins in the shell's directory.
        offset: Byte to begin at.
        limit: Most bytes to read, at most 1048576.
    """
    return files.read(_path(path, ctx), offset, limit)


@register_tool
def write_file(path: str, content: str, append: bool = False, ctx: Context | None = None) -> dict[str, Any]:
    """Write text to a file. Directories on the way are made.

    Args:
        path: The file; a relative path begins in the shell's directory.
        content: The text, at most 1048576 bytes.
        append: Add to what is there instead of replacing it.
    """
    work_files.remember(_directory(ctx))
    return files.write(_path(path, ctx), content, append)


@register_tool(annotations={"readOnlyHint": True})
def list_files(path: str = ".", ctx: Context | None = None) -> dict[str, Any]:
    """List a directory: name, type and size of each entry, by name, at most 1000.

    Args:
        path: The directory; a relative path begins in the shell's directory.
    """
    return files.entries(_path(path, ctx))


@register_reward
def score(checks: list[Check], ctx: Context | None = None) -> dict[str, Any]:
    """The share of the checks that hold, by weight, each with the reason.

    They begin in the sandbox's work directory with its first variables, whatever the agent did to its shell.

    Args:
        checks: What must hold; kind is file_exists, file_contains, file_equals or command.
    """
    if not checks:
        raise Invalid("there are no checks, so there is nothing to score")
    directory, variables = _directory(ctx), _variables(ctx)
    verdicts = [judge(check, directory, variables) for check in checks]
    held = math.fsum(check.weight for check, verdict in zip(checks, verdicts, strict=True) if verdict.passed)
    return {
        "score": held / math.fsum(check.weight for check in checks),
        "checks": [
            {"kind": check.kind, "target": check.path or check.command, "passed": verdict.passed, "why": verdict.why}
            for check, verdict in zip(checks, verdicts, strict=True)
        ],
    }


@register_health
async def health() -> dict[str, Any]:
    """Healthy where there is a shell. Nothing is started, and a command that runs is not waited for."""
    found = find()
    if found is None:
        return {"status": "unhealthy", "reason": "this machine has neither bash nor sh"}
    return {"status": "healthy", "shell": found.path, "busy": terminal.busy, "directory": terminal.directory}


@register_reset
def reset(ctx: Context | None = None) -> dict[str, Any]:
    """A new shell in the work directory, with the sandbox's first variables, and no process of the old one's.

    The files of the work directory are put back where it is the sandbox's own, as under the process engine.
    """
    ended = terminal.end()
    return {"directory": _directory(ctx), "files": work_files.put_back(), "processes_ended": ended}


@register_save
def save() -> dict[str, Any]:
    """The shell's directory, variables and functions, and the files that a reset puts back."""
    return {"terminal": carried.from_terminal(terminal.save()), "files": work_files.save()}


@register_load
def load(saved: dict[str, Any], ctx: Context | None = None) -> None:
    """A shell like the one that was saved."""
    work_files.load(saved["files"])
    terminal.load(carried.to_terminal(saved["terminal"]), _directory(ctx), _variables(ctx))


@register_teardown
def close() -> None:
    """No process is left."""
    terminal.end(for_good=True)
    processes.end(None, f"{os.getpid()}-checks")
