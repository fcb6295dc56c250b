"""What a sandbox of containers may have, and how two containers share it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from aenv.errors import Invalid
from aenv.models import SandboxSpec
from aenv.project.fields import quantity

MEMORY, STORAGE, CPU = "2Gi", "5Gi", "1"
"""What it may have where nobody says."""
_MAIN = 256 * 1024**2
"""Bytes of memory that the main one of two containers has at least, where there are twice as many."""


class Room(NamedTuple):
    """What a sandbox may have, in bytes."""

    main: int
    """Memory of the main container: a quarter where there are two, and 256 MiB at least, or half."""
    second: int
    disk: int
    """What may be written, where that is not in memory."""

    @property
    def shared(self) -> int:
        """How much the directory holds that two containers share. It counts as memory of the one that writes: so it is
        a third of what the main one may write, and half of what the second may, at most."""
        return min(self.disk, self.main // 6, self.second // 4)

    def storage(self, memory: int, places: int) -> int:
        """How much each of so many file systems in memory holds. They count as memory, and have half of it together,
        with what is shared, so that a full disk comes before the end."""
        return min(self.disk, (memory // 2 - self.shared) // places)


def room(spec: SandboxSpec) -> Room:
    memory, disk = (int(amount(spec.resources, *one)) for one in (("memory", MEMORY), ("ephemeralStorage", STORAGE)))
    if spec.second is None:
        return Room(memory, 0, disk)
    main = min(max(memory // 4, _MAIN), memory // 2)
    return Room(main, memory - main, disk)


def amount(resources: Mapping[str, str], name: str, default: str) -> float:
    """How much of something it may have."""
    found = quantity(resources.get(name, default))
    if found <= 0:
        raise Invalid(f"{name} {resources[name]!r} is not an amount", hint=f"use for example {default!r}")
    return found
