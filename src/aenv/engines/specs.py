"""From what a caller asked for and the project that was found to what an engine is given."""

from __future__ import annotations

import platform

import msgspec

from aenv.models import EnvRef, SandboxSpec
from aenv.project import Project
from aenv.project.images import image_of

TTL = 30 * 60.0
"""Seconds a sandbox lives when neither its caller nor its project says."""
_RESOURCES = ("cpu", "memory", "ephemeralStorage")


def complete(spec: SandboxSpec, found: Project, *, stamp: str = "", machine: str = "") -> SandboxSpec:
    """The spec with everything the project says where the caller said nothing. What the caller said wins.

    ``machine`` is the kind of processor that it is for; this machine's when it is not given.
    """
    limits = {
        name: str(found.value(f"deployConfig.{name}Limit") or found.value(f"deployConfig.{name}"))
        for name in _RESOURCES
    }
    return msgspec.structs.replace(
        spec,
        env=EnvRef(found.name, found.version),
        project=str(found.root),
        image=spec.image or image_of(found.value("artifacts"), machine or platform.machine()),
        template=spec.template or str(found.value("deployConfig.podTemplate") or ""),
        stamp=stamp,
        ttl=spec.ttl or found.ttl or TTL,
        environment_variables=found.environment_variables | spec.environment_variables,
        secrets=sorted({*spec.secrets, *found.value("deployConfig.secrets")}),
        resources=limits | spec.resources,
        network=spec.network if spec.network is not None else found.value("deployConfig.network"),
        preload=found.value("deployConfig.preload") if spec.preload == "auto" else spec.preload,
        forkable=found.forkable,
        idle=spec.idle if spec.idle is not None else found.timeouts.idle,
        suspend=spec.suspend if spec.suspend is not None else found.timeouts.suspend,
    )
