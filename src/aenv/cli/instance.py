"""``aenv instance``: sandboxes on a platform, from outside."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from aenv import project
from aenv.cli import Commands
from aenv.cli.output import label, output_option, say, show_json, show_record, show_table
from aenv.cli.platform import (
    api_client,
    confirm,
    end_each,
    page_options,
    pairs_option,
    plain,
    show_logs,
    show_page,
    since,
    system_option,
    talk,
    yes_option,
)
from aenv.cli.project import work_dir_option
from aenv.models import EnvRef, State, parse_duration, told

if TYPE_CHECKING:
    from aenv.wire import Instance

TIMED_OUT = 124
"""Exit code of a command whose time was over, as timeout(1) has it."""


@click.group(cls=Commands, lazy={"top": ("aenv.cli.top:top", "Watch what instances do at the moment.")})
def instance() -> None:
    """Make, watch and end instances on a platform.

    \b
    Example:
      aenv instance create mini-terminal@1.0.1 --ttl 1h
      aenv instance list
    """


@instance.command()
@click.argument("env", required=False)
@work_dir_option
@click.option("-d", "--datasource", help="The instance's data, as the environment expects it.")
@click.option("-t", "--ttl", help="How long it may live: 90s, 30m, 1h30m, 1d. Else the environment says.")
@pairs_option("-e", "--env", "environment_variables", help="A variable for the author's code.")
@click.option("-a", "--arg", "arguments", multiple=True, help="An argument for the author's code. Repeatable.")
@click.option("--owner", help="Whose it is to be; only an admin may name somebody else.")
@pairs_option("--label", "labels", help="A label to find it by.")
@click.option("--seed", type=int, help="The instance's random seed.")
@click.option("--startup-timeout", type=float, help="Seconds it has to become ready. Else the environment says.")
@click.option("--keep-alive", is_flag=True, help="Return when it runs, and leave it to its TTL.")
@system_option
@output_option
def create(
    *,
    env: str | None,
    work_dir: Path,
    datasource: str | None,
    ttl: str | None,
    environment_variables: dict[str, str],
    arguments: Sequence[str],
    owner: str | None,
    labels: dict[str, str],
    seed: int | None,
    startup_timeout: float | None,
    keep_alive: bool,
    system_url: str | None,
    output: str,
) -> int:
    """Make an instance, and end it with this command.

    ENV is a name with or without a version; without it, the project here. The instance runs until Ctrl-C, or until
    its time is over; with --keep-alive the command returns once it runs.

    \b
    Example:
      aenv instance create myenv@1.0.0 --ttl 1h
      aenv instance create myenv --env MODE=test --label team=a --keep-alive -o json
    """
    from aenv.cli.foreground import hold
    from aenv.wire import InstanceRequest

    if ttl is not None:
        parse_duration(ttl, "--ttl")
    request = InstanceRequest(
        env_name=str(EnvRef.parse(env)) if env else _project(work_dir),
        datasource=datasource or "",
        environment_variables=environment_variables or None,
        arguments=list(arguments) or None,
        ttl=ttl,
        owner=owner,
        labels=labels or None,
        seed=seed,
        startup_timeout=startup_timeout,
    )

    def running(found: Instance) -> None:
        if output == "json":
            show_json({**plain(found), "mcp": _tools_url(found)})
        else:
            _show(found)
        sys.stdout.flush()
        if keep_alive:
            say(f"end it with: aenv instance delete {found.id}")
        else:
            say("it runs until Ctrl-C, or until its time is over")

    return talk(hold(api_client(system_url), request, running, keep_alive), quiet=True)


def _project(work_dir: Path) -> str:
    found = project.read(work_dir)
    return f"{found.name}@{found.version}"


@instance.command(name="list")
@click.option("-n", "--name", default="*", help="Only of this environment: NAME or NAME@VERSION.", show_default=False)
@click.option("--owner", help="Only of this owner.")
@click.option(
    "--status",
    type=click.Choice([state.value for state in State], case_sensitive=False),
    multiple=True,
    help="Only those in this state. May be given several times.",
)
@click.option("-a", "--all", "ended", is_flag=True, help="Those that have ended lately, too.")
@pairs_option("--label", "labels", help="Only with this label.")
@page_options
@system_option
@output_option
def list_(
    *,
    name: str,
    owner: str | None,
    status: Sequence[str],
    ended: bool,
    labels: Mapping[str, str],
    limit: int,
    offset: int,
    system_url: str | None,
    output: str,
) -> None:
    """List the instances on a platform that are alive.

    \b
    Example:
      aenv instance list --name mini-terminal --label team=a
      aenv instance list --all
      aenv instance list --status failed
    """
    if name != "*":
        EnvRef.parse(name)
    api = api_client(system_url)
    wanted = status or ([] if ended else [state.value for state in State if not state.over])
    asking = api.list(name, owner=owner, labels=labels, status=wanted, limit=limit, offset=offset)
    found = talk(asking, "the list of instances")
    items = [_public(one) for one in found[0]]
    show_page(
        (items, found[1]),
        output,
        ["id", "env", "status", "owner", "age", "ends in", "labels", "part of"],
        lambda one: [
            one.id,
            one.env.id,
            one.status,
            one.owner,
            since(one.created_at),
            since(one.expires_at) if one.status in ("Pending", "Creating", "Running") else "",
            ", ".join(f"{key}={value}" for key, value in one.labels.items()),
            one.parent,
        ],
        offset,
    )


@instance.command()
@click.argument("id")
@system_option
@output_option
def get(*, id: str, system_url: str | None, output: str) -> None:
    """Show an instance, and why it failed if it did.

    \b
    Example:
      aenv instance get mini-terminal-4f1c
    """
    found = talk(api_client(system_url).get(id))
    if output == "json":
        show_json({**plain(found), "mcp": _tools_url(found)})
    else:
        _show(found)


@instance.command()
@click.argument("ids", metavar="ID...", nargs=-1, required=True)
@yes_option
@system_option
@output_option
def delete(*, ids: Sequence[str], yes: bool, system_url: str | None, output: str) -> int:
    """End instances.

    \b
    Example:
      aenv instance delete mini-terminal-4f1c --yes
    """
    confirm(f"End {', '.join(ids)}?", yes)
    return end_each(api_client(system_url).delete, ids, "instances", output)


@instance.command()
@click.argument("id")
@click.option("-f", "--follow", is_flag=True, help="Go on as it prints more, until it ends.")
@click.option("--tail", type=click.IntRange(0), help="Only so many last lines.")
@system_option
@output_option
def logs(*, id: str, follow: bool, tail: int | None, system_url: str | None, output: str) -> None:
    """Show what an instance printed.

    With -o json, one JSON object; with --follow, one for each line.

    \b
    Example:
      aenv instance logs mini-terminal-4f1c --tail 20 --follow
    """
    show_logs(id, api_client(system_url).logs(id, tail, follow), follow, output)


@instance.command()
@click.argument("id")
@click.argument("command", nargs=-1, required=True, metavar="-- COMMAND...")
@click.option("--timeout", type=click.FloatRange(0, min_open=True), default=60.0, help="Seconds it may take.")
@click.option("--directory", help="Where to run it; else the project's directory.")
@click.option("-i", "--stdin", is_flag=True, help="Give it what comes on stdin.")
@system_option
@output_option
def exec(
    *,
    id: str,
    command: Sequence[str],
    timeout: float,
    directory: str | None,
    stdin: bool,
    system_url: str | None,
    output: str,
) -> int:
    """Run a command in an instance.

    One word is a line for the shell; several are the program and its arguments. The exit code is the command's; 124
    when its time was over.

    \b
    Example:
      aenv instance exec mini-terminal-4f1c -- ls -l /tmp
      aenv instance exec mini-terminal-4f1c -- 'cat *.txt | wc -l'
    """
    from aenv.wire import Exec

    request = Exec(
        command=command[0] if len(command) == 1 else list(command),
        timeout=timeout,
        directory=directory,
        stdin=sys.stdin.read() if stdin else None,
    )
    done = talk(api_client(system_url).exec(id, request), f"{command[0]} in {id}")
    if output == "json":
        show_json(plain(done))
    else:
        click.echo(done.stdout, nl=False)
        click.echo(done.stderr, nl=False, err=True)
    if done.truncated:
        label("warning", "it wrote more than is kept; what is shown is cut")
    if done.timed_out:
        label("error", f"its {timeout:g} s were over, and it was killed")
        return TIMED_OUT
    return done.returncode if done.returncode >= 0 else 128 - done.returncode


@instance.command()
@click.argument("id")
@click.argument("command", nargs=-1, metavar="[-- COMMAND...]")
@system_option
def shell(*, id: str, command: Sequence[str], system_url: str | None) -> int:
    """Open a shell in an instance, in this terminal.

    Without a terminal, what comes on stdin is its input. With COMMAND, that runs in place of a shell: one word is a
    line for the shell, several are the program and its arguments. It ends with this command, and the exit code is its
    own. A new line, then ~. leaves at once.

    \b
    Example:
      aenv instance shell mini-terminal-4f1c
      aenv instance shell mini-terminal-4f1c -- top
      echo 'ls -l' | aenv instance shell mini-terminal-4f1c
    """
    from aenv.cli.shell import join

    return talk(join(api_client(system_url), id, command), quiet=True)


@instance.command()
@click.argument("id")
@click.argument("ttl")
@system_option
@output_option
def extend(*, id: str, ttl: str, system_url: str | None, output: str) -> None:
    """Let an instance live so long from now.

    \b
    Example:
      aenv instance extend mini-terminal-4f1c 2h
    """
    parse_duration(ttl)
    renewed = talk(api_client(system_url).extend(id, ttl))
    show_record({"id": id, "expires_at": renewed.expires_at}, output)


@instance.command()
@click.argument("id")
@click.argument("port", type=click.IntRange(1, 65535))
@click.option("-t", "--ttl", help="How long the URL is good for; else as long as the instance lives.")
@system_option
@output_option
def expose(*, id: str, port: int, ttl: str | None, system_url: str | None, output: str) -> None:
    """Make a URL for a port on which something in an instance listens.

    Whoever has the URL reaches the port, and nothing else.

    \b
    Example:
      aenv instance expose mini-terminal-4f1c 3000
    """
    from aenv.wire import Expose

    if ttl is not None:
        parse_duration(ttl, "--ttl")
    exposed = talk(api_client(system_url).expose(id, Expose(port=port, ttl=ttl)))
    show_record({"id": id, **plain(exposed)}, output)


def _public(found: Instance) -> Instance:
    """Without the credentials, which a list has no use for."""
    import msgspec

    return msgspec.structs.replace(found, agent_token="", owner_token="")


def _tools_url(found: Instance) -> str:
    """What an agent is given: it opens the tools, and nothing else."""
    if not found.url:
        return ""
    return f"{found.url}/mcp?token={found.agent_token}" if found.agent_token else f"{found.url}/mcp"


def _show(found: Instance) -> None:
    rows: dict[str, Any] = {
        "id": found.id,
        "env": found.env.id,
        "status": found.status,
        "reason": found.reason,
        "start": told(found.phases),
        "owner": found.owner,
        "labels": ", ".join(f"{key}={value}" for key, value in found.labels.items()),
        "needs": "\n".join(f"{alias}: {id}" for alias, id in found.needs.items()),
        "part of": found.parent,
        "created": found.created_at,
        "ends": found.expires_at,
        "url": found.url,
        "tools (MCP)": _tools_url(found),
    }
    show_table(["what", "value"], [(what, value) for what, value in rows.items() if value])
