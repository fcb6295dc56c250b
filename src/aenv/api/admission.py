"""What may be asked for: the bounds of a request for instances, and what follows from it and its environment.

Nothing here is asked of an engine or a store. Whatever is wrong is ``Invalid`` by name, before anything is made.
"""

from __future__ import annotations

import asyncio
import math
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from msgspec import Struct

from aenv.api.charges import Charge
from aenv.api.records import Wanted
from aenv.engines.base import RESOURCES
from aenv.engines.specs import TTL
from aenv.errors import Invalid, TooLarge
from aenv.models import Second, parse_duration
from aenv.project import Project, fields
from aenv.project.images import is_path, second_of
from aenv.wire import Env, InstanceRequest

LONGEST_TTL = 30 * 24 * 3600.0
"""Seconds that an instance may live from now on, whoever asks."""
LEASES = (1.0, 24 * 3600.0)
"""The shortest and the longest lease, in seconds."""
STARTUP = 500.0
"""Seconds that a start may take when neither its caller nor its environment says."""
LONGEST_STARTUP = 3600.0
MOST = 1000
"""Instances of one request."""
MOST_LABELS = 32
LABEL_NAME, LABEL_VALUE = 63, 256
"""Characters of a label's name and value."""
MOST_VARIABLES = 1000
MOST_BYTES = 128 * 1024
"""Bytes that variables may have together, names and values; and so may arguments."""
MOST_SECRET_BYTES = 64 * 1024
"""Bytes that the values of an instance's secrets may have together: all that it prints is searched for them."""
MOST_WRITTEN = 32 * 1024 * 1024
"""Bytes of the records of one request, which are written in one change."""
RESERVED = "aenv/"
"""What our own labels at an engine begin with."""
_LABEL = re.compile(r"[A-Za-z0-9](?:[A-Za-z0-9._/-]*[A-Za-z0-9])?", re.ASCII)
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_.-]*", re.ASCII)
_SEED = 2**63
_COUNTED = 1e15
"""What is charged for at most: more of it nobody has."""


class Plan(Struct, frozen=True):
    """An instance that may be made."""

    wanted: Wanted
    ttl: float
    lease: float | None
    labels: dict[str, str]
    secrets: list[str]


def count(request: InstanceRequest) -> int:
    """How many instances are wanted."""
    if request.count is None:
        return 1
    if not 1 <= request.count <= MOST:
        raise Invalid(f"count {request.count} is not between 1 and {MOST}", hint="ask several times for more")
    return request.count


def check_secrets(values: Mapping[str, str]) -> None:
    """See to it that the secrets of an instance are not too much."""
    size = sum(len(value.encode()) for value in values.values())
    if size > MOST_SECRET_BYTES:
        message = f"the secrets {', '.join(values)} have {size} bytes together; {MOST_SECRET_BYTES} is the most"
        raise TooLarge(message, hint="keep what is long elsewhere, and only its key as a secret")


def check_written(count: int, size: int) -> None:
    """See to it that so many records of that size are not too much at once."""
    if count * size > MOST_WRITTEN:
        message = f"count {count} of a request of {size} bytes is over {MOST_WRITTEN} bytes, which is the most"
        raise TooLarge(message, hint="ask several times for fewer")


async def plan(request: InstanceRequest, env: Env, *, datasources: Sequence[Path], elsewhere: bool = False) -> Plan:
    """What is to be made of a request for this environment."""
    found = _checked(env)
    ttl = lifetime(request.ttl if request.ttl not in (None, "") else found.ttl or TTL)
    startup = request.startup_timeout or found.timeouts.startup or STARTUP
    if not 0 < startup <= LONGEST_STARTUP:
        raise Invalid(f"startup_timeout {startup:g} is not between 0 and {LONGEST_STARTUP:g} seconds")
    if request.seed is not None and not -_SEED <= request.seed < _SEED:
        raise Invalid(f"seed {request.seed} is not a number of 64 bits")
    if request.own_random and not request.forked_from:
        raise Invalid("own_random is for forks", hint="give a seed, or none to draw what no other draws")
    secrets = list(dict.fromkeys(found.value("deployConfig.secrets")))
    variables = request.environment_variables or {}
    _check_variables(variables)
    if both := sorted(set(secrets) & set(variables)):
        raise Invalid(
            f"environment_variables.{both[0]} is a secret of {env.id}", hint=f"set it with 'aenv secret set {both[0]}'"
        )
    data, second = await _data(request.datasource or found.datasource, found, datasources, elsewhere)
    wanted = Wanted(
        datasource=data,
        environment_variables=variables,
        arguments=_arguments(request.arguments or []),
        seed=request.seed,
        resources=_resources(request.resources or {}),
        startup_timeout=startup,
        second=second,
        forked_from=request.forked_from,
        own_random=request.own_random,
    )
    return Plan(wanted, ttl, _lease(request.lease), labels(request.labels or {}), secrets)


def charge_of(env: Env, wanted: Wanted | None) -> Charge:
    """What an instance of an environment takes: what an engine limits it to."""
    found, given = environment(env, ""), {} if wanted is None else wanted.resources

    def most(name: str) -> float:
        said = given.get(name) or found.value(f"deployConfig.{name}Limit") or found.value(f"deployConfig.{name}")
        return min(fields.quantity(said), _COUNTED)

    return Charge(math.ceil(most("cpu") * 1000), math.ceil(most("memory")))


def environment(env: Env, root: str) -> Project:
    """What an environment says of its instances; ``root`` is where its files are."""
    return Project(Path(root), env.name, env.version, {"artifacts": env.artifacts, "deployConfig": env.deploy_config})


