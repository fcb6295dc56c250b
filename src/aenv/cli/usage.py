"""``aenv usage``: what was used on a platform, to be read or taken elsewhere."""

from __future__ import annotations

import csv
import sys
import time
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

import click

from aenv.cli.output import show_json, show_table
from aenv.cli.platform import api_client, system_option, talk

if TYPE_CHECKING:
    from aenv.client.api import ApiClient
    from aenv.wire import Usage

NUMBERS = ("instances", "instance_seconds", "cpu_seconds", "calls")
WINDOW = 7 * 86400
"""Seconds that are asked for at once: the platform reads day by day."""
KEPT_FOR = 401 * 86400
"""Seconds of which a platform may know anything."""
_PAGE = 1000

BY: dict[str, dict[str, Callable[[Usage], str]]] = {
    "hour": {
        "hour": lambda row: row.hour,
        "owner": lambda row: row.owner,
        "experiment": lambda row: row.experiment,
    },
    "day": {
        "day": lambda row: row.hour[:10],
        "owner": lambda row: row.owner,
        "experiment": lambda row: row.experiment,
    },
    "experiment": {"owner": lambda row: row.owner, "experiment": lambda row: row.experiment},
    "owner": {"owner": lambda row: row.owner},
}
"""What rows are added up by: the columns that tell them apart."""


@click.command()
@click.option("--since", default="24h", metavar="TIME", help="From when on: how long ago, such as 7d, or ISO 8601.")
@click.option("--until", metavar="TIME", help="Until when; else until now.")
@click.option("--owner", help="Only of this owner. An admin sees everybody's.")
@click.option("--experiment", metavar="NAME", help="Only of this experiment: the value of that label; '' for none.")
@click.option("--by", type=click.Choice(list(BY)), default="experiment", help="What is added up to one row.")
@system_option
@click.option(
    "-o", "--output", type=click.Choice(["table", "json", "csv"]), default="table", help="How to print the result."
)
def usage(
    *,
    since: str,
    until: str | None,
    owner: str | None,
    experiment: str | None,
    by: str,
    system_url: str | None,
    output: str,
) -> None:
    """Show or export what was used, by owner and experiment.

    Whole hours are counted: the one in which --since is, and those after it. By hour and by day, there is a row for
    each owner and experiment.

    \b
    Example:
      aenv usage --since 7d --by day
      aenv usage --since 2026-01-01 --until 2026-02-01 --by hour -o csv > january.csv
    """
    from aenv.wire import moment, timestamp

    now = time.time()
    begin = max(moment(since, now, "--since"), now - KEPT_FOR)
    end = moment(until, now, "--until") if until else now
    if begin >= end:
        raise click.UsageError(f"--since {timestamp(begin)} is not before --until {timestamp(end)}")
    rows = talk(_rows(api_client(system_url), begin, end, owner, experiment), "what was used")
    items = _added_up(rows, by)
    if output == "json":
        show_json({"items": items, "since": timestamp(begin), "until": timestamp(end), "by": by})
    elif output == "csv":
        writer = csv.DictWriter(sys.stdout, [*BY[by], *NUMBERS], lineterminator="\n")
        writer.writeheader()
        writer.writerows(items)
    else:
        columns = [*BY[by], *NUMBERS]
        show_table(
            [column.replace("_", " ") for column in columns],
            [["-" if item[column] == "" else item[column] for column in columns] for item in items],
        )


async def _rows(api: ApiClient, begin: float, end: float, owner: str | None, experiment: str | None) -> list[Usage]:
    """All rows of a time, however long, the oldest first."""
    from aenv.wire import timestamp

    found: list[Usage] = []
    start = begin // 3600 * 3600
    while end - start >= 0.001:
        stop = min(start + WINDOW, end)
        window: list[Usage] = []
        while True:
            times = (timestamp(start), timestamp(stop))
            some, total = await api.usage(*times, owner=owner, experiment=experiment, limit=_PAGE, offset=len(window))
            window += some
            if not some or len(window) >= total:
                break
        found += reversed(window)
        start = stop
    return found


def _added_up(rows: Iterable[Usage], by: str) -> list[dict[str, Any]]:
    """One item for each that differs, by the columns of ``by``, in their order."""
    sums: dict[tuple[str, ...], dict[str, Any]] = {}
    for row in rows:
        names = tuple(column(row) for column in BY[by].values())
        item = sums.setdefault(names, dict(zip(BY[by], names, strict=True)) | dict.fromkeys(NUMBERS, 0))
        for number in NUMBERS:
            item[number] += getattr(row, number)
    for item in sums.values():
        for number in ("instance_seconds", "cpu_seconds"):
            item[number] = round(item[number], 3)
    return [sums[names] for names in sorted(sums)]
