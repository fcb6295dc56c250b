"""``aenv service``: replicas of an environment behind one URL, on a platform."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import Coroutine, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from aenv import project
from aenv.cli import Commands
from aenv.cli.output import FAILED, label, output_option, say, show_json, show_table
from aenv.cli.platform import (
    PATIENCE,
    confirm,
    end_each,
    page_options,
    pairs_option,
    plain,
    services_client,
    show_logs,
    show_page,
    since,
    system_option,
    talk,
    yes_option,
)
from aenv.cli.project import work_dir_option
from aenv.errors import StartFailed
from aenv.models import EnvRef

if TYPE_CHECKING:
    from aenv.client.services import ServicesClient
    from aenv.wire import Service

LONGEST_WAIT = 3600.0
"""Seconds after which nobody believes a platform any more that says of a service that it is on its way."""
_PAUSE = 0.1
"""For platforms that answer at once, whatever is preferred."""
_DONE = ("Running", "Failed", "Terminated")


def _wait_option(command: Any) -> Any:
    return click.option("--wait/--no-wait", default=True, help="Return when all replicas are as they should be.")(
        command
    )


@click.group(cls=Commands)
def service() -> None:
    """Make, watch, change and end services on a platform.

    A service is replicas of an environment behind one URL. It has no TTL: it serves until it is deleted.

    \b
    Example:
      aenv service create mini-terminal@1.0.1 --replicas 3
      aenv service list
    """


@service.command()
@click.argument("env", required=False)
@work_dir_option
@click.option("-s", "--service-name", help="What its id begins with; else the environment's name.")
@click.option("-r", "--replicas", type=click.IntRange(0), help="How many sandboxes serve. Else the environment says.")
@click.option("-p", "--port", type=click.IntRange(1, 65535), help="What they serve on, where an engine has addresses.")
@pairs_option("-e", "--env", "environment_variables", help="A variable for the author's code.")
@click.option("--enable-storage", is_flag=True, help="Give it storage, which outlives it; one replica at most.")
@click.option("--storage-name", help="The storage to use; else the environment says.")
@click.option("--storage-size", help="How much it holds, such as 10Gi. Else the environment says.")
@click.option("--mount-path", help="Where the storage is in the sandbox. Else the environment says.")
@click.option("--owner", help="Whose it is to be; only an admin may name somebody else.")
@pairs_option("--label", "labels", help="A label, which its replicas bear.")
@_wait_option
@system_option
@output_option
def create(
    *,
    env: str | None,
    work_dir: Path,
    service_name: str | None,
    replicas: int | None,
    port: int | None,
    environment_variables: dict[str, str],
    enable_storage: bool,
    storage_name: str | None,
    storage_size: str | None,
    mount_path: str | None,
    owner: str | None,
    labels: dict[str, str],
    wait: bool,
    system_url: str | None,
    output: str,
) -> int:
    """Make a service.

    ENV is a name with or without a version; without it, the project here. What is not given is what the environment's
    deployConfig.service says.

    \b
    Example:
      aenv service create myapp@1.0.0 --replicas 3
      aenv service create myapp@1.0.0 --enable-storage --storage-size 10Gi
    """
    from aenv.wire import ServiceRequest

    request = ServiceRequest(
        env_name=str(EnvRef.parse(env)) if env else _project(work_dir),
        service_name=service_name,
        replicas=replicas,
        environment_variables=environment_variables or None,
        owner=owner,
        pvc_name=storage_name,
        enable_storage=enable_storage or None,
        mount_path=mount_path,
        storage_size=storage_size,
        port=port,
        labels=labels or None,
    )
    services = services_client(system_url)

    async def work() -> Service:
        made = await services.create(request, key=uuid.uuid4().hex)
        say(f"made {made.id}; it serves until: aenv service delete {made.id}")
        return await _settled(services, made) if wait else made

    return _show(talk(work(), quiet=wait), output)


def _project(work_dir: Path) -> str:
    found = project.read(work_dir)
    return f"{found.name}@{found.version}"


@service.command(name="list")
@click.option("-n", "--name", default="*", help="Only of this environment: NAME or NAME@VERSION.", show_default=False)
@click.option("--owner", help="Only of this owner.")
@click.option("-a", "--all", "ended", is_flag=True, help="Those that were deleted lately, too.")
@page_options
@system_option
@output_option
def list_(
    *, name: str, owner: str | None, ended: bool, limit: int, offset: int, system_url: str | None, output: str
) -> None:
    """List the services on a platform.

    \b
    Example:
      aenv service list --name mini-terminal
    """
    if name != "*":
        EnvRef.parse(name)
    asking = services_client(system_url).list(name, owner, ended=ended, limit=limit, offset=offset)
    found, total = talk(asking, "the list of services")
    show_page(
        ([_public(one) for one in found], total),
        output,
        ["id", "env", "status", "ready", "owner", "age", "storage", "reason"],
        lambda one: [
            one.id,
            one.env.id,
            one.status,
            f"{one.available_replicas}/{one.replicas}",
            one.owner,
            since(one.created_at),
            one.pvc_name,
            one.reason[:80],
        ],
        offset,
    )


@service.command()
@click.argument("id")
@system_option
@output_option
def get(*, id: str, system_url: str | None, output: str) -> None:
    """Show a service with its replicas, and what is wrong if something is.

    \b
    Example:
      aenv service get mini-terminal-4f1c
    """
    _show(talk(services_client(system_url).get(id)), output)


@service.command()
@click.argument("id")
@click.option("-r", "--replicas", type=click.IntRange(0), help="How many sandboxes are to serve.")
@click.option("--image", help="What is to run: for engines that run packages, NAME@VERSION or a version.")
@click.option("--version", "version", help="The version that is to run: exact, a range, or latest.")
@pairs_option("-e", "--env", "environment_variables", help="A variable; those that it has are replaced by all given.")
@click.option("--clear-env", is_flag=True, help="Take away all variables that it was given.")
@click.option("--generation", type=int, help="Only if it is at this generation: nobody has changed it since.")
@_wait_option
@system_option
@output_option
def update(
    *,
    id: str,
    replicas: int | None,
    image: str | None,
    version: str | None,
    environment_variables: Mapping[str, str],
    clear_env: bool,
    generation: int | None,
    wait: bool,
    system_url: str | None,
    output: str,
) -> int:
    """Change a service while it serves.

    Another number of replicas touches no other one. Another version or other variables replace them one by one; when
    the new ones do not become ready, the service goes back to what it was.

    \b
    Example:
      aenv service update myapp-4f1c --replicas 5
      aenv service update myapp-4f1c --version 1.1.0 --env MODE=fast
    """
    from aenv.wire import ServiceChange

    if clear_env and environment_variables:
        raise click.UsageError("--clear-env and --env are both given")
    variables = dict(environment_variables) if environment_variables or clear_env else None
    change = ServiceChange(
        replicas=replicas, image=image, version=version, environment_variables=variables, generation=generation
    )
    if change == ServiceChange(generation=generation):
        raise click.UsageError("nothing is to be changed; give --replicas, --version, --image or --env")
    services = services_client(system_url)
    return _changed(services, services.update(id, change), wait, output)


@service.command()
@click.argument("id")
@_wait_option
@system_option
@output_option
def restart(*, id: str, wait: bool, system_url: str | None, output: str) -> int:
    """Put new replicas in the place of all, one by one, while it serves.

    \b
    Example:
      aenv service restart myapp-4f1c
    """
    services = services_client(system_url)
    return _changed(services, services.restart(id), wait, output)


def _changed(services: ServicesClient, asking: Coroutine[Any, Any, Service], wait: bool, output: str) -> int:
    """Have a change made, and show what came of it; the exit code says whether that is what was asked for."""

    async def work() -> tuple[Service, Service]:
        asked = await asking
        return asked, await _settled(services, asked) if wait else asked

    asked, found = talk(work(), quiet=wait)
    code = _show(found, output)
    if found.generation == asked.generation:
        return code
    label("error", f"{found.id} is not as it was asked to be: {found.reason or 'somebody else has changed it'}")
    return FAILED


@service.command()
@click.argument("ids", metavar="ID...", nargs=-1, required=True)
@click.option("--delete-storage", is_flag=True, help="Also remove what they stored, which is kept otherwise.")
@yes_option
@system_option
@output_option
def delete(*, ids: Sequence[str], delete_storage: bool, yes: bool, system_url: str | None, output: str) -> int:
    """End services. What they stored is kept unless asked.

    \b
    Example:
      aenv service delete myapp-4f1c --yes
    """
    what = " with all that they stored" if delete_storage else ""
    confirm(f"End {', '.join(ids)}{what}?", yes)
    end = partial(services_client(system_url).delete, storage=delete_storage)
    return end_each(end, ids, "services", output)


@service.command()
@click.argument("id")
@click.option("-f", "--follow", is_flag=True, help="Go on as they print more, until the service ends.")
@click.option("--tail", type=click.IntRange(0), help="Only so many last lines of each.")
@system_option
@output_option
def logs(*, id: str, follow: bool, tail: int | None, system_url: str | None, output: str) -> None:
    """Show what the replicas of a service printed, each line with the replica's name.

    With -o json, one JSON object; with --follow, one for each line.

    \b
    Example:
      aenv service logs myapp-4f1c --tail 20 --follow
    """
    show_logs(id, services_client(system_url).logs(id, tail, follow), follow, output)


async def _settled(services: ServicesClient, found: Service) -> Service:
    """Wait until it is as it should be; what is under way is said when that changes, and now and then."""
    begun = time.monotonic()
    said, mark = "", float(PATIENCE[0])
    while found.status not in _DONE:
        waited = time.monotonic() - begun
        if waited > LONGEST_WAIT:
            raise StartFailed(f"{found.id} is still {found.status} after {waited:.0f} s: {found.reason}")
        now = f"{found.status.lower()}, {found.available_replicas} of {found.replicas} ready"
        now = f"{now}; {found.reason}" if found.reason else now
        if waited >= mark or (said and now != said):
            say(f"waiting for {found.id}: {now} ... {waited:.0f} s")
            mark = waited + PATIENCE[1]
        said = now
        found = await services.get(found.id, wait=PATIENCE[0])
        await asyncio.sleep(0 if found.status in _DONE else _PAUSE)
    return found


def _public(found: Service) -> Service:
    """Without the credentials, which a list has no use for."""
    import msgspec

    return msgspec.structs.replace(found, agent_token="", owner_token="")


def _tools_url(found: Service) -> str:
    """What an agent is given: it opens the tools, and nothing else."""
    if not found.service_url:
        return ""
    return f"{found.service_url}/mcp?token={found.agent_token}" if found.agent_token else f"{found.service_url}/mcp"


def _show(found: Service, output: str) -> int:
    """A service; the exit code says whether it serves."""
    if output == "json":
        show_json({**plain(found), "mcp": _tools_url(found)})
    else:
        rows: dict[str, Any] = {
            "id": found.id,
            "env": found.env.id,
            "status": found.status,
            "reason": found.reason,
            "replicas": f"{found.available_replicas} of {found.replicas} ready",
            "generation": found.generation,
            "owner": found.owner,
            "variables": ", ".join(found.environment_variables),
            "labels": ", ".join(f"{key}={value}" for key, value in found.labels.items()),
            "storage": f"{found.pvc_name} ({found.storage_size}) at {found.mount_path}" if found.pvc_name else "",
            "port": found.port,
            "created": found.created_at,
            "url": found.service_url,
            "tools (MCP)": _tools_url(found),
        }
        show_table(["what", "value"], [(what, value) for what, value in rows.items() if value not in ("", None)])
        if found.members:
            click.echo()
            columns = ["replica", "env", "status", "ready", "restarts", "age", "reason"]
            show_table(columns, [_row(one) for one in found.members])
    return FAILED if found.status == "Failed" else 0


def _row(one: Any) -> list[Any]:
    ready = "yes" if one.ready else "no"
    return [one.id, one.env, one.status, ready, one.restarts, since(one.created_at), one.reason[:80] or "-"]
