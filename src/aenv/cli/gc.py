"""``aenv gc``: find what ended programs left behind on this machine, explain it, and remove it."""

from __future__ import annotations

import time
from pathlib import Path
from typing import NamedTuple

import click

from aenv import config
from aenv.cli.output import output_option, say, show_json, show_table
from aenv.models import parse_duration


class Found(NamedTuple):
    """One row."""

    what: str
    where: str
    why: str


@click.command()
@click.option("--dry-run", is_flag=True, help="Only say what would be removed.")
@click.option(
    "--unused", default="30d", metavar="TIME", help="Remove kept environments that were not used for so long."
)
@output_option
def gc(dry_run: bool, unused: str, output: str) -> None:
    """Remove what ended programs left behind on this machine.

    Processes, control groups and sockets of sandboxes, and old caches. What belongs to a program that is alive is
    never touched.

    \b
    Example:
      aenv gc --dry-run
    """
    age = parse_duration(unused, "--unused")
    found = [*_sandboxes(dry_run), *_control_groups(dry_run), *_kept(age, dry_run)]
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


def _kept(age: float, dry_run: bool) -> list[Found]:
    from aenv.engines.process import venvs

    rows = []
    for path in venvs.unused(age):
        if not dry_run:
            venvs.remove(path)
        rows.append(Found("virtual environment", str(path), "it was not used lately, or never completed"))
    rows += [Found("script", str(path), "it was not used lately") for path in _scripts(age, dry_run)]
    return rows


def _scripts(age: float, dry_run: bool) -> list[Path]:
    import shutil

    folder = config.home() / "cache" / "scripts"
    old = [path for path in folder.glob("*") if path.stat().st_mtime < time.time() - age]
    for path in () if dry_run else old:
        shutil.rmtree(path, ignore_errors=True)
    return old
