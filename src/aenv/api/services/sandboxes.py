"""A replica as what it is to everybody else: the record of an instance that has no end."""

from __future__ import annotations

import msgspec

from aenv.api.records import FOREVER, InstanceRecord, Wanted
from aenv.api.services.moves import plan_of
from aenv.api.services.records import Member, Plan, ServiceRecord
from aenv.engines.base import new_id
from aenv.models import State


def instance_of(record: ServiceRecord, plan: Plan, server: str, now: float) -> InstanceRecord:
    """A replica by that plan, to be started."""
    return InstanceRecord(
        id=new_id(record.name),
        server=server,
        owner=record.owner,
        env=plan.env,
        status=State.PENDING,
        created_at=now,
        updated_at=now,
        ttl=FOREVER - now,
        expires_at=FOREVER,
        labels=record.labels,
        secrets=plan.secrets,
        wanted=Wanted(
            environment_variables=plan.environment_variables,
            resources=record.resources,
            startup_timeout=plan.startup_timeout,
            second=plan.second,
            volumes=[] if record.volume is None else [record.volume],
        ),
        service=record.id,
    )


def lost(record: ServiceRecord, member: Member, now: float) -> InstanceRecord:
    """A replica whose record is gone, as one that has ended."""
    made = instance_of(record, plan_of(record, member) or record.plan, "", now)
    reason = "the store has lost its record"
    return msgspec.structs.replace(made, id=member.id, status=State.FAILED, reason=reason, ran=True)
