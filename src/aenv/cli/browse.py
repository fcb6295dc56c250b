"""``aenv list``, ``get`` and ``versions``: what there is on the hub."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import click

from aenv.cli.output import output_option, show_json, show_table
from aenv.cli.platform import hub_client, hub_option, page_options, plain, show_page, since, size, talk
from aenv.cli.publish import reference, title
from aenv.wire import Env

SHOWN = 60
"""Most characters of a description in a list."""


@click.command(name="list")
@click.option("--name", help="Only those whose name contains this.")
@click.option("--tags", metavar="TAG,...", multiple=True, help="Only those with all of these tags.")
@click.option("--tool", help="Only those that have this tool.")
@page_options
@hub_option
@output_option
def list_(
    *,
    name: str | None,
    tags: Sequence[str],
    tool: str | None,
    limit: int,
    offset: int,
    hub_url: str | None,
    system_url: str | None,
    output: str,
) -> None:
    """List the environments on the hub.

    \b
    Example:
      aenv list --name terminal --tags linux,shell --limit 20
    """
    wanted = [tag.strip() for given in tags for tag in given.split(",") if tag.strip()]
    hub = hub_client(hub_url, system_url)
    found = talk(hub.list(name=name, tags=wanted, tool=tool, limit=limit, offset=offset), "the hub's list")
    show_page(
        found,
        output,
        ["name", "version", "status", "tools", "tags", "description"],
        lambda env: [
            env.name,
            env.version,
            "Yanked" if env.yanked else title(env),
            len(env.tools),
            ", ".join(env.tags),
            _short(env.description),
        ],
        offset,
    )


@click.command()
@click.argument("name", metavar="NAME[@VERSION]")
@click.option("-v", "--version", help="Which version: exact, a range such as ^1.0, or latest.")
@hub_option
@output_option
def get(*, name: str, version: str | None, hub_url: str | None, system_url: str | None, output: str) -> None:
    """Show an environment on the hub.

    \b
    Example:
      aenv get mini-terminal
      aenv get mini-terminal --version 1.0.1 -o json
    """
    env = talk(hub_client(hub_url, system_url).get(reference(name, version)))
    if output == "json":
        show_json(plain(env))
        return
    rows = {
        "name": env.name,
        "version": env.version,
        "status": title(env),
        "reason": env.reason,
        "yanked": env.yanked,
        "description": env.description,
        "tags": ", ".join(env.tags),
        "owner": env.owner,
        "digest": env.digest,
        "size": size(env.size) if env.digest else "",
        "images": "\n".join(_artifact(one) for one in env.artifacts if one.get("type") == "image"),
        "created": env.created_at,
        "updated": env.updated_at,
        "tools": "\n".join(f"{tool.name}  {_short(tool.description)}".rstrip() for tool in env.tools),
        "rewards": ", ".join(reward.name for reward in env.rewards),
        "functions": ", ".join(function.name for function in env.functions),
        "depends on": "\n".join(_needed(env, alias) for alias in env.dependencies),
    }
    show_table(["what", "value"], [(what, value) for what, value in rows.items() if value])


@click.command()
@click.argument("name")
@hub_option
@output_option
def versions(*, name: str, hub_url: str | None, system_url: str | None, output: str) -> None:
    """List the versions of an environment on the hub.

    \b
    Example:
      aenv versions mini-terminal
    """
    found = talk(hub_client(hub_url, system_url).versions(reference(name, None).name))
    show_page(
        (found, len(found)),
        output,
        ["version", "status", "age", "digest", "yanked"],
        lambda env: [env.version, title(env), since(env.created_at), env.digest[:12], env.yanked],
    )


def _needed(env: Env, alias: str) -> str:
    """An environment that another one depends on: what it asks for, and the version that it gets."""
    asked, locked = env.dependencies[alias], env.locked.get(alias)
    return f"{alias}: {asked}" + (f"  {locked.env}  {locked.digest[:12]}" if locked else "")


def _artifact(artifact: Mapping[str, Any]) -> str:
    """An image that was built: its name, what it is for, and what it is known by."""
    return "  ".join(str(artifact[key]) for key in ("content", "platform", "id") if artifact.get(key))


def _short(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= SHOWN else f"{line[: SHOWN - 3]}..."
