"""``aenv trajectory``: recorded episodes, to be looked at and to be taken to a trainer."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import IO, TYPE_CHECKING, Any, TypeVar

import click

from aenv import config
from aenv.cli import Commands
from aenv.cli.output import output_option, say, show_json, show_record, show_table
from aenv.errors import Invalid, NotFound
from aenv.rl.files import NAME, located

if TYPE_CHECKING:
    from aenv.rl.exporting import Exported
    from aenv.rl.trajectory import Trajectory

F = TypeVar("F", bound=Callable[..., Any])
"""What the file is called in the directory of a run."""
COLUMNS = ("id", "task", "group", "sample", "outcome", "turns", "seconds", "reason")
_WIDTH = 100
"""Columns where there is no terminal to ask."""
_LONGEST_CELL = 60


def file_argument(command: F) -> F:
    """The file of trajectories, or the directory of a run that holds one."""
    return click.argument("file", type=click.Path(path_type=Path))(command)


@click.group(cls=Commands)
def trajectory() -> None:
    """Look at recorded episodes, and export them.

    FILE holds trajectories, one a line, or is a directory with a trajectories.jsonl in it.

    \b
    Example:
      aenv trajectory list runs/first
      aenv trajectory show runs/first --index 3
      aenv trajectory html runs/first --out first.html
      aenv trajectory export runs/first --format trl --out first.trl.jsonl
    """


@trajectory.command(name="list")
@file_argument
@click.option("--failed", is_flag=True, help="Only those without a score.")
@click.option("-n", "most", type=click.IntRange(min=1), metavar="N", help="Only the first N.")
@output_option
def list_(*, file: Path, failed: bool, most: int | None, output: str) -> None:
    """List the episodes of a file.

    \b
    Example:
      aenv trajectory list runs/first
      aenv trajectory list runs/first --failed -n 20
      aenv trajectory list trajectories.jsonl -o json
    """
    from aenv.rl.viewing.text import line

    items = [_item(found) for found in islice((one for one in _read(file) if not (failed and one.ok)), most)]
    if output == "json":
        show_json({"items": items})
        return
    show_table(COLUMNS, [[_cell(line(item[column])) for column in COLUMNS] for item in items])
    scores = [item["score"] for item in items if item["score"] is not None]
    mean = f", mean reward of the scored: {sum(scores) / len(scores):.4g}" if scores else ""
    say(f"episodes: {len(items)}, scored: {len(scores)}, failed: {len(items) - len(scores)}{mean}")


@trajectory.command()
@file_argument
@click.option("--id", "wanted", metavar="ID", help="The episode with this id, or with the only one that begins so.")
@click.option("--index", type=click.IntRange(min=0), metavar="N", help="The Nth of the file, from 0; else the first.")
@click.option("--full", is_flag=True, help="Do not cut long texts.")
@output_option
def show(*, file: Path, wanted: str | None, index: int | None, full: bool, output: str) -> None:
    """Show one episode, turn by turn.

    Control characters in what tools and models wrote are spelled out.

    \b
    Example:
      aenv trajectory show runs/first
      aenv trajectory show runs/first --id 4f1d09c2 --full | less -R
    """
    from aenv.rl.viewing import text

    if wanted is not None and index is not None:
        raise click.UsageError("--id and --index both choose an episode: give one of them")
    found = _by_id(file, wanted) if wanted is not None else _by_index(file, index or 0)
    if output == "json":
        import msgspec

        show_json(msgspec.to_builtins(found))
        return
    width = shutil.get_terminal_size((_WIDTH, 24)).columns
    colour = config.colour(sys.stdout)
    click.echo(text.render(found, colour=colour, width=width, full=full), nl=False, color=colour)


@trajectory.command()
@file_argument
@click.option("--out", type=click.Path(path_type=Path, dir_okay=False), help="The page; else beside FILE.")
@click.option("--most", type=click.IntRange(min=1), default=1000, metavar="N", help="Most episodes on the page.")
@output_option
def html(*, file: Path, out: Path | None, most: int, output: str) -> None:
    """Write a page with the episodes, to be opened in a browser.

    It is one file that loads nothing. '#' and an id at the end of its address choose an episode.

    \b
    Example:
      aenv trajectory html runs/first
      aenv trajectory html trajectories.jsonl --out page.html --most 200
    """
    from aenv.rl.viewing.html import page

    source = located(file)
    target = out or source.with_suffix(".html")
    title = (source.parent if source.name == NAME else source).resolve().name
    total = 0

    def counted() -> Iterator[Trajectory]:
        nonlocal total
        for total, found in enumerate(_read(file), 1):  # noqa: B007
            yield found

    with _written(target, source) as stream:
        stream.write(page(counted(), title=title, most=most).encode())
    shown = min(total, most)
    show_record({"file": str(target), "episodes": shown, "left_out": total - shown}, output)


@trajectory.command()
@file_argument
@click.option("--format", "format", required=True, help="openai, sharegpt, trl, dpo or tokens.")
@click.option("--out", type=click.Path(path_type=Path, dir_okay=False), help="The file to write; else stdout.")
@output_option
def export(*, file: Path, format: str, out: Path | None, output: str) -> None:
    """Write the episodes as rows for a trainer, one JSON object a line.

    Episodes without a score are in no row. Those that the format cannot hold are neither; how many these are and why
    is told at the end. -o is for what is told of the file of --out.

    \b
    openai    messages and tools, for fine-tuning at OpenAI
    sharegpt  conversations, as LLaMA-Factory takes them
    trl       prompt, completion, reward and group
    dpo       the best and the worst of each group: prompt, chosen and rejected
    tokens    token ids with their log-probabilities and a loss mask, where these were recorded

    \b
    Example:
      aenv trajectory export runs/first --format openai > rows.jsonl
      aenv trajectory export runs/first --format dpo --out pairs.jsonl -o json
    """
    from aenv.rl import exporting

    rows = exporting.export(_read(file), format)
    if out is None:
        _write(rows, sys.stdout.buffer)
        sys.stdout.flush()
        left = "".join(f", {why}: {count}" for why, count in rows.left_out.items())
        say(f"rows: {rows.rows}, left out: {sum(rows.left_out.values())}{left}")
        return
    with _written(out, located(file)) as stream:
        _write(rows, stream)
    record = {"file": str(out), "format": format, "rows": rows.rows}
    if output == "json":
        show_json(record | {"left_out": rows.left_out})
    else:
        show_record(record | {f"left out, {why}": count for why, count in rows.left_out.items()}, output)


# Files


def _read(file: Path) -> Iterator[Trajectory]:
    from aenv.rl.files import read

    return read(file)


@contextmanager
def _written(target: Path, source: Path) -> Iterator[IO[bytes]]:
    """A file that is there when all of it is: what cannot be read leaves the one before in its place."""
    if target.exists() and source.exists() and target.samefile(source):
        raise Invalid(f"{target} holds the trajectories", hint="give another --out")
    with NamedTemporaryFile(dir=target.parent, prefix=f".{target.name}.", delete=False) as stream:
        try:
            yield stream
            stream.flush()
            os.chmod(stream.name, 0o666 & ~_mask())
            os.replace(stream.name, target)
        except BaseException:
            os.unlink(stream.name)
            raise


def _mask() -> int:
    mask = os.umask(0o022)
    os.umask(mask)
    return mask


def _write(rows: Exported, stream: IO[bytes]) -> None:
    from aenv.models import to_json

    for row in rows:
        stream.write(to_json(row) + b"\n")


# Episodes


def _by_index(file: Path, index: int) -> Trajectory:
    found = next(islice(_read(file), index, None), None)
    if found is None:
        raise NotFound(
            f"{located(file)} has no episode {index}", hint=f"'aenv trajectory list {file}' shows those it has"
        )
    return found


def _by_id(file: Path, wanted: str) -> Trajectory:
    begun: list[Trajectory] = []
    for found in _read(file):
        if found.id == wanted:
            return found
        if found.id.startswith(wanted) and len(begun) < 2:
            begun.append(found)
    if wanted and len(begun) == 1:
        return begun[0]
    many = "more than one episode whose id begins with" if begun else "no episode"
    raise NotFound(f"{located(file)} has {many} {wanted!r}", hint=f"'aenv trajectory list {file}' shows those it has")


def _item(found: Trajectory) -> dict[str, Any]:
    failed = found.failure
    return {
        "id": found.id,
        "env": found.env,
        "task": found.task.id,
        "group": found.group,
        "sample": found.sample,
        "outcome": f"{found.reward:g}" if failed is None else failed.kind,
        "score": found.reward if failed is None else None,
        "turns": len(found.turns),
        "seconds": round(found.seconds.get("total", 0.0), 3),
        "reason": "" if failed is None else failed.reason,
    }


def _cell(text: str) -> str:
    return text if len(text) <= _LONGEST_CELL else f"{text[: _LONGEST_CELL - 3]}..."
