"""``aenv train-check``: whether a trainer that is installed here can play in an instance."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from importlib import metadata

import click

from aenv.cli.output import Check, output_option, show_checks, show_json, show_table, stdout_reserved
from aenv.errors import AEnvError, did_you_mean
from aenv.integrations import FRAMEWORKS, Framework


@click.command("train-check")
@click.argument("framework", required=False)
@output_option
def train_check(framework: str | None, output: str) -> int:
    """Check that a trainer can play in an instance.

    It needs no model: fixed calls do a task of the environment mini-terminal, and the instance is lost on the way.
    Run it in the virtual environment that the training runs in. Exit code 1 when a check failed.

    Without a name it says which trainers there are.

    \b
    Example:
      aenv train-check
      aenv train-check sb3
    """
    if framework is None:
        known = [{"framework": name, **_told(found)} for name, found in FRAMEWORKS.items()]
        if output == "json":
            show_json(known)
        else:
            show_table(list(known[0]), [list(row.values()) for row in known])
        return 0
    if framework not in FRAMEWORKS:
        raise click.BadParameter(f"there is no {framework!r}; {did_you_mean(framework, FRAMEWORKS)}")
    with stdout_reserved():
        checks = list(_checks(framework, FRAMEWORKS[framework]))
    return show_checks(checks, output)


def _told(framework: Framework) -> dict[str, str]:
    return {"package": framework.package, "installed": _installed(framework) or "no", "tested": framework.tested}


def _installed(framework: Framework) -> str | None:
    try:
        return metadata.version(framework.package)
    except metadata.PackageNotFoundError:
        return None


def _checks(name: str, framework: Framework) -> Iterator[Check]:
    install = f"pip install 'aenvironment[{name}]'"
    version, tested = _installed(framework), framework.tested
    if version is None:
        yield Check("package", "fail", f"{framework.package} is not installed", install)
        return
    if version == tested or version.startswith(f"{tested}."):
        yield Check("package", "ok", f"{framework.package} {version}")
    else:
        told = f"{framework.package} {version}, where {tested} is tested"
        yield Check("package", "warn", told, f"if the next rows fail: pip install '{framework.package}=={tested}.*'")
    try:
        check = importlib.import_module(framework.module).check
    except Exception as exc:  # whatever a package may raise that goes with no other here
        yield Check("adapter", "fail", f"{framework.module}: {type(exc).__name__}: {exc}", install)
        return
    yield Check("adapter", "ok", framework.module)
    try:
        yield Check("episode", "ok", check())
    except Exception as exc:
        told = exc.message if isinstance(exc, AEnvError) else f"{type(exc).__name__}: {exc}"
        hint = (isinstance(exc, AEnvError) and exc.hint) or "aenv doctor"
        yield Check("episode", "fail", told, hint)
