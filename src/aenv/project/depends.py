"""``dependsOn``: the environments that one is composed of, and how far that may go.

A composition is a tree: whoever resolves it walks from the environment itself down, and asks ``deeper`` at each step.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from aenv.errors import Invalid, TooLarge
from aenv.models import NAME, EnvRef

MOST = 32
"""Environments that one names."""
DEEPEST = 8
"""Levels of a composition, the environment itself being the first."""
MOST_PARTS = 64
"""Instances of a whole composition."""
HINT = 'use {"alias": "name@range"}, or {"alias": {"env": "name@range", "prefix": "alias_"}}'


class Dependency(NamedTuple):
    """One of them, as it is named."""

    env: EnvRef
    prefix: str = ""
    """What the names of its tools begin with among those of the one that depends on it; empty where they are not."""


def parse(value: Any) -> Dependency:
    """What stands under an alias."""
    if isinstance(value, str):
        return Dependency(EnvRef.parse(value))
    if isinstance(value, Mapping) and "env" in value and set(value) <= {"env", "prefix"}:
        prefix = value.get("prefix", "")
        if isinstance(value["env"], str) and isinstance(prefix, str) and (not prefix or NAME.fullmatch(prefix)):
            return Dependency(EnvRef.parse(value["env"]), prefix)
    raise Invalid("it names no environment", hint=HINT)


def dependencies(deploy_config: Mapping[str, Any]) -> dict[str, Dependency]:
    """All of a ``deployConfig``, by alias."""
    given = deploy_config.get("dependsOn") or {}
    if not isinstance(given, Mapping):
        raise Invalid("deployConfig.dependsOn is no object of environments", hint=HINT)
    if len(given) > MOST:
        raise TooLarge(f"deployConfig.dependsOn has {len(given)} entries; {MOST} is the most")
    found = {}
    for alias, value in given.items():
        try:
            found[alias] = parse(value)
        except Invalid as exc:
            raise Invalid(f"deployConfig.dependsOn.{alias[:100]}: {exc.message}", hint=exc.hint) from None
    return found


def deeper(path: Sequence[EnvRef], wanted: EnvRef) -> tuple[EnvRef, ...]:
    """The way to an environment that the last one on ``path`` needs. ``Invalid`` where it leads round, or too far.

    Another version of one that is on the way is the same one: a tree of them would only end by luck.
    """
    longer = (*path, wanted)
    shown = " -> ".join(map(str, longer))
    if any(before.name == wanted.name for before in path):
        raise Invalid(f"an environment cannot be a part of itself: {shown}", hint="take one of them out of dependsOn")
    if len(longer) > DEEPEST:
        raise Invalid(f"a composition has at most {DEEPEST} levels: {shown}", hint="nest fewer environments")
    return longer


def check_parts(count: int, env: str) -> None:
    """Refuse a composition of more instances than there may be."""
    if count > MOST_PARTS:
        raise TooLarge(f"{env} needs {count} instances with itself; {MOST_PARTS} is the most")


def seed_of(seed: int | None, alias: str) -> int | None:
    """The seed of a dependency, which follows from that of the environment that needs it."""
    if seed is None:
        return None
    return int.from_bytes(hashlib.sha256(f"{seed}/{alias}".encode()).digest()[:6])
