"""``aenv quota``: what the platform, an owner or an experiment may have at once, and what is in use."""

from __future__ import annotations

import math

import click

from aenv.cli import Commands
from aenv.cli.output import output_option, say, show_json
from aenv.cli.platform import api_client, page_options, plain, show_page, size, system_option, talk
from aenv.errors import Invalid
from aenv.wire import Quota, QuotaRequest


@click.group(cls=Commands)
def quota() -> None:
    """Show and set limits: of the platform, of owners, of experiments.

    An experiment is what the label `experiment` of an instance says. What does not fit under a limit waits in a queue
    that is fair to owners and experiments.

    \b
    Example:
      aenv quota list
      aenv quota set owner:alice --instances 100 --cpu 32 --memory 64Gi --rate 20
    """


@quota.command(name="list")
@page_options
@system_option
@output_option
def list_(*, limit: int, offset: int, system_url: str | None, output: str) -> None:
    """List the limits that concern you, or, for an admin, everybody's, with what is in use.

    \b
    Example:
      aenv quota list
    """
    found = talk(api_client(system_url).quotas(limit=limit, offset=offset), "the limits")
    show_page(found, output, ["subject", "instances", "cpu", "memory", "creates/s", "waiting"], _row, offset)


@quota.command(name="set")
@click.argument("subject")
@click.option("--instances", type=int, metavar="N", help="Instances that live at once, replicas of services included.")
@click.option("--cpu", metavar="CORES", help="Cores of all of them together: 32, 0.5, 500m.")
@click.option("--memory", metavar="SIZE", help="Memory of all of them together: 64Gi.")
@click.option("--rate", type=float, metavar="N", help="Creates per second.")
@click.option("--waiting", type=int, metavar="N", help="Instances that may wait in the queue; more are refused.")
@system_option
@output_option
def set_(
    *,
    subject: str,
    instances: int | None,
    cpu: str | None,
    memory: str | None,
    rate: float | None,
    waiting: int | None,
    system_url: str | None,
    output: str,
) -> None:
    """Limit SUBJECT, in place of the limits that it has. What lives beyond them lives on. For admins.

    SUBJECT is platform, owner:NAME, or experiment:OWNER/NAME; owner and experiment are for each that has no limits of
    its own.

    \b
    Example:
      aenv quota set platform --instances 500
      aenv quota set experiment:alice/sweep-7 --instances 50
    """
    if rate is not None and not math.isfinite(rate):
        raise Invalid(f"--rate {rate:g} is no number of creates", hint="leave it out to set none")
    request = QuotaRequest(instances=instances, creates_per_second=rate, cpu=cpu, memory=memory, waiting=waiting)
    if request == QuotaRequest():
        raise Invalid("no limit is given", hint=f"give one, or take all away: aenv quota delete {subject}")
    made = talk(api_client(system_url).set_quota(subject, request))
    if output == "json":
        show_json(plain(made))
    else:
        say(f"set {made.subject}")


@quota.command()
@click.argument("subject")
@system_option
@output_option
def delete(*, subject: str, system_url: str | None, output: str) -> None:
    """Take the limits of SUBJECT away; those for each hold for it then, where there are any. For admins.

    \b
    Example:
      aenv quota delete owner:alice
    """
    talk(api_client(system_url).delete_quota(subject))
    if output == "json":
        show_json({"subject": subject, "deleted": True})
    else:
        say(f"deleted {subject}")


def _row(found: Quota) -> list[str]:
    used = found.used
    memory = size(int(used["memory"])) if "memory" in used else "0"
    return [
        found.subject,
        _of(f"{used.get('instances', 0):g}", found.instances),
        _of(f"{used.get('cpu', 0):g}", found.cpu),
        _of(memory, found.memory),
        "-" if found.creates_per_second is None else f"{found.creates_per_second:g}",
        _of(f"{used.get('waiting', 0):g}", found.waiting),
    ]


def _of(used: str, most: object) -> str:
    """What is in use, of what there may be."""
    return used if most is None else f"{used} of {most}"
