# Stands in for the built-in mini-terminal, with the tools that the guide's programs call.
import contextlib
import io
import subprocess

from aenv import register_tool


@register_tool
def execute_command(command: str, timeout=60):
    done = subprocess.run(["/bin/sh", "-c", command], capture_output=True, text=True, timeout=timeout, check=False)
    return {"output": [done.stdout, True], "returncode": done.returncode}


@register_tool
def python(code: str) -> str:
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        exec(code, {})
    return printed.getvalue()
