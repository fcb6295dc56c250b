"""What waits for one owner's creates of one environment, and what of it a request takes."""

from __future__ import annotations

from typing import NamedTuple

import msgspec

from aenv.api import charges
from aenv.api.admission import STARTUP, charge_of, environment
from aenv.api.demand import Demand
from aenv.api.entry import Entry
from aenv.api.records import InstanceRecord, Kept, Wanted
from aenv.api.specialising import Waits
from aenv.runtime.warm import late
from aenv.wire import Env

Key = tuple[str, str, str]
"""An owner, an environment, and its package."""


class Ready(NamedTuple):
    """One that was seen to wait."""

    entry: Entry
    waits: Waits
    checked_at: float


class Claim(NamedTuple):
    """Records of a request, of which some take the place of warm ones."""

    made: list[InstanceRecord]
    taken: dict[str, Ready]

    @property
    def kept(self) -> dict[str, Kept]:
        return {id: ready.entry.kept for id, ready in self.taken.items()}


class Stock:
    """What waits for one owner and environment."""

    def __init__(self, record: InstanceRecord, now: float, burst: float) -> None:
        self.owner = record.owner
        self.env: Env = record.env
        self.secrets = record.secrets
        self.demand = Demand(now, burst)
        found = environment(record.env, "")
        self.min, self.max = (int(found.value(f"deployConfig.pool.{name}")) for name in ("min", "max"))
        self.given = found.environment_variables
        self.startup: float = found.timeouts.startup or STARTUP
        self.need = charges.needed([msgspec.structs.replace(record, charge=charge_of(record.env, None))])
        self.members: dict[str, Entry] = {}
        """All that there are, also those that are being made."""
        self.ready: dict[str, Ready] = {}
        """Those that may be taken."""
        self.coming = 0
        """Those that are not written down yet."""
        self.target = 0
        self.claims = 0
        self.misses = 0
        self.failures = 0
        """Of those that were made since one came up."""
        self.pause_until = 0.0

    def fits(self, record: InstanceRecord, waits: Waits) -> bool:
        """Whether a sandbox that waits can become this instance."""
        wanted = record.wanted or Wanted()
        told = wanted.environment_variables | dict.fromkeys(record.secrets, "")
        return not late(told, waits.late, self.given)
