"""``aenv serve``: a platform on this machine, for its user or for a team."""

from __future__ import annotations

import logging
import sys
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING

import click

from aenv import config
from aenv.cli.output import label, output_option, say, show_json, stdout_reserved

if TYPE_CHECKING:
    from aenv.rl.model_gateway import Upstream
    from aenv.serve import Options, Running

STDIN = 0


@click.command()
@click.argument("what", type=click.Choice(["all", "hub", "api", "controller", "models"]), default="all")
@click.option(
    "--engine",
    help="Where sandboxes come from: process, docker, kubernetes, http=URL, pkg.mod:Class. Else AENV_ENGINE; process.",
)
@click.option("--store", help="Where records are: sqlite:PATH or redis://host:port/0. Else AENV_STORE, or ~/.aenv.")
@click.option("--blobs", help="Where packages are: file:PATH or s3://bucket/prefix. Else ~/.aenv.")
@click.option("--host", default="127.0.0.1", help="Address to listen on. Beyond this machine, real tokens are needed.")
@click.option("--port", type=click.IntRange(0, 65535), default=8080, help="Port of the control plane; 0 for any.")
@click.option("--data-port", type=click.IntRange(0, 65535), default=8081, help="Port of the gateway; 0 for any.")
@click.option("--data-url", metavar="URL", help="What clients call the gateway, if not as it listens.")
@click.option("--hub-url", metavar="URL", help="The hub that 'serve api' asks.")
@click.option("--ports-domain", metavar="NAME", help="Domain under which exposed ports get their origins.")
@click.option(
    "--allow-datasource",
    "datasources",
    metavar="DIR",
    type=click.Path(file_okay=False, path_type=Path),
    multiple=True,
    help="A directory whose content instances may be given as data. Repeatable.",
)
@click.option(
    "--carry-calls", is_flag=True, help="Of a controller: carry all calls, also where a sandbox has an address."
)
@click.option("--name", help="What this server is called on its store. Else by machine and home.")
@click.option(
    "--legacy-data-plane",
    is_flag=True,
    help="Let an instance's id stand in for a credential on the data port, as existing clients expect.",
)
@click.option(
    "--legacy-data-plane-beyond-loopback", is_flag=True, help="Say it again, where the port is not only this machine's."
)
@click.option(
    "--upstream", "upstreams", metavar="URL", multiple=True, help="Of models: a server's base URL. Repeatable."
)
@click.option(
    "--upstream-key",
    "upstream_keys",
    metavar="VARIABLE",
    multiple=True,
    help="Of models: the variable with the provider's key; one for all, or one for each server.",
)
@click.option("--upstream-model", metavar="NAME", help="Of models: what servers are asked for, whatever agents name.")
@click.option(
    "--allow-field",
    "allowed_fields",
    metavar="NAME",
    multiple=True,
    help="Of models: a field of the servers' own that agents may send. Repeatable.",
)
@click.option("--no-tokens", is_flag=True, help="Of models: do not ask for token ids and log-probabilities.")
@click.option("--log-format", type=click.Choice(["text", "json"]), help="How its log is written. Else AENV_LOG_FORMAT.")
@click.option("--project", type=click.Path(file_okay=False, path_type=Path), hidden=True)
@click.option("--until-eof", is_flag=True, hidden=True)
@output_option
def serve(
    *,
    what: str,
    engine: str | None,
    store: str | None,
    blobs: str | None,
    host: str,
    port: int,
    data_port: int,
    data_url: str | None,
    hub_url: str | None,
    ports_domain: str | None,
    datasources: Sequence[Path],
    carry_calls: bool,
    name: str | None,
    legacy_data_plane: bool,
    legacy_data_plane_beyond_loopback: bool,
    upstreams: Sequence[str],
    upstream_keys: Sequence[str],
    upstream_model: str | None,
    allowed_fields: Sequence[str],
    no_tokens: bool,
    log_format: str | None,
    project: Path | None,
    until_eof: bool,
    output: str,
) -> None:
    """Serve a platform: hub, API service and gateway.

    Without more, all of it for this machine's user: on the loopback, with SQLite and the process engine. Programs of
    this user find their token by themselves. 'serve hub' and 'serve api' serve a part. 'serve controller' serves an
    engine, for API services elsewhere that name it as their own: --engine http=URL. 'serve models' serves a gateway
    to the servers of a model, which records what agents ask them.

    It runs until Ctrl-C. Its instances live on, and are found again when it is started again. With -o json, one JSON
    object is printed when it is ready.

    \b
    Example:
      aenv serve
      aenv serve --engine docker
      aenv serve --engine kubernetes --store redis://redis:6379/0
      aenv serve --host 0.0.0.0 --store redis://redis:6379/0 --blobs s3://envs/packages
      aenv serve api --hub-url http://hub.example.org:8080
      aenv serve controller --engine docker --port 8090 --data-port 8091
      aenv serve --engine http=http://127.0.0.1:8090
      aenv serve models --upstream http://gpu-1:8000/v1 --upstream http://gpu-2:8000/v1 --port 8085
    """
    if (what == "models") != bool(upstreams):
        raise click.UsageError("'serve models' needs --upstream URL, and nothing else takes it")
    if what == "models":
        from aenv.serve import models

        servers = models.upstreams(upstreams, upstream_keys, upstream_model or "")
        _models(servers, host, port, not no_tokens, allowed_fields, log_format=log_format, output=output)
        return
    from aenv import serve as platform
    from aenv.web import logs

    options = platform.Options(
        what=what,
        host=host,
        port=port,
        data_port=data_port,
        data_url=data_url or "",
        store=(config.get("store", store) if project is None else store) or "",
        blobs=blobs or "",
        engine=config.get("engine", engine) or "process",
        hub_url=hub_url or "",
        project=project,
        legacy=_legacy(host, legacy_data_plane, legacy_data_plane_beyond_loopback),
        ports_domain=ports_domain or "",
        datasources=[str(path.absolute()) for path in datasources],
        carry=carry_calls,
        name=name or "",
        lifeline=STDIN if until_eof else None,
    )
    logs.configure(log_format, level=logging.INFO if project is None else logging.WARNING)

    def ready(running: Running) -> None:
        if output == "json":
            show_json(_summary(options, running), stdout)
            stdout.flush()
            running = running._replace(first_token=None)  # it is told once
        if logs.lines() is not None:
            _ready_line(options, running)
        elif project is None:
            _banner(options, running)

    with stdout_reserved() if output == "json" else nullcontext(sys.stdout) as stdout:
        platform.serve(options, ready)


