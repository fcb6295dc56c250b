"""What the commands print: data on stdout, as a table or JSON; talk on stderr; failures with exit codes."""

from __future__ import annotations

import json
import os
import re
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Literal, NamedTuple, TextIO, TypeVar

import click

from aenv import config
from aenv.errors import AEnvError, InvalidConfig

F = TypeVar("F", bound=Callable[..., Any])
FAILED, USAGE, CONFIGURATION, INTERRUPTED = 1, 2, 3, 130
_COMMANDS = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u202a-\u202e\u2066-\u2069]")
"""Characters that a terminal obeys, or that turn the direction of what follows."""
_COLOURS = {
    "ok": "green",
    "warn": "yellow",
    "fail": "red",
    "error": "red",
    "hint": "cyan",
    "warning": "yellow",
}


class Check(NamedTuple):
    """One row of ``validate`` and ``doctor``."""

    check: str
    status: Literal["ok", "warn", "fail"]
    detail: str
    fix: str = ""


def output_option(command: F) -> F:
    """``-o/--output``, which every command takes."""
    return click.option(
        "-o",
        "--output",
        type=click.Choice(["table", "json"]),
        default="table",
        help="How to print the result.",
    )(command)


def say(text: str) -> None:
    """Talk to the person: stderr, never mixed with data."""
    click.echo(text, err=True)


def label(word: str, text: str) -> None:
    """A line like ``error: ...`` on stderr."""
    say(f"{_coloured(word, sys.stderr)}: {harmless(text)}")


def harmless(text: str) -> str:
    """Text of others, spelled out where it would tell a terminal to do something."""
    return _COMMANDS.sub(lambda found: found[0].encode("unicode_escape").decode(), text)


@contextmanager
def stdout_reserved() -> Iterator[TextIO]:
    """The real stdout; inside, what author code, a sandbox or a test prints there goes to stderr."""
    sys.stdout.flush()
    with os.fdopen(os.dup(1), "w", encoding="utf-8") as real:
        os.dup2(2, 1)
        try:
            yield real
        finally:
            sys.stdout.flush()
            os.dup2(real.fileno(), 1)


def show_json(data: Any, file: TextIO | None = None) -> None:
    click.echo(json.dumps(data, indent=2, default=str), file=file)


def show_table(columns: Sequence[str], rows: Iterable[Sequence[Any]]) -> None:
    """Columns as wide as their widest cell. A cell of several lines goes on below itself."""
    cells = [[[harmless(line) for line in str(cell).splitlines()] or [""] for cell in row] for row in rows]
    widths = [
        max([len(column), *(len(line) for row in cells for line in row[index])]) for index, column in enumerate(columns)
    ]
    _line([column.upper() for column in columns], widths)
    for row in cells:
        for number in range(max(len(cell) for cell in row)):
            _line([cell[number] if number < len(cell) else "" for cell in row], widths)


def show_record(record: Mapping[str, Any], output: str) -> None:
    """One thing with its properties."""
    if output == "json":
        show_json(record)
    else:
        show_table(["what", "value"], record.items())


def show_checks(checks: Sequence[Check], output: str) -> int:
    """Checks with what to do about each; the exit code."""
    failed = sum(row.status == "fail" for row in checks)
    if output == "json":
        show_json({"ok": not failed, "checks": [row._asdict() for row in checks]})
    else:
        show_table(Check._fields, checks)
        warned = sum(row.status == "warn" for row in checks)
        say(f"checks: {len(checks)}, failed: {failed}, warnings: {warned}")
    return FAILED if failed else 0


def failure(exc: Exception, *, debug: bool) -> int:
    """Tell the person what went wrong, in one place for every command; the exit code."""
    if isinstance(exc, click.exceptions.Abort):
        label("error", "interrupted")
        return INTERRUPTED
    if isinstance(exc, click.exceptions.NoArgsIsHelpError):
        say(exc.format_message())
        return USAGE
    if isinstance(exc, click.ClickException):
        ctx = getattr(exc, "ctx", None)
        path = ctx.command_path if ctx else "aenv"
        _explain(exc.format_message(), getattr(exc, "hint", None) or f"run '{path} --help'")
        return exc.exit_code
    debug = debug or config.get("debug")
    if debug:
        say("".join(traceback.format_exception(exc)).rstrip())
    if isinstance(exc, AEnvError):
        _explain(exc.message, exc.hint)
        return CONFIGURATION if isinstance(exc, InvalidConfig) else FAILED
    if isinstance(exc, OSError):
        _explain(f"{exc.filename}: {exc.strerror}" if exc.filename else str(exc), None)
    else:
        hint = "run it again as 'aenv --debug ...' to see where it happened"
        _explain(f"unexpected {type(exc).__name__}: {exc}", None if debug else hint)
    return FAILED


def _explain(message: str, hint: str | None) -> None:
    first, *more = message.splitlines() or [""]
    label("error", first)
    for line in more:
        say(f"  {harmless(line)}")
    if hint:
        label("hint", hint)


def _line(cells: Sequence[str], widths: Sequence[int]) -> None:
    padded = [cell.ljust(width) for cell, width in zip(cells, widths, strict=True)]
    while padded and not padded[-1].strip():
        padded.pop()
    if padded:
        padded[-1] = padded[-1].rstrip()
    click.echo("  ".join(_coloured(cell, sys.stdout) for cell in padded), color=True)


def _coloured(text: str, stream: TextIO) -> str:
    colour = _COLOURS.get(text.strip())
    return click.style(text, fg=colour) if colour and config.colour(stream) else text
