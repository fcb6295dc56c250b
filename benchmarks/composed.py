"""What a composition costs: three environments that start as one, and a call from one to another."""

from __future__ import annotations

from benchmarks.measure import Effort, Line, interleave, line
from benchmarks.processes import OURS, asked, environment, running
from benchmarks.venvs import ROOT

MOST_START = 2.0
CALLS = 50


def composed(effort: Effort) -> list[Line]:
    """An environment that needs two others, to its first answer, beside one of these
    alone; and a call that asks another one, beside one that does not."""
    command = [OURS, "-m", "benchmarks.workers.composer"]
    folder = ROOT / "benchmarks" / "projects" / "composed"
    # Without spares: with one, most of a create was done before it was asked for.
    env = environment(PYTHONPATH=f"{ROOT}:{ROOT / 'src'}", AENV_SPARE="0")
    with (
        running(command, cwd=folder / "whole", env=env, piped=True) as whole,
        running(command, cwd=folder / "left", env=env, piped=True) as left,
    ):
        sides = (
            lambda: float(asked(whole, {"do": "start", "name": "whole"})),
            lambda: float(asked(left, {"do": "start", "name": "left"})),
            lambda: float(asked(whole, {"do": "call", "name": "whole", "tool": "through", "count": CALLS})),
            lambda: float(asked(left, {"do": "call", "name": "left", "tool": "echo", "count": CALLS})),
        )
        for warm in sides:
            warm()
        three, one, through, straight = interleave(effort.rounds(21), *sides)
    return [
        line("composition of three, start to first answer", "ms", three, "one", one, limit=MOST_START, scale=1e3),
        line("call through a composition, wall time", "ms", through, "a call", straight, scale=1e3),
    ]
