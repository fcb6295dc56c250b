"""Writes docs/reference/cli.md from the commands' own help; ``--check`` says whether it is up to date."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import click

from aenv.cli import cli

PAGE = Path(__file__).parent.parent / "docs" / "reference" / "cli.md"
WIDTH = 100
HEADER = """# The `aenv` command

Made from `aenv --help` by `scripts/cli_reference.py`. Data goes to stdout and talk to stderr;
with `-o json`, stdout is JSON and nothing else. `NO_COLOR` turns colours off.
"""


def sections(command: click.Command, path: str, parent: click.Context | None = None) -> Iterator[str]:
    """The help of a command and of those below it."""
    ctx = click.Context(
        command,
        parent=parent,
        info_name=path.rsplit(" ", 1)[-1],
        terminal_width=WIDTH,
        **command.context_settings,
    )
    yield f"{'#' * (path.count(' ') + 2)} `{path}`\n\n```text\n{command.get_help(ctx).rstrip()}\n```\n"
    if isinstance(command, click.Group):
        for name in command.list_commands(ctx):
            found = command.get_command(ctx, name)
            if found is not None and not found.hidden:
                yield from sections(found, f"{path} {name}", ctx)


def page() -> str:
    return "\n".join([HEADER, *sections(cli, "aenv")])


def main() -> int:
    if "--check" not in sys.argv[1:]:
        PAGE.parent.mkdir(parents=True, exist_ok=True)
        PAGE.write_text(page(), encoding="utf-8")
        return 0
    if PAGE.is_file() and PAGE.read_text(encoding="utf-8") == page():
        return 0
    sys.stderr.write(f"{PAGE} is out of date; run: python scripts/cli_reference.py\n")
    return 1


if __name__ == "__main__":
    sys.exit(main())
