"""A treasure lies under one square of a small island. Dig where the clues point, before the digs run out."""

import random
import time
from dataclasses import dataclass, field
from typing import Any

from aenv import (
    Context,
    register_function,
    register_health,
    register_reset,
    register_reward,
    register_setup,
    register_tool,
)

SIZE = 8
DIGS = 8
SURVEY_COST = 2


@dataclass
class Island:
    """One episode: where the treasure is, and what was done to find it."""

    treasure: tuple[int, int]
    digs_left: int = DIGS
    holes: list[tuple[int, int]] = field(default_factory=list)

    @classmethod
    def of(cls, seed: int | None) -> "Island":
        chosen = random.Random(seed)
        return cls((chosen.randrange(SIZE), chosen.randrange(SIZE)))

    @property
    def found(self) -> bool:
        return self.treasure in self.holes

    def spend(self, digs: int) -> None:
        if self.found:
            raise ValueError("the treasure is found; there is nothing left to do")
        if self.digs_left < digs:
            raise ValueError(f"this costs {digs} digs, and {self.digs_left} are left")
        self.digs_left -= digs


island = Island.of(0)  # until begin() runs: an import that draws no numbers can be shared by all instances


@register_setup
def begin(ctx: Context) -> None:
    """Runs once, before the sandbox is ready. The seed is the one given to Environment(seed=...)."""
    again(ctx.seed)


@register_reset
def again(seed: int | None = None) -> dict[str, Any]:
    """Runs for every Environment.reset(seed=...). What it returns is the first observation."""
    global island
    island = Island.of(seed)
    return look()


@register_tool
def look() -> dict[str, Any]:
    """See the size of the island, the holes so far and the digs that are left."""
    return {"rows": SIZE, "columns": SIZE, "digs_left": island.digs_left, "holes": list(island.holes)}


@register_tool
def survey(ctx: Context) -> dict[str, Any]:
    """Learn which half of the island hides the treasure. Costs two digs."""
    island.spend(SURVEY_COST)
    for row in range(SIZE):
        time.sleep(0.01)  # an ordinary function may block: it runs in a thread of its own
        ctx.progress(row + 1, SIZE, f"row {row} walked")
    return {"half": "north" if island.treasure[0] < SIZE // 2 else "south", "digs_left": island.digs_left}


@register_tool
async def dig(row: int, column: int) -> dict[str, Any]:
    """Dig a hole and learn how far the treasure is from it, in steps along rows and columns.

    Args:
        row: From 0 in the north.
        column: From 0 in the west.
    """
    if not (0 <= row < SIZE and 0 <= column < SIZE):
        raise ValueError(f"row {row}, column {column} is in the sea; both go from 0 to {SIZE - 1}")
    island.spend(1)
    island.holes.append((row, column))
    distance = abs(row - island.treasure[0]) + abs(column - island.treasure[1])
    return {"found": distance == 0, "distance": distance, "digs_left": island.digs_left}


@register_reward
def treasure_found() -> dict[str, Any]:
    """From 0.5 to 1.0 when the treasure is found, more for fewer digs; 0.0 when it is not."""
    used = DIGS - island.digs_left
    if not island.found:
        return {"score": 0.0, "reasons": [f"not found with {used} of {DIGS} digs"]}
    spared = island.digs_left / (DIGS - 1)
    return {
        "score": round(0.5 + 0.5 * spared, 3),
        "reasons": ["0.5 for the treasure", f"{0.5 * spared:.3f} for the {island.digs_left} digs spared"],
    }


@register_function
def reveal() -> dict[str, int]:
    """Where the treasure is. For the program that runs the episode: an agent's token does not open functions."""
    return {"row": island.treasure[0], "column": island.treasure[1]}


@register_health
def health() -> dict[str, Any]:
    """Asked before the sandbox counts as ready, and by check_health()."""
    return {"status": "healthy", "holes": len(island.holes)}
