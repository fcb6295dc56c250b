"""``aenv gc``: find what ended programs left behind on this machine, explain it, and remove it."""

from __future__ import annotations

import asyncio
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import click

from aenv import config
from aenv.cli.output import output_option, say, show_json, show_table
from aenv.errors import Conflict, NetworkError
from aenv.models import parse_duration

if TYPE_CHECKING:
    from aenv.engines.docker.sweeping import Left

_STARTING = 600.0
"""Seconds in which whoever asked for something that is kept has a process with it, or a copy of it."""


class Found(NamedTuple):
    """One row."""

    what: str
    where: str
    why: str


@click.command()
@click.option("--dry-run", is_flag=True, help="Only say what would be removed.")
@click.option(
    "--unused",
    default="30d",
    metavar="TIME",
    help="Remove virtual environments, scripts and projects of containers that nobody used in so long, 10m at least.",
)
@output_option
def gc(dry_run: bool, unused: str, output: str) -> None:
    """Remove what ended programs left behind on this machine.

    Processes, control groups and sockets of sandboxes, containers and their volumes where Docker or Podman answers,
    and old caches. What belongs to a program that is alive is never touched, and storage of services never.

    \b
    Example:
      aenv gc --dry-run
    """
    age = max(parse_duration(unused, "--unused"), _STARTING)
    found = [*_sandboxes(dry_run), *_control_groups(dry_run), *_containers(age, dry_run), *_kept(age, dry_run)]
    if output == "json":
        show_json({"removed": not dry_run, "found": [row._asdict() for row in found]})
        return
    if found:
        show_table(Found._fields, found)
    verb = "would be removed" if dry_run else "removed"
    say(f"{len(found)} {verb}" if found else "nothing is left behind")


def _sandboxes(dry_run: bool) -> list[Found]:
    from aenv.engines.process import state

    return [
        Found(
            "sandboxes",
            str(left.directory),
            f"their program is gone; {len(left.processes)} processes, {len(left.control_groups)} control groups, "
            f"{left.sockets} sockets",
        )
        for left in (state.left() if dry_run else state.sweep())
    ]


def _control_groups(dry_run: bool) -> list[Found]:
    from aenv.engines.process import cgroups

    rows = []
    for path in cgroups.strays():
        if not dry_run:
            cgroups.remove(path)
        rows.append(Found("control group", str(path), "no process is in it, and what made it is gone"))
    return rows


def _containers(age: float, dry_run: bool) -> list[Found]:
    """What is left at the daemon; nothing where there is none. One that is named and does not answer is an error."""
    return [Found(left.what, left.name, left.why) for left in asyncio.run(_swept(age, dry_run))]


async def _swept(age: float, dry_run: bool) -> list[Left]:
    from aenv import http
    from aenv.engines.docker.daemon import Daemon
    from aenv.engines.docker.sweeping import sweep

    try:
        daemon = await Daemon.find()
        return await sweep(daemon, unused=age, dry_run=dry_run)
    except NetworkError:
        if config.get("docker_host") or config.get("docker_default"):
            raise
        return []
    finally:
        await http.close()


def _kept(age: float, dry_run: bool) -> list[Found]:
    from aenv.engines.process import venvs

    rows = []
    for path in venvs.unused(age):
        try:
            if not dry_run:
                venvs.remove(path, age)
        except Conflict:
            continue  # somebody asked for it meanwhile
        rows.append(Found("virtual environment", str(path), "it was not used lately, or never completed"))
    rows += [Found("script", str(path), "it was not used lately") for path in _scripts(age, dry_run)]
    return rows


def _scripts(age: float, dry_run: bool) -> list[Path]:
    folder = config.home() / "cache" / "scripts"
    old = []
    for path in sorted(folder.glob("*")):
        with suppress(FileNotFoundError):  # it was complete at this moment, or is removed by somebody else
            if path.stat().st_mtime < time.time() - age:
                if not dry_run:
                    _remove(path)
                old.append(path)
    return old


def _remove(path: Path) -> None:
    """In one step, for whoever looks for it: what is half removed must not count."""
    with tempfile.TemporaryDirectory(prefix=".", dir=path.parent, ignore_cleanup_errors=True) as aside:
        path.rename(Path(aside, path.name))
