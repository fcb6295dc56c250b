"""Versions of environments as a composition: which one each of them needs, down to those that need none."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

from aenv.errors import Conflict, Invalid, NotFound
from aenv.models import EnvRef
from aenv.project.depends import Dependency, check_parts, deeper
from aenv.wire import Env, Locked

Resolve = Callable[[EnvRef], Awaitable[Env]]
"""The version that a reference means, for who asks."""


class Part(NamedTuple):
    """A version, and those that it needs, by alias."""

    env: Env
    parts: Mapping[str, Part] = {}

    def all(self) -> Iterator[Env]:
        yield self.env
        for part in self.parts.values():
            yield from part.all()


async def lock(env: Env, wanted: Mapping[str, Dependency], resolve: Resolve) -> dict[str, Locked]:
    """The exact versions that an environment is to start with. Raises where there can be no such composition."""
    locked = {}
    for alias, dependency in wanted.items():
        deeper([EnvRef.parse(env.id)], dependency.env)
        try:
            found = await resolve(dependency.env)
        except (NotFound, Conflict) as exc:
            raise type(exc)(f"deployConfig.dependsOn.{alias}: {exc.message}", hint=exc.hint) from None
        locked[alias] = Locked(env=found.id, digest=found.digest, prefix=dependency.prefix)
    await composed(env, locked, resolve)
    return locked


async def composed(env: Env, locked: Mapping[str, Locked], resolve: Resolve) -> Part:
    """The composition of an environment with these versions."""
    part = await _composed(env, locked, resolve, [EnvRef.parse(env.id)])
    check_parts(sum(1 for _ in part.all()), env.id)
    return part


async def _composed(env: Env, locked: Mapping[str, Locked], resolve: Resolve, path: Sequence[EnvRef]) -> Part:
    if len(env.dependencies) > len(locked):
        missing = ", ".join(env.dependencies.keys() - locked.keys())
        raise Invalid(f"{env.id} does not say which version of {missing} it starts with", hint="push it again")
    parts = {}
    for alias, one in locked.items():
        ref = EnvRef.parse(one.env)
        longer = deeper(path, ref)
        found = await resolve(ref)
        if found.digest != one.digest:
            hint = f"push {env.name} again to have it as it is, or release {ref.name} so that it stays"
            raise Conflict(f"{one.env} was changed since {env.id} was pushed, which needs it", hint=hint)
        parts[alias] = await _composed(found, found.locked, resolve, longer)
    return Part(env, parts)
