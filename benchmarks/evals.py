"""What an evaluation costs beside the benchmark itself: the same actions, and the same scores, without us."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from aenv.engines.process.venvs import interpreter_for, is_ready
from aenv.project.builtin import builtin_root
from benchmarks.measure import Effort, Line, interleave, line
from benchmarks.processes import OURS, asked, environment, running, told
from benchmarks.venvs import ROOT

ENV, SELECTION = "tau2", {"domain": "airline"}
LIBRARY = ("inspect_evals.tau2.airline.data_model:FlightDB",)
"""What the environment makes faster in the benchmark's library: it reads the database anew for each task."""
FEW = 5
"""Tasks that the library as it is plays in a round: it takes nearly a second for each."""
AT_ONCE, SAMPLES = 2, 4
"""Episodes at a time, one for each core, and of each task, as for pass@4."""
MOST_ALONE, MOST_AT_ONCE, MOST_RESET = 1.5, 1 / 1.6, 1 / 50
"""Of the wall time of the benchmark in one process; and of its import."""


def lacking() -> str:
    """Why it cannot be measured here, if it cannot."""
    ready = is_ready(builtin_root() / ENV, trusted=True)
    return "" if ready else f"the packages of {ENV} are not installed: make components"


def evals(effort: Effort) -> list[Line]:
    """The oracle on all tasks of a domain, one after the other and several at a time, beside the benchmark's library in
    one process, as it is and as the environment uses it; a reset beside the import that an instance does without."""
    python = asyncio.run(interpreter_for(builtin_root() / ENV, trusted=True)).executable
    env = environment(PYTHONPATH=f"{ROOT}:{ROOT / 'src'}")
    in_process = [python, "-m", "benchmarks.workers.in_process", ENV]
    with (
        running([*in_process, *LIBRARY], env=env, piped=True) as library,
        running(in_process, env=env, piped=True) as faster,
        running([OURS, "-m", "benchmarks.workers.evaluator", ENV], piped=True) as ours,
    ):
        imported = [told(other)["import"] for other in (library, faster)]

        def mine(at_once: int, n: int) -> Callable[[], Any]:
            return lambda: asked(ours, {"do": "evaluate", "selection": SELECTION, "at_once": at_once, "n": n})

        sides = (
            mine(1, 1),
            mine(AT_ONCE, SAMPLES),
            lambda: asked(library, {"selection": SELECTION, "most": FEW}),
            lambda: asked(faster, {"selection": SELECTION, "most": None}),
        )
        for warm in sides:
            warm()
        rounds = interleave(3 if effort.quick else 7, *sides)
    single, several, own, same = ([_seconds(found) for found in side] for side in rounds)
    name = f"{ENV} {SELECTION['domain']}, oracle"
    resets = [found["reset"] for found in rounds[0]]
    unit = "ms a task"
    return [
        _line(f"{name}, one at a time", unit, single, "the library", own, MOST_ALONE),
        _line(f"{name}, {AT_ONCE} at a time", unit, several, "the library", own, MOST_AT_ONCE),
        _line(f"{name}, one at a time (same code)", unit, single, "in-process", same, well=1.0),
        _line(f"{name}, {AT_ONCE} at a time (same code)", unit, several, "in-process", same, well=1.0),
        _line(f"{ENV}, a reset", "ms", resets, "an import", imported[:1] * len(resets), MOST_RESET),
    ]


def _seconds(found: Any) -> float:
    """Of each task, all of which must have passed."""
    if found["passed"] != found["tasks"]:
        raise RuntimeError(f"of {found['tasks']} tasks, {found['passed']} passed")
    return float(found["wall"]) / int(found["tasks"])


def _line(
    name: str,
    unit: str,
    ours: list[float],
    against: str,
    other: list[float],
    limit: float | None = None,
    *,
    well: float = 0.0,
) -> Line:
    """A line of milliseconds. Below a tenth of its limit, or ``well``, it makes no difference how much it is."""
    found = line(name, unit, ours, against, other, limit=limit, scale=1e3)
    return replace(found, ratio=max(found.ratio or 0.0, (limit or 0.0) / 10, well))
