"""From the record of an instance to what its engine is given."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

import msgspec

from aenv.api.admission import RESERVED, environment
from aenv.api.records import InstanceRecord
from aenv.engines.specs import complete
from aenv.errors import AEnvError
from aenv.models import EnvRef, SandboxSpec
from aenv.project.unpacked import Placed
from aenv.runtime.tokens import digest

SERVER = f"{RESERVED}server"
"""The label by which an engine's sandboxes are known as those of a server."""


class Values(Protocol):
    """Where the values of secrets come from."""

    async def values(self, owner: str, names: Sequence[str]) -> dict[str, str]: ...


def spec_of(
    record: InstanceRecord, placed: Placed, secrets: Mapping[str, str], *, token: str, ttl: float
) -> SandboxSpec:
    """What an engine needs to know; ``secrets`` are their values, and ``token`` is the owner's."""
    wanted = record.wanted
    if wanted is None:
        raise AEnvError("what was asked for is not written down")
    spec = SandboxSpec(
        env=EnvRef(record.env.name, record.env.version),
        datasource=wanted.datasource,
        ttl=ttl,
        startup_timeout=wanted.startup_timeout,
        environment_variables=wanted.environment_variables | dict(secrets),
        arguments=wanted.arguments,
        owner=record.owner,
        labels={**record.labels, SERVER: record.server},
        seed=wanted.seed,
        resources=wanted.resources,
        owner_token_sha256=digest(token),
        secrets=record.secrets,
        lasting=bool(record.service),
        volumes=wanted.volumes,
        second=wanted.second,
        warm=bool(record.warm),
        forked_from=wanted.forked_from,
    )
    spec = complete(spec, environment(record.env, placed.root), stamp=placed.stamp)
    return msgspec.structs.replace(spec, idle=None) if record.parent else spec  # it ends with what it is a part of
