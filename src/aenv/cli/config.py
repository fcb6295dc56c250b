"""``aenv config``: this user's settings, and where each value comes from."""

from __future__ import annotations

from typing import Any

import click

from aenv import config as settings
from aenv.cli import Commands
from aenv.cli.output import label, output_option, say, show_json, show_record, show_table
from aenv.errors import Conflict, InvalidConfig, NotFound


@click.group(cls=Commands)
def config() -> None:
    """Show and change this user's settings.

    A value comes from the environment variable, else from the config file, else it is the default.

    \b
    Example:
      aenv config set system_url http://aenv.example.org
      aenv config show
    """


@config.command()
@output_option
@click.option("--reveal", is_flag=True, help="Show secrets too.")
def show(output: str, reveal: bool) -> None:
    """Show every setting, its value and where the value comes from.

    \b
    Example:
      aenv config show
    """
    rows = []
    for found in settings.SETTINGS:
        value, source = settings.lookup(found.key)
        if found.in_file or source != "default":
            shown = "********" if found.secret and value and not reveal else value
            rows.append({"key": found.key, "value": shown, "source": source, "variable": found.variable})
    if output == "json":
        show_json(rows)
    else:
        show_table(list(rows[0]), [["-" if cell in (None, "") else cell for cell in row.values()] for row in rows])
    for key in sorted(set(settings.read_file()) - {found.key for found in settings.SETTINGS}):
        label("warning", f"{settings.path()}: {key} is not a known setting")


@config.command()
@click.argument("key")
@output_option
def get(key: str, output: str) -> None:
    """Print the value of one setting.

    \b
    Example:
      aenv config get system_url
    """
    value, source = settings.lookup(key)
    if output == "json":
        show_json({"key": key, "value": value, "source": source})
    elif value is None:
        raise NotFound(f"{key} is not set", hint=f"set it with 'aenv config set {key} VALUE'")
    else:
        click.echo(value)


@config.command(name="set")
@click.argument("key")
@click.argument("value", required=False)
@output_option
def set_(key: str, value: str | None, output: str) -> None:
    """Write a setting to the config file.

    Without VALUE, that of a token or key is read from standard input, or asked for: others could see an argument.

    \b
    Example:
      aenv config set system_url http://aenv.example.org
      aenv config set api_key
    """
    found = settings.setting(key)
    if not found.in_file:
        raise InvalidConfig(f"{key} cannot be set in the file", hint=f"use the environment variable {found.variable}")
    if value is None:
        if not found.secret:
            raise click.UsageError(f"give a value for {key}")
        from aenv.cli.secret import secret_value

        value = secret_value(key)
    if not value:
        raise InvalidConfig(f"{key} needs a value", hint=f"run 'aenv config unset {key}' to go back to the default")
    coerced = settings.coerce(found, value, key)
    settings.write_file({**settings.read_file(), key: coerced})
    _done(output, {"key": key, "value": "********" if found.secret else coerced, "file": str(settings.path())})
    effective, source = settings.lookup(key)
    if effective != coerced:
        label("warning", f"{source} is set and counts more than the file")


@config.command()
@click.argument("key")
@output_option
def unset(key: str, output: str) -> None:
    """Remove a setting from the config file, so that its default counts again.

    \b
    Example:
      aenv config unset system_url
    """
    values = settings.read_file()
    if key not in values:
        settings.setting(key)
        raise NotFound(f"{key} is not in {settings.path()}")
    del values[key]
    settings.write_file(values)
    _done(output, {"key": key, "value": None, "file": str(settings.path())})


@config.command()
@click.option("--force", is_flag=True, help="Write over a file that exists.")
@output_option
def init(force: bool, output: str) -> None:
    """Write a config file that lists every setting, none of them set.

    \b
    Example:
      aenv config init
    """
    file = settings.path()
    if file.exists() and not force:
        raise Conflict(f"{file} exists already", hint="give --force to write over it")
    settings.write_file({found.key: None for found in settings.SETTINGS if found.in_file})
    _done(output, {"file": str(file)})


@config.command()
@click.option("-y", "--yes", is_flag=True, help="Do not ask.")
@output_option
def reset(yes: bool, output: str) -> None:
    """Remove the config file, so that every default counts again.

    \b
    Example:
      aenv config reset --yes
    """
    file = settings.path()
    if file.exists() and not yes:
        click.confirm(f"Remove {file}?", abort=True, err=True)
    file.unlink(missing_ok=True)
    _done(output, {"file": str(file)})


@config.command()
@output_option
def path(output: str) -> None:
    """Print where the config file is.

    \b
    Example:
      aenv config path
    """
    if output == "json":
        show_json({"path": str(settings.path())})
    else:
        click.echo(settings.path())


def _done(output: str, record: dict[str, Any]) -> None:
    if output == "json":
        show_record(record, output)
    else:
        say(f"wrote {record['file']}" if "key" in record else f"done: {record['file']}")
