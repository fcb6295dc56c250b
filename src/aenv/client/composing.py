"""An environment with those that it depends on, on an engine of this process: started together, reached from each
other, and ended together."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, MutableMapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager, nullcontext
from pathlib import Path
from typing import NamedTuple

import msgspec

from aenv import project
from aenv.cleanup import together
from aenv.client.carrying import Child, Reasons, carrying
from aenv.client.local import resolve
from aenv.engines.base import Engine
from aenv.errors import AEnvError, NotFound, Unsupported
from aenv.models import EnvRef, Sandbox, SandboxSpec
from aenv.project import Project
from aenv.project.depends import check_parts, deeper, seed_of


class Part(NamedTuple):
    """What is to be started, and what it depends on, by alias."""

    spec: SandboxSpec
    parts: Mapping[str, Part]

    @property
    def size(self) -> int:
        return 1 + sum(part.size for part in self.parts.values())


def compose(
    engine: Engine, spec: SandboxSpec, parts: MutableMapping[str, Sequence[str]], reasons: Reasons
) -> AbstractAsyncContextManager[Sandbox]:
    """A sandbox of a project that was found, with all that it depends on. ``parts`` are told of, while they live."""
    if spec.forked_from:
        hint = "a fork of its process would share the others with it"
        raise Unsupported(f"{spec.env} depends on others, and is not forked", hint=hint)
    part = _part(spec, [spec.env])
    check_parts(part.size, str(spec.env))
    return _started(engine, part, parts, reasons)


def accompany(
    engine: Engine, found: Project, served: Sandbox, parts: MutableMapping[str, Sequence[str]], reasons: Reasons
) -> AbstractAsyncContextManager[Sandbox]:
    """The same with a project that is served already, by somebody else."""
    spec = SandboxSpec(env=EnvRef(found.name, found.version), project=str(found.root))
    part = _part(spec, [spec.env])
    check_parts(part.size, found.name)
    return _started(engine, part, parts, reasons, nullcontext(served))


def _part(spec: SandboxSpec, path: Sequence[EnvRef]) -> Part:
    found = project.read(spec.project)
    parts = {}
    for alias, dependency in found.depends_on.items():
        wanted = msgspec.structs.replace(
            SandboxSpec(env=dependency.env),
            ttl=spec.ttl,
            startup_timeout=spec.startup_timeout,
            owner=spec.owner,
            labels=spec.labels,
            seed=seed_of(spec.seed, alias),
        )
        deeper(path, dependency.env)
        try:
            child = msgspec.structs.replace(resolve(wanted, Path(spec.project)), idle=None)
        except NotFound as exc:
            raise NotFound(f"{spec.env} needs {alias}: {exc.message}", hint=exc.hint) from None
        parts[alias] = _part(child, deeper(path, child.env))
    return Part(spec, parts)


@asynccontextmanager
async def _started(
    engine: Engine,
    part: Part,
    known: MutableMapping[str, Sequence[str]],
    reasons: Reasons,
    served: AbstractAsyncContextManager[Sandbox] | None = None,
) -> AsyncIterator[Sandbox]:
    """``served`` is the one that needs the others, where it need not be started."""
    needed = [
        _named(alias, _started(engine, child, known, reasons), str(child.spec.env))
        for alias, child in part.parts.items()
    ]
    async with together([served or engine.provision(part.spec), *needed]) as (sandbox, *others):
        if not others:
            yield sandbox
            return
        children = {alias: Child(other, reasons) for alias, other in zip(part.parts, others, strict=True)}
        known[sandbox.id] = [other.id for other in others]
        try:
            async with carrying(sandbox, children):
                yield sandbox
        finally:
            del known[sandbox.id]


@asynccontextmanager
async def _named(alias: str, start: AbstractAsyncContextManager[Sandbox], env: str) -> AsyncIterator[Sandbox]:
    """What goes wrong with the start says whose it was."""
    try:
        async with start as sandbox:
            yield sandbox
    except AEnvError as exc:
        raise type(exc)(f"{alias} ({env}), which it needs: {exc.message}", hint=exc.hint) from exc
