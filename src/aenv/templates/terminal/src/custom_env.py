"""Shell commands as a tool, and a reward that looks at the files they left."""

import os
import signal
import subprocess
import tempfile
from pathlib import Path
from typing import Any

from aenv import Context, register_reward, register_tool

MAX_OUTPUT = 64 * 1024
"""Most bytes of output that the model is shown."""
_LIMITED = 'ulimit -f 2097152; exec /bin/sh -c "$0"'
"""Runs a command that may write files of 1 GiB at most, its own output included."""


@register_tool
def execute_command(command: str, timeout: float = 60) -> dict[str, Any]:
    """Run a command in a new shell and return its output. Files stay; variables and the directory do not.

    Args:
        command: The command, as for /bin/sh.
        timeout: Seconds after which it is ended.
    """
    # A file, not a pipe: a program left in the background would hold a pipe open.
    with tempfile.TemporaryFile() as output:
        process = subprocess.Popen(
            ["/bin/sh", "-c", _LIMITED, command],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            returncode: int | None = process.wait(timeout)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            returncode = None
        size = output.seek(0, os.SEEK_END)
        output.seek(0)
        text = output.read(MAX_OUTPUT).decode(errors="replace")
    if size > MAX_OUTPUT:
        text += f"\n[{size - MAX_OUTPUT} more bytes]"
    if returncode is None:
        text += f"\n[ended after {timeout:g} seconds]"
    return {"output": text, "returncode": returncode}


@register_reward
def file_contains(path: str, expected: str, ctx: Context) -> dict[str, Any]:
    """1.0 when a file holds the expected text, 0.0 when it does not or is not there.

    Args:
        path: The file, from the working directory on.
        expected: Text that it should hold.
    """
    file = Path(ctx.working_directory, path)
    if not file.is_file():
        return {"score": 0.0, "reason": f"{path} is not there"}
    found = expected in file.read_text(encoding="utf-8", errors="replace")
    return {"score": 1.0 if found else 0.0, "reason": "found" if found else "the text is not in the file"}