def _models(
    servers: Sequence[Upstream],
    host: str,
    port: int,
    tokens: bool,
    allowed_fields: Sequence[str],
    *,
    log_format: str | None,
    output: str,
) -> None:
    from aenv.serve import models
    from aenv.web import logs

    logs.configure(log_format, level=logging.INFO)

    def ready(url: str) -> None:
        if output == "json":
            show_json({"what": "models", "url": url}, stdout)
            stdout.flush()
        else:
            say(f"\nthe model gateway is ready: {url}")
            say(f"  how to begin an episode: {url}/docs")
            say("stop it with Ctrl-C\n")

    with stdout_reserved() if output == "json" else nullcontext(sys.stdout) as stdout:
        models.serve(servers, host, port, tokens=tokens, allowed_fields=allowed_fields, ready=ready)


def _legacy(host: str, once: bool, twice: bool) -> int:
    from aenv.runtime.access import is_loopback

    if twice and not once:
        raise click.UsageError("--legacy-data-plane-beyond-loopback adds to --legacy-data-plane")
    if once and not twice and not is_loopback(host):
        raise click.UsageError(
            f"--legacy-data-plane on {host} lets everybody who learns an instance's id into it; "
            "give --legacy-data-plane-beyond-loopback too if that is meant"
        )
    return once + twice


def _summary(options: Options, running: Running) -> dict[str, str | None]:
    return {
        "what": options.what,
        "url": running.control_url,
        "data_url": running.data_url or None,
        "token_file": str(running.token_file) if running.token_file else None,
        "first_token": running.first_token,
    }


def _ready_line(options: Options, running: Running) -> None:
    """The banner of a server whose log is JSON. A token has no place in a log: it goes where data goes."""
    from aenv.web import logs

    fields = {"control": running.control_url, "data": running.data_url or None}
    logging.getLogger("aenv.serve").info("%s is ready", _TITLES[options.what], extra=logs.fields(fields))
    if running.first_token:
        click.echo(f"export AENV_API_KEY={running.first_token}")


def _banner(options: Options, running: Running) -> None:
    data = f" data {running.data_url}" if running.data_url else ""
    say(f"\n{_TITLES[options.what]} is ready: control {running.control_url}{data}")
    say(f"  how to ask it: {running.control_url}/docs")
    if running.token_file is not None:
        say(f"  token: {running.token_file}; the SDK and CLI of this user read it by themselves")
    if running.first_token:
        say(f"\nthe first token, an admin's; it is not shown again:\n  export AENV_API_KEY={running.first_token}")
        scopes = "--scope engine" if options.what == "controller" else "--scope read --scope run"
        say(f"make one for everybody else: aenv token create --owner NAME {scopes}")
    if options.what == "controller":
        say(f"\nhave an API service use it:\n  aenv serve --engine http={running.control_url}")
        say("stop it with Ctrl-C\n")
        return
    variable = "AENV_HUB_URL" if options.what == "hub" else "AENV_SYSTEM_URL"
    say(f"\nuse it from another terminal:\n  export {variable}={running.control_url}")
    if options.what != "api":
        say("  aenv push my-env")
    if options.what != "hub":
        say("  aenv instance create my-env")
    if options.legacy:
        label("warning", "who knows an instance's id needs no token on the data port")
    say("stop it with Ctrl-C\n")


_TITLES = {"all": "the platform", "hub": "the hub", "api": "the API service", "controller": "the controller"}
