"""``aenv hub``: a whole hub in one file, and back."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from aenv import config
from aenv.cli import Commands
from aenv.cli.output import output_option, show_record
from aenv.cli.platform import talk
from aenv.errors import Conflict, NotFound

if TYPE_CHECKING:
    from aenv.hub.moving import Moved
    from aenv.store import Store
    from aenv.store.blobs import Blobs

F = TypeVar("F", bound=Callable[..., Any])


def place_options(command: F) -> F:
    """``--store`` and ``--blobs``, as ``aenv serve`` takes them."""
    store = click.option("--store", help="Where the hub's records are. Else where 'aenv serve' has them.")
    blobs = click.option("--blobs", help="Where its packages are. Else where 'aenv serve' has them.")
    return store(blobs(command))


@click.group(cls=Commands)
def hub() -> None:
    """Move a whole hub: export and import.

    Both work on the hub's records and packages themselves. A hub on SQLite is stopped for that time.

    \b
    Example:
      aenv hub export hub.tar
      aenv hub import hub.tar --store redis://redis:6379/0 --blobs s3://envs/packages
    """


@hub.command()
@click.argument("file", type=click.Path(dir_okay=False, path_type=Path))
@place_options
@output_option
def export(*, file: Path, store: str | None, blobs: str | None, output: str) -> None:
    """Write every environment, version and package of a hub to a file.

    \b
    Example:
      aenv hub export hub.tar
    """
    from aenv.hub import moving

    own = _own() / "platform.db"
    if not store and not own.exists():
        raise NotFound(f"there is no hub in {own.parent}", hint="name it with --store and --blobs")
    moved = talk(_opened(store, blobs, lambda records, packages: moving.export(records, packages, file)), f"{file}")
    _show(file, moved, output)


@hub.command(name="import")
@click.argument("file", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@place_options
@output_option
def import_(*, file: Path, store: str | None, blobs: str | None, output: str) -> None:
    """Add to a hub what another exported.

    What is there already stays as it is. When something is there and different, nothing is added.

    \b
    Example:
      aenv hub import hub.tar
    """
    from aenv.hub import moving

    moved = talk(_opened(store, blobs, lambda records, packages: moving.take_in(records, packages, file)), f"{file}")
    _show(file, moved, output)


async def _opened(store: str | None, blobs: str | None, work: Callable[[Store, Blobs], Awaitable[Moved]]) -> Moved:
    from aenv.store import open_store
    from aenv.store.blobs import open_blobs

    try:
        records = await open_store(store or f"sqlite:{_own() / 'platform.db'}")
    except Conflict as exc:
        raise Conflict(exc.message, hint="stop the server that uses it, and start it again afterwards") from exc
    async with records, await open_blobs(blobs or f"file:{_own() / 'blobs'}") as packages:
        return await work(records, packages)


def _own() -> Path:
    """Where ``aenv serve`` keeps a hub of this machine's user."""
    return config.home() / "platform"


def _show(file: Path, moved: Moved, output: str) -> None:
    show_record({"file": str(file), **moved._asdict()}, output)
