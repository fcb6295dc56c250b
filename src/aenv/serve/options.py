"""What is served, and how; and what of that cannot be."""

from __future__ import annotations

from pathlib import Path
from urllib.parse import urlsplit

import msgspec

from aenv.engines import engine_class
from aenv.errors import Invalid, did_you_mean
from aenv.models import NAME
from aenv.runtime.access import is_loopback

PORT, DATA_PORT = 8080, 8081
TITLES = {
    "all": "AEnvironment platform",
    "hub": "AEnvironment hub",
    "api": "AEnvironment API service",
    "controller": "AEnvironment controller",
}


class Options(msgspec.Struct, frozen=True, kw_only=True):
    """What is served, and how. Every default is that of a platform for this machine's user alone."""

    what: str = "all"
    """``all``, ``hub``, ``api`` or ``controller``."""
    host: str = "127.0.0.1"
    port: int = PORT
    """Of the control plane; 0 for any that is free."""
    data_port: int = DATA_PORT
    data_url: str = ""
    """What clients call the data port, when it is not this machine's own address."""
    store: str = ""
    """``sqlite:PATH`` or ``redis://...``; empty for a file in the home."""
    blobs: str = ""
    """``file:PATH`` or ``s3://...``; empty for a folder in the home."""
    engine: str = "process"
    hub_url: str = ""
    """The hub that ``api`` alone asks."""
    project: Path | None = None
    """Serve instances of the project there, and nothing else: ``api`` without a hub. They end with the server."""
    legacy: int = 0
    """How often it was said that an instance's id may stand in for a credential on the data port; beyond this machine
    it must be said twice."""
    ports_domain: str = ""
    """The domain, or a URL of it, under which exposed ports get an origin of their own."""
    carry: bool = False
    """Whether a controller carries the calls to all sandboxes, also to those that have an address of their own."""
    datasources: list[str] = []
    """Directories whose content instances may be given as data."""
    name: str = ""
    """What this server is called among those on one store; empty for the machine's name."""
    lifeline: int | None = None
    """A descriptor: the server ends when what it reads does."""


def check(options: Options) -> None:
    """Raise what is wrong with them, as far as that can be known before anything is begun."""
    if not options.host:
        raise Invalid("no address to listen on is given", hint="use 127.0.0.1, or 0.0.0.0 for every one that there is")
    if options.data_url and (
        urlsplit(options.data_url).scheme not in ("http", "https") or "//" not in options.data_url
    ):
        raise Invalid(f"{options.data_url!r} is not the URL of a data port", hint="use https://data.example.org")
    if options.what not in TITLES:
        raise Invalid(f"there is no {options.what!r} to serve", hint=did_you_mean(options.what, TITLES))
    if options.carry and options.what != "controller":
        raise Invalid("only a controller hands out addresses of sandboxes", hint="aenv serve controller --carry-calls")
    if options.what == "api" and not options.hub_url and options.project is None:
        raise Invalid("an API service needs a hub", hint="name it with --hub-url, or serve everything: aenv serve")
    if options.what != "api" and (options.hub_url or options.project is not None):
        raise Invalid("only an API service asks another hub", hint="aenv serve api --hub-url URL")
    if options.name and not NAME.fullmatch(options.name):
        raise Invalid(f"{options.name[:64]!r} is not a server's name", hint="use letters, digits, '-', '_' and '.'")
    for path in options.datasources:
        if not Path(path).is_dir() and not engine_class(options.engine).shared:
            raise Invalid(f"{path} is no directory that instances could be given", hint="--allow-datasource names one")
    if options.legacy == 1 and not is_loopback(options.host):
        raise Invalid(
            f"the legacy data plane on {options.host} lets in whoever learns an instance's id",
            hint="say it twice if that is meant: --legacy-data-plane --legacy-data-plane-beyond-loopback",
        )
