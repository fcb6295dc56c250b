"""A service as the gateway sees it: among whom calls are shared out, and what callers are told when there is nobody."""

from __future__ import annotations

from collections.abc import Collection
from contextlib import suppress

from aenv.api.gateway.failures import Busy
from aenv.api.gateway.places import Place, Replicas
from aenv.api.peers import Peers
from aenv.api.services.moves import reason, status
from aenv.api.services.records import Phase, ServiceRecord
from aenv.errors import AEnvError, NetworkError, NotFound


def replicas(record: ServiceRecord, token: str, peers: Peers, lost: Collection[str] = ()) -> Replicas:
    """``lost`` are over, though the record does not say so yet."""

    def places(phase: Phase) -> tuple[Place, ...]:
        found = []
        for member in record.members:
            if member.phase is phase and member.url and not member.closed and member.id not in lost:
                with suppress(NetworkError):  # the server is gone that could reach it
                    url = peers.reached(member.id, record.server, member.url)
                    found.append(Place(member.id, url, record.owner, token))
        return tuple(found)

    ready = () if record.deleted else places(Phase.READY)
    return Replicas(
        id=record.id,
        owner=record.owner,
        token=token,
        ready=ready,
        leaving=places(Phase.LEAVING),
        failure=None if ready else _nobody(record),
    )


def _nobody(record: ServiceRecord) -> AEnvError:
    """Why there is nobody to take a call."""
    if record.deleted:
        return NotFound(f"service {record.id} was deleted")
    if not record.replicas:
        return Busy(
            f"service {record.id} is scaled to 0 replicas", hint=f"aenv service update {record.id} --replicas 1"
        )
    why = reason(record)
    return Busy(f"no replica of service {record.id} is ready: it is {status(record)}{f'; {why}' if why else ''}")
