"""What the commands that ask a platform share: where it is, how its answer is awaited, and how that is shown."""

from __future__ import annotations

import asyncio
import json
import sys
import time
from collections.abc import AsyncIterable, Awaitable, Callable, Coroutine, Iterable, Sequence
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, TypeVar

import click

from aenv import config
from aenv.cli.output import FAILED, label, say, show_json, show_table
from aenv.cli.project import run_async
from aenv.errors import AEnvError, Invalid, NetworkError, Unauthorized

if TYPE_CHECKING:
    from aenv.client.accounts import AccountsClient
    from aenv.client.api import ApiClient
    from aenv.client.hub import HubClient
    from aenv.client.services import ServicesClient

F = TypeVar("F", bound=Callable[..., Any])
T = TypeVar("T")
RETRIES = 3
"""Few enough that a person who named the wrong address soon hears of it."""
PATIENCE = (2, 5, 10)
"""Seconds after which a person is told what is being waited for; from then on, as often as the last."""


def system_option(command: F) -> F:
    """``--system-url``, which every command that asks a platform takes."""
    return click.option(
        "--system-url",
        metavar="URL",
        help="Address of the platform. Also: AENV_SYSTEM_URL, 'aenv config'; else 'aenv serve' on this machine.",
    )(command)


def hub_option(command: F) -> F:
    """``--hub-url`` and ``--system-url``, for commands that ask a hub."""
    option = click.option(
        "--hub-url", metavar="URL", help="Address of the hub. Also: AENV_HUB_URL; else that of the platform."
    )
    return option(system_option(command))


def page_options(command: F) -> F:
    """``--limit`` and ``--offset``, for commands that list."""
    limit = click.option("-l", "--limit", type=click.IntRange(1, 1000), default=100, help="Most entries to show.")
    offset = click.option("--offset", type=click.IntRange(0), default=0, help="Entries to leave out first.")
    return limit(offset(command))


def yes_option(command: F) -> F:
    return click.option("-y", "--yes", is_flag=True, help="Do not ask.")(command)


def pairs_option(*names: str, help: str) -> Callable[[F], F]:
    """An option for ``KEY=VALUE``, as often as wanted; the command gets a dictionary."""

    def read(ctx: click.Context, option: click.Parameter, given: Sequence[str]) -> dict[str, str]:
        found = {}
        for text in given:
            key, equals, value = text.partition("=")
            if not equals or not key:
                raise click.BadParameter(f"{text!r} is not KEY=VALUE", ctx, option)
            found[key] = value
        return found

    return click.option(*names, metavar="KEY=VALUE", multiple=True, callback=read, help=f"{help} Repeatable.")


# Who is asked


def api_client(system_url: str | None) -> ApiClient:
    from aenv.client.api import ApiClient
    from aenv.control import key_for, platform_url

    url = platform_url(system_url)
    return ApiClient(url, key_for(url), retries=RETRIES)


def hub_client(hub_url: str | None, system_url: str | None) -> HubClient:
    from aenv import control
    from aenv.client.hub import HubClient

    given = config.get("hub_url", hub_url)
    url = control.hub_url(given) if given else control.platform_url(system_url)
    return HubClient(url, control.key_for(url), retries=RETRIES)


def services_client(system_url: str | None) -> ServicesClient:
    from aenv.client.services import ServicesClient
    from aenv.control import key_for, platform_url

    url = platform_url(system_url)
    return ServicesClient(url, key_for(url), retries=RETRIES)


def accounts_client(system_url: str | None) -> AccountsClient:
    from aenv.client.accounts import AccountsClient
    from aenv.control import key_for, platform_url

    url = platform_url(system_url)
    return AccountsClient(url, key_for(url), retries=RETRIES)


# Asking


def talk(work: Coroutine[Any, Any, T], what: str = "an answer", *, quiet: bool = False) -> T:
    """What a platform answers. Who reaches nobody, or is not let in, is told what to do.

    Who waits long is told for what, unless ``quiet``: then the work itself speaks, or is endless.
    """

    async def talking() -> T:
        from aenv import http

        try:
            return await (work if quiet else patiently(work, lambda: what))
        finally:
            await http.close()

    try:
        return run_async(talking())
    except (NetworkError, Unauthorized) as exc:
        if exc.hint:
            raise
        raise _with_hint(exc) from exc


