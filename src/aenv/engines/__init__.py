"""Where sandboxes come from. ``base`` is the contract; an engine is found by its name."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from aenv.engines.base import Engine

ENGINES = {
    "docker": "aenv.engines.docker.engine:DockerEngine",
    "http": "aenv.engines.remote:RemoteEngine",
    "kubernetes": "aenv.engines.kubernetes.engine:KubernetesEngine",
    "plain": "aenv.engines.plain:PlainEngine",
    "process": "aenv.engines.process.engine:ProcessEngine",
}
"""Ours, by name. Other people's are entry points of the group ``aenv.engines``, or ``pkg.mod:Class``."""


def load_engine(name: str, **options: Any) -> Engine:
    """The engine of that name, made with these options. ``name=rest`` gives it ``rest`` as its address."""
    kind, _, address = name.partition("=")
    if address:
        options["address"] = address
    try:
        return engine_class(kind)(**options)
    except TypeError as exc:
        from aenv.errors import Invalid

        raise Invalid(f"the engine {name!r} cannot be made like this: {exc}") from exc


def engine_class(name: str) -> type[Engine]:
    """What makes engines of that name, whatever their address."""
    name = name.partition("=")[0]
    # Loaded here: what a sandbox's first process imports from this package must be next to nothing.
    from importlib import import_module
    from importlib.metadata import entry_points
    from inspect import isabstract

    from aenv.engines.base import Engine
    from aenv.errors import Invalid, NotFound, did_you_mean

    place = ENGINES.get(name) or (name if ":" in name else None)
    if place is None:
        installed = {found.name: f"{found.module}:{found.attr}" for found in entry_points(group="aenv.engines")}
        place = installed.get(name)
        if place is None:
            known = [*ENGINES, *installed]
            raise NotFound(f"there is no engine {name!r}", hint=did_you_mean(name, known))
    module, _, attribute = place.partition(":")
    try:
        found = getattr(import_module(module), attribute)
    except Exception as exc:  # whatever the module does when it is imported
        raise Invalid(
            f"engine {name!r} cannot be loaded from {place}: {type(exc).__name__}: {exc}", hint="use pkg.mod:Class"
        ) from exc
    if not (isinstance(found, type) and issubclass(found, Engine)) or isabstract(found):
        raise Invalid(f"{place} is not an engine", hint="an engine is a subclass of aenv.engines.base.Engine")
    return found
