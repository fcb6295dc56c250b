"""``aenv tasks``: which tasks an environment has; and the options by which commands choose some of them."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import click
import msgspec

from aenv.cli import Commands
from aenv.cli.output import output_option, say, show_json, show_table
from aenv.cli.platform import pairs_option, system_option
from aenv.cli.playing import environment_of, run_closing
from aenv.evals.tasksets import Taskset
from aenv.rl.viewing.text import line, plain

F = TypeVar("F", bound=Callable[..., Any])
SHOWN = 100
"""Characters of an instruction in a list."""


def selection_options(command: F) -> F:
    """What an environment is asked for, where its function ``tasks`` takes that."""
    for option in (
        pairs_option("--option", help="Another argument of the environment's function 'tasks'."),
        click.option("--split", help="The part of the tasks that is meant, where the environment knows parts."),
        click.option("--domain", help="The domain that is meant, where the environment knows several."),
    ):
        command = option(command)
    return command


def instance_options(command: F) -> F:
    """What the instance is made with that tells the tasks."""
    return pairs_option("-e", "--env-var", help="A variable of the instance.")(system_option(output_option(command)))


tasks_option = click.option(
    "--tasks",
    "chosen",
    multiple=True,
    metavar="FILE|IDS",
    help="Which tasks: a file with a task a line, as JSON; or ids and patterns such as 'air-*', by comma. Repeatable.",
)


async def taskset_of(options: Mapping[str, Any]) -> Taskset:
    """The tasks that are meant: those of a file, or those that the environment tells, and of these the chosen."""
    selection = dict(options["option"])
    selection |= {name: options[name] for name in ("domain", "split") if options[name] is not None}
    chosen: Sequence[str] = options.get("chosen", ())
    files = [text for text in chosen if _is_file(text)]
    if files:
        if len(chosen) > 1 or selection:
            raise click.UsageError("a file of tasks is all there is to choose: leave out what else chooses tasks")
        return Taskset.read(options["env"], Path(files[0]))
    found = await Taskset.load(environment_of(options), selection)
    return found.only(*chosen) if chosen else found


def _is_file(text: str) -> bool:
    return text.endswith(".jsonl") or os.path.isfile(text)  # which takes a list of many ids for no file


@click.group(cls=Commands)
def tasks() -> None:
    """List and show the tasks of an environment.

    ENV is a name as in Environment. It tells its tasks by its function 'tasks'.

    \b
    Example:
      aenv tasks list my-benchmark --domain airline
    """


@tasks.command("list")
@click.argument("env")
@tasks_option
@selection_options
@click.option("--limit", type=click.IntRange(1), help="Most tasks to list.")
@instance_options
def list_(**options: Any) -> None:
    """List the tasks of an environment.

    \b
    Example:
      aenv tasks list my-benchmark
      aenv tasks list my-benchmark --domain airline --tasks '1*' -o json
    """
    found = run_closing(taskset_of(options))
    shown = found.head(options["limit"] or len(found))
    if options["output"] == "json":
        items = [msgspec.to_builtins(task) for task in shown]
        about = {"env": found.env, "source": msgspec.to_builtins(found.source), "selection": found.selection}
        show_json({**about, "digest": found.digest, "total": len(found), "tasks": items})
        return
    show_table(["id", "instruction"], [[line(task.id), _short(task.instruction)] for task in shown])
    source = f" of {found.source}" if str(found.source) else ""
    say(f"tasks: {len(found)}{source}, shown: {len(shown)}, sha256: {found.digest}")


@tasks.command()
@click.argument("env")
@click.argument("id")
@selection_options
@instance_options
def show(**options: Any) -> None:
    """Show one task of an environment.

    \b
    Example:
      aenv tasks show my-benchmark 7 --domain airline
    """
    task = run_closing(taskset_of(options))[options["id"]]
    fields = msgspec.to_builtins(task)
    if options["output"] == "json":
        show_json(fields)
        return
    rows = [[name, plain(_written(value))] for name, value in fields.items()]
    show_table(["what", "value"], rows)


def _written(value: Any) -> str:
    return value if isinstance(value, str) else msgspec.json.encode(value).decode()


def _short(text: str) -> str:
    words = line(text)
    return words if len(words) <= SHOWN else f"{words[: SHOWN - 3]}..."
