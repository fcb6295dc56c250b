"""Tools that tell how a sandbox looks from inside, and some that harm it."""

from __future__ import annotations

import os
import random
import subprocess
import sys
import time
import uuid
from pathlib import Path
from typing import Any

from aenv import Context, register_function, register_load, register_reward, register_save, register_tool

_ORPHAN = "import os, time\nif os.fork():\n    os._exit(0)\ntime.sleep(120)"
_count = 0
_kept: list[bytes] = []


@register_tool
def echo(text: str) -> str:
    """Answer what was said."""
    return text


@register_tool
def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


@register_tool
def count() -> int:
    """How often this was called."""
    global _count
    _count += 1
    return _count


@register_tool
def instance(ctx: Context) -> dict[str, Any]:
    """What the engine told this sandbox."""
    return {
        "id": ctx.instance_id,
        "seed": ctx.seed,
        "datasource": ctx.datasource,
        "arguments": list(ctx.arguments),
        "variables": {name: value for name, value in ctx.environment_variables.items() if name.startswith("PROBE_")},
    }


@register_tool
def environ(name: str) -> str | None:
    """A variable of the process."""
    return os.environ.get(name)


@register_tool
def argv() -> list[str]:
    """The arguments of the process."""
    return sys.argv[1:]


@register_tool
def getcwd() -> str:
    """The work directory."""
    return str(Path.cwd())


@register_tool
def python() -> str:
    """The interpreter."""
    return sys.executable


@register_tool
def pid() -> int:
    """The process."""
    return os.getpid()


@register_tool
def randomness() -> list[str]:
    """What the random generators give."""
    return [str(random.random()), str(uuid.uuid4())]  # noqa: S311


@register_tool
def write(path: str, text: str) -> None:
    """Write a file."""
    Path(path).write_text(text, encoding="utf-8")


@register_tool
def read(path: str) -> str | None:
    """Read a file; nothing when there is none."""
    try:
        return Path(path).read_text(encoding="utf-8")
    except FileNotFoundError:
        return None


@register_tool
def sleep(seconds: float, mark: str) -> None:
    """Write a file to say that it began, then do nothing for a while."""
    Path(mark).touch()
    time.sleep(seconds)


@register_tool
def say(text: str) -> None:
    """Print to stdout and stderr, as authors do: without flushing."""
    print(f"{text} to stdout")  # noqa: T201
    print(f"{text} to stderr", file=sys.stderr)  # noqa: T201


@register_tool
def flood(megabytes: int) -> None:
    """Print more than anybody reads."""
    line = "x" * 1023 + "\n"
    for _ in range(megabytes * 1024):
        sys.stdout.write(line)
    print("after the flood", flush=True)  # noqa: T201


@register_tool
def eat(megabytes: int) -> int:
    """Take memory, a piece at a time."""
    eaten = [b"x" * 1024 * 1024 + os.urandom(1) for _ in range(megabytes)]
    return len(eaten)


@register_tool
def keep(megabytes: int) -> None:
    """Take memory, and keep it."""
    _kept.extend(b"x" * 1024 * 1024 + os.urandom(1) for _ in range(megabytes))


@register_tool
def crash(code: int = 3) -> None:
    """End the process at once."""
    os._exit(code)


@register_tool
def orphan(marker: str) -> None:
    """Leave a process behind that has no parent, in a session of its own."""
    subprocess.run([sys.executable, "-IS", "-c", _ORPHAN, marker], start_new_session=True, check=True)


@register_tool
def processes() -> list[str]:
    """The command lines of all processes that can be seen."""
    found = []
    for file in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            found.append(file.read_bytes().replace(b"\0", b" ").decode(errors="replace"))
        except OSError:
            continue
    return found


@register_tool
async def second(ctx: Context, command: str | list[str], timeout: float = 60.0, given: str = "") -> dict[str, Any]:
    """Run a command in the second container."""
    done = await ctx.second.exec(command, timeout=timeout, input=given)
    return {
        "returncode": done.returncode,
        "stdout": done.stdout,
        "stderr": done.stderr,
        "timed_out": done.timed_out,
    }


@register_tool
async def second_write(ctx: Context, path: str, text: str) -> None:
    """Write a file of the second container."""
    await ctx.second.write(path, text)


@register_tool
async def second_read(ctx: Context, path: str) -> str:
    """Read a file of the second container."""
    return (await ctx.second.read(path)).decode()


@register_function
def ping() -> str:
    """Say that it is there."""
    return "pong"


@register_reward
def score(value: float = 1.0) -> float:
    """The value that was given."""
    return value


@register_save
def save() -> int:
    """How often ``count`` was called."""
    return _count


@register_load
def load(count: int) -> None:
    """Go on from there."""
    global _count
    _count = count
