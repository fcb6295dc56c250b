"""Where an episode that is played again first differs from what it was."""

from __future__ import annotations

from typing import Any, Literal

from msgspec import Struct

from aenv.comparing import shown


class Difference(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The first thing that is not as it was."""

    what: Literal["call", "observation", "reward"]
    """A call that is refused now, what a call or the reset gave, or a reward."""
    name: str
    """Of the tool or the reward, or ``reset``."""
    path: str = ""
    """Where in the value, such as ``structured.stdout``; empty for all of it."""
    expected: Any = None
    found: Any = None
    step: int | None = None
    """Which call of the episode, from 0; None for the reset and for rewards."""
    turn: int | None = None

    def __str__(self) -> str:
        step = "" if self.step is None else f"step {self.step}, "
        turn = "" if self.turn is None else f"turn {self.turn}, "
        path = f" at {self.path}" if self.path else ""
        expected, found = shown(self.expected, self.found)
        return f"{step}{turn}{self.what} {self.name}{path}: expected {expected}, found {found}"
