"""``aenv top``: what instances do at the moment, drawn again every few seconds."""

from __future__ import annotations

import asyncio
import sys
from contextlib import suppress
from datetime import datetime
from typing import TYPE_CHECKING, Any

import click

from aenv.cli.output import output_option, show_json, show_table
from aenv.cli.platform import api_client, system_option, talk

if TYPE_CHECKING:
    from aenv.client.api import ApiClient
    from aenv.wire import Load, Top

_CLEAR = "\x1b[H\x1b[2J"
_FIRST = 1.0
"""Seconds between the two looks that one picture needs."""


@click.command()
@click.option("--owner", help="Only of this owner. An admin sees everybody's.")
@click.option("-l", "--limit", type=click.IntRange(1, 200), default=20, help="Most instances to show.")
@click.option("--every", type=click.FloatRange(0.2), default=2.0, metavar="SECONDS", help="How often to draw it.")
@click.option("--once", is_flag=True, help="Draw it once; so it is where the output is no terminal.")
@system_option
@output_option
def top(*, owner: str | None, limit: int, every: float, once: bool, system_url: str | None, output: str) -> None:
    """Watch what instances do at the moment.

    The busiest come first. Ctrl-C ends it. 'aenv instance top' is the same.

    \b
    Example:
      aenv top
      aenv top --once -o json
      aenv instance top --owner ada
    """
    api = api_client(system_url)
    if output == "json" or once or not sys.stdout.isatty():
        talk(_draw(api, owner, limit, _FIRST, output), "what instances do")
        return
    with suppress(KeyboardInterrupt, click.exceptions.Abort):
        talk(_draw(api, owner, limit, every, output, live=True), quiet=True)


async def _draw(
    api: ApiClient, owner: str | None, limit: int, every: float, output: str, *, live: bool = False
) -> None:
    """Show what goes on between two looks, once or, ``live``, again and again."""
    before = await api.top(owner=owner, most=limit)
    while True:
        await asyncio.sleep(every)
        now = await api.top(owner=owner, most=limit)
        if live:
            click.echo(_CLEAR, nl=False)
        _show(before, now, output)
        if not live:
            return
        before = now


def _show(before: Top, now: Top, output: str) -> None:
    seconds = max((_time(now.at) - _time(before.at)).total_seconds(), 0.001)
    then = {load.id: load for load in before.loads}
    items = sorted((_item(load, then.get(load.id), seconds) for load in now.loads), key=_business)
    if output == "json":
        show_json({"at": now.at, "counts": now.counts, "items": items})
        return
    listed = ", ".join(f"{count} {status.lower()}" for status, count in sorted(now.counts.items()))
    click.echo(f"{now.at}  {listed or 'no instances'}")
    show_table(
        ["id", "env", "owner", "experiment", "cpu %", "memory", "calls/s", "calls"],
        [
            [
                *(item["id"], item["env"], item["owner"], item["experiment"] or "-"),
                *("-" if item["cpu"] is None else f"{100 * item['cpu']:.1f}", _mega(item["memory"])),
                *(f"{item['calls_per_second']:.1f}", item["calls"]),
            ]
            for item in items
        ],
    )


def _item(load: Load, before: Load | None, seconds: float) -> dict[str, Any]:
    cpu = None
    if load.cpu_seconds is not None and before is not None and before.cpu_seconds is not None:
        cpu = round(max(load.cpu_seconds - before.cpu_seconds, 0.0) / seconds, 4)
    calls = load.calls - (before.calls if before is not None else 0)
    return {
        "id": load.id,
        "env": load.env,
        "owner": load.owner,
        "experiment": load.experiment,
        "service": load.service,
        "created_at": load.created_at,
        "cpu": cpu,
        "cpu_seconds": load.cpu_seconds,
        "memory": load.memory,
        "calls": load.calls,
        "calls_per_second": round(max(calls, 0) / seconds, 2),
    }


def _business(item: dict[str, Any]) -> tuple[float, float, str]:
    return -(item["cpu"] or 0.0), -item["calls_per_second"], item["id"]


def _time(text: str) -> datetime:
    return datetime.fromisoformat(text.replace("Z", "+00:00"))


def _mega(size: int | None) -> str:
    return "-" if size is None else f"{size / 1024 / 1024:.1f} MB"