def _checked(env: Env) -> Project:
    """The same, when no hub let something pass that no engine could follow."""
    config = {"name": env.name, "version": env.version, "deployConfig": env.deploy_config}
    if wrong := [problem.message for problem in fields.problems(config) if problem.fatal]:
        raise Invalid(
            f"{env.id} cannot be run: {'; '.join(wrong)}", hint="mend its config.json, and push a new version"
        )
    return environment(env, "")


def lifetime(ttl: str | float) -> float:
    """Seconds that an instance is to live."""
    seconds = parse_duration(ttl)
    if seconds > LONGEST_TTL:
        raise Invalid(f"ttl {ttl!r} is over 30 days, which is the most", hint="extend it while it lives")
    return seconds


def labels(given: Mapping[str, str]) -> dict[str, str]:
    """Labels of a request, or to look for."""
    if len(given) > MOST_LABELS:
        raise TooLarge(f"{len(given)} labels are over {MOST_LABELS}, which is the most")
    for name, value in given.items():
        if not _LABEL.fullmatch(name) or len(name) > LABEL_NAME or name.startswith(RESERVED):
            hint = (
                f"use letters, digits, '-', '_', '.' and '/', at most {LABEL_NAME}, and do not begin with {RESERVED!r}"
            )
            raise Invalid(f"{name[:LABEL_NAME]!r} is not a label's name", hint=hint)
        if len(value) > LABEL_VALUE or not value.isprintable():
            raise Invalid(f"the value of label {name!r} is not a line of at most {LABEL_VALUE} characters")
    return dict(given)


def _lease(seconds: float | None) -> float | None:
    shortest, longest = LEASES
    if seconds is not None and not shortest <= seconds <= longest:
        raise Invalid(f"lease {seconds:g} is not between {shortest:g} and {longest:g} seconds")
    return seconds


def _check_variables(variables: Mapping[str, str]) -> None:
    if len(variables) > MOST_VARIABLES:
        raise TooLarge(f"{len(variables)} environment_variables are over {MOST_VARIABLES}, which is the most")
    for name, value in variables.items():
        if not _VARIABLE.fullmatch(name):
            raise Invalid(
                f"environment_variables: {name[:64]!r} is not a variable's name",
                hint="use letters, digits, '_', '.' and '-', and no digit first",
            )
        _check_text(value, f"environment_variables.{name}")
    _check_size([*variables, *variables.values()], "environment_variables")


def _arguments(arguments: list[str]) -> list[str]:
    for place, argument in enumerate(arguments):
        _check_text(argument, f"arguments[{place}]")
    _check_size(arguments, "arguments")
    return arguments


def _check_text(text: str, what: str) -> None:
    """What is wrong with it is said without it."""
    if "\0" in text:
        raise Invalid(f"{what} has a NUL character", hint="encode it as text")


def _check_size(texts: Sequence[str], what: str) -> None:
    try:
        size = sum(len(text.encode()) for text in texts)
    except UnicodeEncodeError:
        raise Invalid(f"{what} have half a character", hint="give text in UTF-8") from None
    if size > MOST_BYTES:
        hint = "upload what is long as a file"
        raise TooLarge(f"{what} have {size} bytes together; {MOST_BYTES} is the most", hint=hint)


def _resources(resources: Mapping[str, str]) -> dict[str, str]:
    """How much of each is asked for. What else a node may have, such as a GPU, its engine knows."""
    for name, value in resources.items():
        if name not in RESOURCES:
            continue
        for _, phrase in fields.BY_PATH[f"deployConfig.{name}"].check(value):
            raise Invalid(f"resources.{name} {phrase}, found {value[:64]!r}")
        if not math.isfinite(fields.quantity(value)):
            raise Invalid(f"resources.{name} is too much")
    return dict(resources)


async def _data(given: str, found: Project, roots: Sequence[Path], elsewhere: bool) -> tuple[str, Second | None]:
    """What a datasource means: data, or, in a dual container, the second one."""
    _check_text(given, "datasource")
    if not found.is_dual:
        return await allowed_data(given, roots, elsewhere=elsewhere), None
    if not is_path(given):
        return "", second_of(found.image_prefix, given)
    directory = await allowed_data(given, roots, elsewhere=elsewhere)
    if not elsewhere and not await asyncio.to_thread(os.path.isdir, directory):
        raise Invalid(f"datasource {given[:256]!r} is no directory", hint="give the task's directory, or an image")
    return "", Second(directory=directory)


async def allowed_data(given: str, roots: Sequence[Path], *, elsewhere: bool = False) -> str:
    """Data, as a path under what the operator allowed, with every link followed before it is judged. ``elsewhere``: it
    is on another machine, which follows links and judges again."""
    if not given:
        return ""
    if found := await asyncio.to_thread(_under if elsewhere else _allowed, given, roots):
        return found
    hint = "ask the operator of this platform to allow its folder, or leave datasource out"
    raise Invalid(f"datasource {given[:256]!r} is not among the data that may be used here", hint=hint)


def _under(given: str, roots: Sequence[Path]) -> str:
    path = Path(os.path.normpath(given))
    return str(path) if path.is_absolute() and any(path.is_relative_to(root) for root in roots) else ""


def _allowed(given: str, roots: Sequence[Path]) -> str:
    try:
        path = Path(os.path.realpath(given, strict=True)) if os.path.isabs(given) else None
    except (OSError, ValueError):
        path = None
    real = (Path(os.path.realpath(root)) for root in roots)
    return str(path) if path is not None and any(path.is_relative_to(root) for root in real) else ""
