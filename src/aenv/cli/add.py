"""``aenv add``: a service of others as a project, or its description in a project anew."""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable, Sequence
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import click

from aenv import project
from aenv.cli import Commands
from aenv.cli.output import harmless, label, output_option, say, show_json
from aenv.config import replace_file
from aenv.errors import AEnvError, Invalid, NotFound
from aenv.project import Project

F = TypeVar("F", bound=Callable[..., Any])
STORED = {"mcp": "src/server.json", "openapi": "src/openapi.json", "a2a": "src/agent-card.json"}
"""Where a project keeps what its service was."""


class Wanted(NamedTuple):
    """What is asked of every ``aenv add``."""

    kind: str
    name: str | None
    version: str
    work_dir: Path
    update: bool
    force: bool
    output: str


@click.group(cls=Commands)
def add() -> None:
    """Make a project of an MCP server, an HTTP service or an A2A agent.

    The service is read once. What it offered is kept in the project, so that a published version does not change; the
    project's module is a few lines, and yours to edit.

    \b
    Example:
      aenv add mcp --name everything -- npx -y @modelcontextprotocol/server-everything@2026.8.31
      aenv add openapi https://api.example.org/openapi.json --read-only
      aenv add a2a https://agent.example.org
    """


def _common(kind: str) -> Callable[[F], F]:
    def apply(command: F) -> F:
        options = (
            click.option("-n", "--name", help="The project's name; by default what the service calls itself."),
            click.option("-v", "--version", default="1.0.0", help="The project's version."),
            click.option(
                "-w",
                "--work-dir",
                type=click.Path(file_okay=False, path_type=Path),
                default=".",
                help="Where to make the project's directory, or find it.",
            ),
            click.option("--update", is_flag=True, help=f"Write {STORED[kind]} of a project anew, and nothing else."),
            click.option("--force", is_flag=True, help="Write over the files in a directory that is not empty."),
            output_option,
        )
        for option in reversed(options):
            command = option(command)
        return command

    return apply


bearer_option = click.option(
    "--bearer", metavar="SECRET", help="Name of the secret, and here of the variable, with the token that it wants."
)


@add.command()
@click.argument("source", nargs=-1, required=True, metavar="COMMAND... | URL")
@bearer_option
@_common("mcp")
def mcp(source: Sequence[str], bearer: str | None, **given: Any) -> None:
    """Wrap an MCP server: a command that each sandbox runs, or the URL of one over streamable HTTP.

    Options of aenv stand before --, the command behind it. It is carried out in the project's directory, in which a
    server may be; 'python' is the interpreter that has what the project requires.

    \b
    Example:
      aenv add mcp --name everything -- npx -y @modelcontextprotocol/server-everything@2026.8.31
      aenv add mcp https://example.org/mcp --bearer EXAMPLE_TOKEN
    """
    words = shlex.split(source[0]) if len(source) == 1 else list(source)
    asked: Any = words[0] if len(words) == 1 and words[0].startswith(("http://", "https://")) else words
    wanted = Wanted("mcp", **given)
    there = wanted.work_dir / wanted.name if wanted.name else None
    _add(wanted, asked, bearer=bearer, cwd=there if there and there.is_dir() else None)


@add.command()
@click.argument("source", metavar="URL | FILE")
@click.option("--server", help="Address of the service, where the document does not say it, or not yours.")
@click.option(
    "--include", multiple=True, metavar="PATTERN", help="Only these: names of tools, or such as 'GET /pets/*'."
)
@click.option("--exclude", multiple=True, metavar="PATTERN", help="All but these.")
@click.option("--read-only", is_flag=True, help="Only what changes nothing: GET, HEAD and OPTIONS.")
@_common("openapi")
def openapi(
    source: str, server: str | None, include: Sequence[str], exclude: Sequence[str], read_only: bool, **given: Any
) -> None:
    """Wrap an HTTP service by its OpenAPI document, 3.0 or 3.1, in JSON or YAML.

    \b
    Example:
      aenv add openapi https://api.example.org/openapi.json --read-only
      aenv add openapi shop.yaml --server http://localhost:8000 --include 'GET /items*'
    """
    _add(Wanted("openapi", **given), source, server=server, include=include, exclude=exclude, read_only=read_only)


@add.command()
@click.argument("source", metavar="URL | CARD")
@bearer_option
@_common("a2a")
def a2a(source: str, bearer: str | None, **given: Any) -> None:
    """Wrap an A2A agent: a conversation with it, as tools. Its card is read at its URL, or is a file.

    \b
    Example:
      aenv add a2a https://agent.example.org
    """
    _add(Wanted("a2a", **given), source, bearer=bearer)


