"""``aenv doctor`` and ``aenv version``: what this machine has, what a command may miss, and how an engine does."""

from __future__ import annotations

import os
import platform
import shutil
import socket
import sys
from collections import Counter
from collections.abc import Callable, Coroutine
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Any, TypeVar

import click

from aenv import __version__, config
from aenv.cli import inspector
from aenv.cli.output import FAILED, Check, output_option, say, show_checks, show_json, show_table, stdout_reserved
from aenv.errors import AEnvError

T = TypeVar("T")

PYTHON = (3, 11)
PORT = 8081
LOOK = 5.0
"""Seconds that a platform has to answer."""


@click.command()
@output_option
def version(output: str) -> None:
    """Show the versions of aenv, Python and the platform.

    \b
    Example:
      aenv version -o json
    """
    found = {
        "aenvironment": __version__,
        "python": platform.python_version(),
        "platform": platform.platform(),
    }
    if output == "json":
        show_json(found)
    else:
        for name, value in found.items():
            click.echo(f"{name} {value}")


@click.command()
@click.option("--engine", metavar="NAME", help="Check this engine instead: a name, or pkg.mod:Class.")
@click.option("--check", "only", metavar="NAME", multiple=True, help="Of an engine, only this check. Repeatable.")
@click.option("--limit", type=float, default=60.0, help="Seconds that one check of an engine may take.")
@click.option("--second", metavar="IMAGE or DIR", help="What second containers are made of, for the checks of those.")
@output_option
def doctor(engine: str | None, only: tuple[str, ...], limit: float, second: str | None, output: str) -> int:
    """Check this machine, and say how to mend what is wrong.

    Exit code 1 when a check failed; a warning is about something that only some commands need.

    --engine runs the list that every engine must pass against an engine. It starts and ends some hundred sandboxes
    of a project of its own, and touches no others. What the engine says it cannot promise is skipped. So are the
    checks of second containers, unless --second names an image, or a directory for an engine that takes those: /DIR
    or ./DIR. It needs a shell, cat, echo, ls and sleep.

    \b
    Example:
      aenv doctor
      aenv doctor --engine process
      aenv doctor --engine mine.engine:MyEngine --check create --check delete
      aenv doctor --engine docker --second debian:bookworm-slim
    """
    if engine is not None:
        return _check_engine(engine, only, limit, _made_of(second or ""), output)
    for option, given in (("--check", only), ("--second", second)):
        if given:
            raise click.UsageError(f"{option} is for the checks of an engine, and needs --engine")
    return show_checks([row for check in _CHECKS for row in check()], output)


def _made_of(second: str) -> str:
    """An image, or the whole path of a directory."""
    from aenv.project.images import is_path

    return str(Path(second).expanduser().absolute()) if is_path(second) else second


def _check_engine(name: str, only: tuple[str, ...], limit: float, second: str, output: str) -> int:
    from aenv.cli.project import run_async
    from aenv.engines import conformance, load_engine

    if ":" in name:
        sys.path.insert(0, str(Path.cwd()))  # an engine that is being written is found as by python -m
    due = len(set(only)) or len(conformance.CHECKS)
    done = 0

    def tell(result: conformance.Result) -> None:
        nonlocal done
        done += 1
        why = f": {result.detail}" if result.status == "fail" else ""
        say(f"{done}/{due} {result.status} {result.name}{why}")

    async def check() -> list[conformance.Result]:
        async with load_engine(name) as engine:
            return await conformance.run(
                engine,
                only=only or None,
                on_result=tell,
                another=lambda: load_engine(name),
                limit=limit,
                second=second,
            )

    with stdout_reserved():
        results = run_async(check())
    count = Counter(result.status for result in results)
    if output == "json":
        show_json({"ok": not count["fail"], "engine": name, "checks": [result._asdict() for result in results]})
    else:
        show_table(conformance.Result._fields, results)
        say(f"checks: {len(results)}, failed: {count['fail']}, skipped: {count['skip']}")
    return FAILED if count["fail"] else 0


