"""What is to be done about a service next, and how it is doing: functions of its record, and of nothing else.

An update goes one replica at a time: there is one more than wanted, and an old one leaves when a new one takes calls.
With storage, which only one sandbox may have, the old one leaves first.
"""

from __future__ import annotations

from typing import NamedTuple

import msgspec

from aenv.api.services.records import Member, Phase, Plan, ServiceRecord

TRIES = 4
"""Failures in a row of a new replica after which an update is given up."""
FIRST, LONGEST = 1.0, 60.0
"""Seconds until a replica that failed is started again: the second time in a row, and at most. The first time it is
started at once."""
HOPELESS = 3
"""Failures in a row after which a call no longer waits for a replica."""
_WORST = (Phase.DOWN, Phase.STARTING, Phase.UNWELL, Phase.READY)
"""Who leaves first."""
_LONGEST_REASON = 1000


class Moves(NamedTuple):
    """The next moves."""

    start: int
    """How many replicas to start by the plan."""
    leave: list[str]
    """Those that are to leave."""


def next_moves(record: ServiceRecord) -> Moves:
    wanted, members = record.wanted, record.members
    fresh, old = _by_plan(record)
    if record.volume is not None:
        leave = [*old, *_worst(fresh, len(fresh) - wanted)]
        return Moves(0 if members or not wanted else 1, [member.id for member in leave])
    ready = sum(member.phase is Phase.READY for member in fresh)
    leave = _worst(fresh, len(fresh) - wanted) + _worst(old, len(old) - max(wanted - ready, 0))
    start = wanted - len(fresh)
    if old:
        start = min(start, wanted + 1 - len(members))
    return Moves(max(start, 0), [member.id for member in leave])


def _by_plan(record: ServiceRecord) -> tuple[list[Member], list[Member]]:
    """Replicas that stay: those of the plan, and those of an older one."""
    generation = record.plan.generation
    staying = record.staying
    return (
        [member for member in staying if member.generation == generation],
        [member for member in staying if member.generation != generation],
    )


def _worst(members: list[Member], count: int) -> list[Member]:
    """So many: those that are the least loss."""
    if count <= 0:
        return []
    return sorted(members, key=lambda member: (_WORST.index(member.phase), -member.created_at))[:count]


def plan_of(record: ServiceRecord, member: Member) -> Plan | None:
    """The plan that a replica was made by, if it is still one."""
    plans = (record.plan, record.good)
    return next((plan for plan in plans if plan is not None and plan.generation == member.generation), None)


def is_updating(record: ServiceRecord) -> bool:
    """Whether there is a plan to go back to."""
    return record.good is not None and record.good.generation != record.plan.generation


def is_done(record: ServiceRecord) -> bool:
    """Whether all is as the plan says."""
    fresh, old = _by_plan(record)
    return not old and len(fresh) == record.wanted and all(member.phase is Phase.READY for member in fresh)


def pause_after(failures: int) -> float:
    """Seconds until a replica that failed so often in a row is started again."""
    return min(FIRST * 2.0 ** min(failures - 2, 30), LONGEST) if failures > 1 else 0.0


def given_up(record: ServiceRecord) -> Member | None:
    """The new replica because of which an update is to be given up."""
    fresh, _ = _by_plan(record)
    return next((member for member in fresh if member.failures >= TRIES), None)


def rolled_back(record: ServiceRecord, failed: Member) -> ServiceRecord:
    """A service that goes back to what it was before an update."""
    plan, good = record.plan, record.good
    if good is None:
        return record
    what = "new replicas"
    if plan.env.id != good.env.id:
        what = plan.env.id
    elif plan.environment_variables != good.environment_variables:
        what = "other variables"
    reason = f"the update to {what} was rolled back, since a new replica did not become ready: {failed.reason}"
    return msgspec.structs.replace(record, plan=good, generation=record.generation + 1, reason=reason)


def status(record: ServiceRecord) -> str:
    if record.deleted:
        return "Terminated"
    if not record.ready and any(member.failures for member in record.staying):
        return "Failed"
    if record.good is None and not is_done(record):
        return "Creating" if record.members else "Pending"
    on_its_way = any(member.phase is Phase.STARTING and not member.failures for member in record.staying)
    if on_its_way or (is_updating(record) and not is_done(record)) or len(record.staying) != record.wanted:
        return "Updating"
    return "Running"


def reason(record: ServiceRecord) -> str:
    """Why a service is not as it should be, and what became of its last update."""
    told = [record.reason] if record.reason else []
    missing = [member for member in record.staying if member.phase is not Phase.READY]
    if missing and not record.deleted:
        why = next((member.reason for member in sorted(missing, key=lambda one: -one.failures) if member.reason), "")
        count = f"{len(missing)} of {len(record.staying)} replicas {'is' if len(missing) == 1 else 'are'} not ready"
        told.append(f"{count}: {why}" if why else count)
    elif not record.wanted and not record.deleted:
        told.append("it is scaled to 0 replicas")
    return "; ".join(told)[:_LONGEST_REASON]


def is_coming(record: ServiceRecord) -> bool:
    """Whether a call that finds no replica may hope for one soon."""
    return record.wanted > 0 and all(member.failures < HOPELESS for member in record.staying)