def _add(wanted: Wanted, source: Any, **options: Any) -> None:
    try:
        module = import_module(f"aenv.integrations.wrapping.{wanted.kind}")
    except ModuleNotFoundError as exc:
        raise NotFound(f"{exc.name} is not installed", hint=f"pip install 'aenvironment[{wanted.kind}]'") from exc
    found = module.look(source, **options)
    name = wanted.name or found.name
    if not name:
        raise Invalid("the service does not say what it is called", hint="name the project with --name")
    text = json.dumps(found.stored, indent=1, ensure_ascii=False) + "\n"
    if not _is_text(text):
        raise Invalid("the service tells of itself in halves of characters", hint="mend them where it says so")
    root = wanted.work_dir / name
    for what, why in found.left_out.items():
        label("warning", f"{what} is left out: {why}")
    if wanted.update:
        _update(
            wanted,
            root,
            found,
            text,
            partial(module.tools_of, **options) if wanted.kind == "openapi" else module.tools_of,
        )
        return
    about = " ".join(found.about.split())[:200]
    deploy: dict[str, Any] = {"network": {"allow": list(found.allow)}} if found.allow else {}
    deploy |= {"secrets": list(found.secrets)} if found.secrets else {}
    written = project.scaffold(
        name,
        wanted.work_dir,
        template=f"added/{wanted.kind}",
        version=wanted.version,
        force=wanted.force,
        words={**found.words, "about": about},
        config={"description": about, "deployConfig": deploy},
        files={STORED[wanted.kind]: text},
    )
    if wanted.output == "json":
        show_json(
            {
                "name": name,
                "version": wanted.version,
                "directory": str(root.absolute()),
                "files": [str(file.relative_to(root)) for file in written],
                "tools": list(found.tools),
                "left_out": found.left_out,
                "network": list(found.allow),
                "secrets": list(found.secrets),
            }
        )
        return
    shown = [*list(found.tools)[:8], *(["..."] if len(found.tools) > 8 else [])]
    listed = harmless(", ".join(shown))
    say(f"made {name} {wanted.version} in {root}, with {len(found.tools)} of its tools: {listed}")
    if found.allow:
        say(f"  its sandboxes may reach {', '.join(found.allow)}, and no other host")
    for one in found.secrets:
        say(f"  it needs the secret {one}: aenv secret set {one}")
    say(f"\nnext:\n  cd {shlex.quote(str(root))}\n  aenv run        serve it on http://localhost:8081")


def _is_text(text: str) -> bool:
    """Whether UTF-8 can carry it: JSON may escape half of a character, which no sandbox could tell its clients."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _update(
    wanted: Wanted, root: Path, found: Any, text: str, tools_of: Callable[[dict[str, Any]], dict[str, Any]]
) -> None:
    """Write what a project keeps of its service anew, and say what became of its tools."""
    there = project.read(root)
    file = root / STORED[wanted.kind]
    try:
        before = tools_of(json.loads(file.read_text(encoding="utf-8")))
    except FileNotFoundError:
        raise NotFound(
            f"{root} has no {STORED[wanted.kind]}",
            hint=f"make the project with 'aenv add {wanted.kind}', without --update",
        ) from None
    except (ValueError, AEnvError):
        before = {}
    replace_file(file, text)
    changes = {
        "added": sorted(found.tools.keys() - before.keys()),
        "removed": sorted(before.keys() - found.tools.keys()),
        "changed": sorted(name for name, tool in found.tools.items() if name in before and before[name] != tool),
    }
    lacking = _lacking(there, found)
    if wanted.output == "json":
        show_json({"name": there.name, "version": there.version, "directory": str(root.absolute()), **changes})
    else:
        told = "; ".join(f"{what}: {', '.join(names)}" for what, names in changes.items() if names)
        say(harmless(told) or "nothing has changed")
        if any(changes.values()):
            say(f"raise the version in {root / 'config.json'} before you publish it")
    for one in lacking:
        label("warning", one)


def _lacking(there: Project, found: Any) -> list[str]:
    network = there.value("deployConfig.network")
    allowed = network.get("allow", []) if isinstance(network, dict) else found.allow
    secrets = there.value("deployConfig.secrets")
    return [
        *(f"deployConfig.network does not allow {host}" for host in found.allow if host not in allowed),
        *(f"deployConfig.secrets does not name {one}" for one in found.secrets if one not in secrets),
    ]
