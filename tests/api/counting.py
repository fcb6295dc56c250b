"""What is counted, and what the records say."""

from __future__ import annotations

from aenv.api import charges
from aenv.api.records import InstanceRecord, Records
from aenv.store import Store


async def counts(store: Store) -> dict[str, dict[str, float]]:
    """The numbers in the store, but for the clocks of rates."""
    found = await store.counts(charges.KIND)
    numbers = {subject: {name: n for name, n in of.items() if name != charges.AT} for subject, of in found.items()}
    return {subject: of for subject, of in numbers.items() if of}


async def summed(store: Store) -> dict[str, dict[str, float]]:
    """What they must be: the sum over all records."""
    records: list[tuple[None, InstanceRecord]] = [(None, kept.record) async for kept in Records(store).scan()]
    found = charges.moved(records)
    return {subject: {name: float(n) for name, n in of.items() if n} for subject, of in found.items()}


async def used(store: Store, subject: str = charges.PLATFORM) -> tuple[float, float]:
    """How many live, and how many wait."""
    found = (await store.counts(charges.KIND)).get(subject, {})
    return found.get(charges.INSTANCES, 0.0), found.get(charges.WAITING, 0.0)
