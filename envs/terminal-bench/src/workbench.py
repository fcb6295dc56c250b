"""The second container for a program of the owner's that brings its own tasks, such as Harbor: commands and files, and
an environment that is made of a Dockerfile. No agent can call these."""

from pathlib import Path
from typing import Any

from terminal_bench.box import Box
from terminal_bench.recipes import NotPlain, recipe

from aenv import Context, Invalid, register_function


@register_function
async def make_environment(directory: str, ctx: Context) -> dict[str, Any]:
    """Follow the Dockerfile of a directory that was uploaded. Its work directory and variables.

    Args:
        directory: Where it is, under the work directory.
    """
    box = Box(ctx.second)
    try:
        found = recipe(ctx.working_directory / directory)
    except NotPlain as exc:
        raise Invalid(f"it needs an image of its own: {exc}") from exc
    await box.follow(directory, found)
    return {"workdir": box.workdir, "variables": box.variables}


@register_function
async def run_command(
    command: str, ctx: Context, cwd: str | None = None, variables: dict[str, str] | None = None, timeout: float = 60
) -> dict[str, Any]:
    """Run a command of bash."""
    done = await ctx.second.exec(["bash", "-c", command], cwd=cwd, env=variables, timeout=timeout)
    return {
        "returncode": done.returncode,
        "stdout": done.stdout,
        "stderr": done.stderr,
        "timed_out": done.timed_out,
    }


@register_function
async def push_file(source: str, target: str, ctx: Context, mode: int | None = None) -> None:
    """A file that was uploaded, moved into the second container."""
    path = ctx.working_directory / source
    await ctx.second.write(target, path.read_bytes(), mode=mode)
    _removed(path)


@register_function
async def pull_file(source: str, target: str, ctx: Context) -> None:
    """A file of the second container, to be downloaded."""
    data = await ctx.second.read(source)
    path = ctx.working_directory / target
    _written(path, data)


def _removed(path: Path) -> None:
    path.unlink()


def _written(path: Path, data: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)
