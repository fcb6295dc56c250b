"""A program that an agent mends in its sandbox, and whether it has."""

from __future__ import annotations

import runpy

from aenv import register_reward


@register_reward
def mended() -> float:
    return float(runpy.run_path("sums.py")["add"](2, 3) == 5)