def _python() -> list[Check]:
    found = f"{platform.python_version()} at {sys.executable}"
    if sys.version_info < PYTHON:
        return [Check("python", "fail", found, "install Python 3.11 or newer")]
    return [Check("python", "ok", found)]


def _platform() -> list[Check]:
    if sys.platform in ("linux", "darwin"):
        return [Check("platform", "ok", platform.platform())]
    return [Check("platform", "warn", platform.platform(), "use Linux, macOS or WSL 2; others are not tested")]


def _packages() -> list[Check]:
    rows = []
    for name in ("aenvironment", "click", "msgspec", "pydantic"):
        try:
            rows.append(Check(name, "ok", metadata.version(name)))
        except metadata.PackageNotFoundError:
            rows.append(Check(name, "fail", "not installed", "pip install --force-reinstall aenvironment"))
    return rows


def _speed() -> list[Check]:
    return [
        Check(name, "ok", metadata.version(name))
        if find_spec(name)
        else Check(name, "warn", "not installed; sandboxes answer more slowly", f"pip install {name}")
        for name in ("httptools", "uvloop")
    ]


def _node() -> list[Check]:
    if problem := inspector.problem():
        return [Check("node", "warn", problem, "install Node 22.19 or newer, or use 'aenv run --quiet'")]
    return [Check("node", "ok", shutil.which("node") or "")]


def _isolation() -> list[Check]:
    from aenv.engines.process import powers

    return [
        Check(name, "ok" if status == "ok" else "warn", detail, fix) for name, status, detail, fix in powers.explain()
    ]


def _docker() -> list[Check]:
    from aenv.cli.project import run_async
    from aenv.engines.docker.explaining import explain

    return [Check(*row) for row in run_async(_asked(explain()))]


def _port() -> list[Check]:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", PORT))
        except OSError as exc:
            return [
                Check(
                    f"port {PORT}",
                    "warn",
                    exc.strerror or str(exc),
                    "stop what listens, or 'aenv run --port 8082'",
                )
            ]
    return [Check(f"port {PORT}", "ok", "free")]


def _home() -> list[Check]:
    home = config.home()
    nearest = next(folder for folder in (home, *home.absolute().parents) if folder.exists())
    if not nearest.is_dir() or not os.access(nearest, os.W_OK | os.X_OK):
        fix = "make it writable, or set AENV_HOME to a directory that is"
        return [Check("home", "fail", f"{nearest} is not a directory that you can write to", fix)]
    return [Check("home", "ok", str(home))]


def _config() -> list[Check]:
    try:
        for setting in config.SETTINGS:
            config.lookup(setting.key)
    except AEnvError as exc:
        return [Check("config", "fail", exc.message, exc.hint or "")]
    file = config.path()
    return [Check("config", "ok", str(file) if file.exists() else f"no {file}; defaults are used")]


def _remote() -> list[Check]:
    """Whether the platform that is configured answers. Nobody is asked when there is none."""
    try:
        url, source = config.lookup("system_url")
    except AEnvError:
        return []  # what is wrong is said of the config
    if not url:
        return [Check("remote", "ok", "no platform is configured; environments run on this machine")]
    from aenv.cli.project import run_async

    try:
        run_async(_asked(_look(url)))
    except AEnvError as exc:
        fix = exc.hint or "start it, or correct the address"
        return [Check("remote", "fail", f"{url} (from {source}): {exc.message}", fix)]
    return [Check("remote", "ok", f"{url} (from {source}) answers, and lets you in")]


async def _look(url: str) -> None:
    from aenv.client.api import ApiClient
    from aenv.control import key_for, platform_url

    where = platform_url(url)
    api = ApiClient(where, key_for(where), timeout=LOOK, retries=0)
    await api.fetch("/health")
    await api.list(limit=1)


async def _asked(question: Coroutine[Any, Any, T]) -> T:
    """What somebody answers; no connection stays open."""
    from aenv import http

    try:
        return await question
    finally:
        await http.close()


_CHECKS: tuple[Callable[[], list[Check]], ...] = (
    _python,
    _platform,
    _packages,
    _speed,
    _isolation,
    _node,
    _docker,
    _port,
    _home,
    _config,
    _remote,
)