def _with_hint(exc: AEnvError) -> AEnvError:
    if isinstance(exc, Unauthorized):
        return Unauthorized(exc.message, hint="set AENV_API_KEY to a token of that platform: 'aenv token create'")
    return NetworkError(
        exc.message, hint="start a platform with 'aenv serve', or name yours: --system-url, AENV_SYSTEM_URL"
    )


async def patiently(work: Awaitable[T], reason: Callable[[], str]) -> T:
    """Await ``work``, and say now and then what is being waited for."""
    task = asyncio.ensure_future(work)
    begun = time.monotonic()
    marks = iter(PATIENCE)
    mark = next(marks)
    try:
        while not (await asyncio.wait((task,), timeout=max(0.0, begun + mark - time.monotonic())))[0]:
            say(f"waiting for {reason()} ... {mark} s")
            mark = next(marks, mark + PATIENCE[-1])
        return task.result()
    finally:
        if not task.done():
            task.cancel()
            await asyncio.wait((task,))


def confirm(question: str, yes: bool) -> None:
    """Go on only when the person says so, or said so before with ``--yes``."""
    if yes:
        return
    try:
        agreed = click.confirm(question, err=True)
    except click.exceptions.Abort:
        if sys.stdin.isatty():
            raise
        agreed = None
    if agreed is None:
        raise click.UsageError("there is nobody to ask; give --yes")
    if not agreed:
        raise AEnvError("nothing was changed")


def named(text: str, what: str) -> tuple[str, str]:
    """The two parts of NAME@VERSION where one version must be meant, no range and no newest."""
    from aenv.models import VERSION, EnvRef

    ref = EnvRef.parse(text)
    if ref.version is None or not VERSION.fullmatch(ref.version):
        raise Invalid(f"say which version to {what}", hint=f"for example {ref.name}@1.0.0; see 'aenv versions'")
    return ref.name, ref.version


# Showing


def plain(value: Any) -> Any:
    """What travels, as dictionaries and lists."""
    import msgspec

    return msgspec.to_builtins(value)


def show_page(
    found: tuple[Sequence[T], int],
    output: str,
    columns: Sequence[str],
    row: Callable[[T], Iterable[Any]],
    offset: int = 0,
) -> None:
    """Some of what there is, and how many there are."""
    items, total = found
    if output == "json":
        show_json({"items": plain(items), "total": total, "offset": offset})
        return
    show_table(columns, [["-" if cell in (None, "") else cell for cell in row(item)] for item in items])
    after = offset + len(items)
    if after < total:
        say(f"{offset + 1} to {after} of {total}; --offset {after} goes on" if items else f"none of {total}")


def since(moment: str) -> str:
    """How long ago something was, or how long it is still to come: ``5m``, ``2d``."""
    try:
        then = datetime.fromisoformat(moment)
    except ValueError:
        return moment or "-"
    seconds = abs((datetime.now(UTC) - (then if then.tzinfo else then.replace(tzinfo=UTC))).total_seconds())
    for size, unit in ((86400, "d"), (3600, "h"), (60, "m")):
        if seconds >= size:
            return f"{seconds / size:.0f}{unit}"
    return f"{seconds:.0f}s"


def size(count: int) -> str:
    """Bytes for a person."""
    if count < 1024:
        return f"{count} B"
    return f"{count / 1024:.1f} KiB" if count < 1024**2 else f"{count / 1024**2:.1f} MiB"


# What instances and services have in common


def end_each(end: Callable[[str], Awaitable[None]], ids: Sequence[str], what: str, output: str) -> int:
    """End these one by one, and show which; of others it is said why not. The exit code."""

    async def work() -> list[str]:
        ended = []
        for id in ids:
            try:
                await end(id)
                ended.append(id)
            except AEnvError as exc:
                if len(ids) == 1:
                    raise
                label("error", f"{id}: {exc.message}")
        return ended

    ended = talk(work(), f"the end of {what}")
    if output == "json":
        show_json({"deleted": ended})
    else:
        for id in ended:
            say(f"ended {id}")
    return 0 if len(ended) == len(ids) else FAILED


def show_logs(id: str, printed: AsyncIterable[str], follow: bool, output: str) -> None:
    """Show what was printed as it comes; as JSON, one object, or with ``follow`` one for each line."""

    async def work() -> list[str]:
        lines = []
        async for line in printed:
            if output == "table":
                click.echo(line)
            elif follow:
                click.echo(json.dumps({"line": line}))
            else:
                lines.append(line)
        return lines

    lines = talk(work(), quiet=follow)
    if output == "json" and not follow:
        show_json({"id": id, "lines": lines})
