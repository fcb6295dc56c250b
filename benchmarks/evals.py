"""What an evaluation costs beside the benchmark itself: the same actions, and the same scores, without us."""

from __future__ import annotations

import asyncio
import json
import select
import subprocess
from collections.abc import Callable
from typing import Any

from aenv.engines.process.venvs import interpreter_for, is_ready
from aenv.project.builtin import builtin_root
from benchmarks.measure import Effort, Line, interleave, line
from benchmarks.processes import OURS, ROUND, environment, running
from benchmarks.venvs import ROOT

ENV, SELECTION = "tau2", {"domain": "airline"}
AT_ONCE, SAMPLES = 2, 4
"""Episodes at a time, one for each core, and of each task, as for pass@4."""
MOST_ALONE, MOST_RESET = 1.5, 1 / 50
"""Of the wall time of the benchmark in one process; and of its import."""


def lacking() -> str:
    """Why it cannot be measured here, if it cannot."""
    ready = is_ready(builtin_root() / ENV, trusted=True)
    return "" if ready else f"the packages of {ENV} are not installed: make components"


def evals(effort: Effort) -> list[Line]:
    """The oracle on all tasks of a domain: one after the other and several at a time, beside the benchmark's own code
    in one process; and a reset beside the import that an instance does without."""
    python = asyncio.run(interpreter_for(builtin_root() / ENV, trusted=True)).executable
    alone = environment(PYTHONPATH=f"{ROOT}:{ROOT / 'src'}")
    with (
        running([python, "-m", "benchmarks.workers.in_process", ENV], env=alone, piped=True) as other,
        running([OURS, "-m", "benchmarks.workers.evaluator", ENV], piped=True) as ours,
    ):
        imported = _read(other)["import"]

        def theirs() -> Any:
            return _asked(other, SELECTION)

        def mine(at_once: int, n: int) -> Callable[[], Any]:
            return lambda: _asked(ours, {"do": "evaluate", "selection": SELECTION, "at_once": at_once, "n": n})

        sides = (mine(1, 1), mine(AT_ONCE, SAMPLES), theirs)
        for warm in sides:
            warm()
        single, several, plain = interleave(3 if effort.quick else 7, *sides)
    for told in (*single, *several, *plain):
        if told["passed"] != told["tasks"]:
            raise RuntimeError(f"of {told['tasks']} tasks, {told['passed']} passed")

    def each(rounds: list[Any]) -> list[float]:
        return [told["wall"] / told["tasks"] for told in rounds]

    name, against = f"{ENV} {SELECTION['domain']}, oracle", "in-process"
    resets = [told["reset"] for told in single]
    return [
        line(f"{name}, one at a time", "ms a task", each(single), against, each(plain), limit=MOST_ALONE, scale=1e3),
        line(f"{name}, {AT_ONCE} at a time", "ms a task", each(several), against, each(plain), scale=1e3),
        line(f"{ENV}, a reset", "ms", resets, "an import", [imported] * len(resets), limit=MOST_RESET, scale=1e3),
    ]


def _asked(process: subprocess.Popen[bytes], request: Any) -> Any:
    assert process.stdin is not None
    process.stdin.write(json.dumps(request).encode() + b"\n")
    process.stdin.flush()
    return _read(process)


def _read(process: subprocess.Popen[bytes]) -> Any:
    assert process.stdout is not None
    if not select.select([process.stdout], [], [], ROUND)[0]:
        raise RuntimeError(f"no answer within {ROUND:g} s")
    return json.loads(process.stdout.readline())
