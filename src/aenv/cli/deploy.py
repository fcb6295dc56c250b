"""``aenv deploy``: the platform on a Kubernetes cluster, from the values of its chart and without Helm."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from aenv.cli.output import output_option, say, show_json
from aenv.errors import Invalid
from aenv.models import parse_duration

if TYPE_CHECKING:
    from aenv.deploy.applying import Change, Site
    from aenv.deploy.chart import Chart, Release


@click.command()
@click.option("--render", is_flag=True, help="Print the objects as YAML and change nothing; no cluster is needed.")
@click.option(
    "-f",
    "--values",
    "files",
    type=click.Path(dir_okay=False, path_type=Path),
    multiple=True,
    help="A file with values over those of the chart. Repeatable; the last one counts.",
)
@click.option(
    "--set", "settings", metavar="KEY=VALUE", multiple=True, help="One value, over those of files. Repeatable."
)
@click.option("--release", "name", default="aenv", metavar="NAME", help="What the deployment is called.")
@click.option("-n", "--namespace", default="aenv", metavar="NAME", help="The namespace of the platform.")
@click.option("--kubeconfig", type=click.Path(dir_okay=False), help="Where the cluster is. Else as kubectl finds it.")
@click.option("--context", metavar="NAME", help="Context of the kubeconfig. Else its current one.")
@click.option("--kube-version", metavar="1.N", help="With --render: the version of Kubernetes that it is for.")
@click.option("--api-versions", metavar="GROUP/V", multiple=True, help="An API that the cluster has too. Repeatable.")
@click.option("--dry-run", is_flag=True, help="Let the cluster check everything, and change nothing.")
@click.option("--no-wait", is_flag=True, help="Do not wait until every server is up.")
@click.option("--timeout", default="10m", metavar="TIME", help="How long to wait for that.")
@click.option("--delete", is_flag=True, help="Remove the deployment. Volumes, secrets and sandboxes are kept.")
@click.option("--with-data", is_flag=True, help="With --delete: remove also what is kept.")
@output_option
def deploy(
    *,
    render: bool,
    files: Sequence[Path],
    settings: Sequence[str],
    name: str,
    namespace: str,
    kubeconfig: str | None,
    context: str | None,
    kube_version: str | None,
    api_versions: Sequence[str],
    dry_run: bool,
    no_wait: bool,
    timeout: str,
    delete: bool,
    with_data: bool,
    output: str,
) -> None:
    """Put the platform on a Kubernetes cluster, or bring it up to date there.

    The chart is the one that Helm takes too, and so are the values: docs/reference/values.md lists them. Run it again
    to change or upgrade; what is no longer asked for is removed.

    \b
    Example:
      aenv deploy --set image.repository=registry.example.org/aenv-platform
      aenv deploy --render -f values.yaml > platform.yaml
      aenv deploy --delete
    """
    from aenv.deploy.chart import Release, chart

    if delete and render:
        raise click.UsageError("--render shows what would be made, and --delete makes nothing")
    if with_data and not delete:
        raise click.UsageError("--with-data goes with --delete")
    if kube_version and not render:
        raise click.UsageError("--kube-version goes with --render: a cluster says itself which one it is")
    patience = parse_duration(timeout, "--timeout")
    release = Release(name=name, namespace=namespace, more_apis=frozenset(api_versions))
    release.check()
    found = chart()
    values = found.effective(files, settings)
    if render:
        _render(found, values, release, kube_version, output)
        return
    changes = asyncio.run(
        _on_cluster(
            found,
            values,
            release,
            (kubeconfig, context),
            None if no_wait else patience,
            dry_run,
            delete,
            with_data,
            output,
        )
    )
    if output == "json":
        show_json({"dry_run": dry_run, "objects": [change._asdict() for change in changes]})


def _render(chart: Chart, values: dict[str, Any], release: Release, version: str | None, output: str) -> None:
    from msgspec.structs import replace

    if version:
        found = re.fullmatch(r"v?1\.(\d{1,3})(\.\d+)?", version)
        if found is None:
            raise Invalid(f"--kube-version {version!r} is no version of Kubernetes", hint="use 1.29")
        release = replace(release, version=(1, int(found[1])))
    rendered = chart.render(values, release)
    if output == "json":
        show_json({"apiVersion": "v1", "kind": "List", "items": [found.content for found in rendered.objects]})
    else:
        click.echo(rendered.text, nl=False)


async def _on_cluster(
    chart: Chart,
    values: dict[str, Any],
    release: Release,
    where: tuple[str | None, str | None],
    patience: float | None,
    dry_run: bool,
    delete: bool,
    with_data: bool,
    output: str,
) -> list[Change]:
    from aenv import http
    from aenv.deploy.applying import Site
    from aenv.engines.kubernetes.api import Cluster

    try:
        cluster = await Cluster.find(*where)
        site = Site(cluster, release, dry_run=dry_run)
        await site.look()
        rendered = await site.render(chart, values)
        if delete:
            namespaces = {found.content["metadata"].get("namespace", "") for found in rendered.objects}
            return await _told(site.delete(namespaces, everything=with_data), output)
        changes = await _told(site.apply(rendered.objects), output)
        changes += await _told(site.prune(rendered.objects), output)
        if dry_run:
            say("nothing was changed")
            return changes
        await _ready(site, rendered.objects, patience)
        say(f"\n{rendered.notes}")
        return changes
    finally:
        await http.close()


async def _ready(site: Site, objects: Sequence[Any], patience: float | None) -> None:
    if patience is not None:
        await site.wait(objects, patience, say)
        say("everything is ready")


async def _told(changes: AsyncIterator[Change], output: str) -> list[Change]:
    """All of them, each told as it happens."""
    found = []
    async for change in changes:
        found.append(change)
        if output == "table" and change.action != "unchanged":
            say(
                f"{change.action} {change.kind} {change.name}" + (f" in {change.namespace}" if change.namespace else "")
            )
    return found
