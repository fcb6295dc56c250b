"""A benchmark without us: ``python -m benchmarks.workers.in_process ENV``, in the interpreter of that environment.

Its functions are called in this process, one task after the other, with the steps of its solution. First it says how
many seconds their import took. A round is a line with the selection of tasks, as JSON; its answer is a line with the
seconds of the ``wall``, how many ``tasks`` there were, and how many ``passed``.
"""

import asyncio
import inspect
import json
import sys
import time
from collections.abc import Callable
from typing import Any

from aenv import project
from aenv.project.builtin import builtin_root
from aenv.runtime.loader import Loaded, load

loop = asyncio.new_event_loop()


def main(env: str) -> None:
    """Play rounds until stdin ends."""
    begun = time.perf_counter()
    loaded = load(project.read(builtin_root() / env))
    _answer({"import": time.perf_counter() - begun})
    while line := sys.stdin.readline():
        tasks = _done(loaded.functions["tasks"].mark.function, json.loads(line))["tasks"]
        begun = time.perf_counter()
        passed = sum(_play(loaded, task["reset"]) == 1.0 for task in tasks)
        _answer({"wall": time.perf_counter() - begun, "tasks": len(tasks), "passed": passed})


def _play(loaded: Loaded, reset: dict[str, Any]) -> float:
    assert loaded.reset is not None
    _done(loaded.reset.mark.function, {**reset, "seed": 1})
    for step in _done(loaded.functions["solution"].mark.function, reset):
        table, name = (loaded.functions, step["function"]) if "function" in step else (loaded.tools, step["name"])
        _done(table[name].mark.function, step["arguments"])
    (reward,) = loaded.rewards.values()
    return float(_done(reward.mark.function, {})["score"])


def _done(function: Callable[..., Any], arguments: dict[str, Any]) -> Any:
    value = function(**arguments)
    return loop.run_until_complete(value) if inspect.isawaitable(value) else value


def _answer(value: dict[str, Any]) -> None:
    sys.stdout.write(json.dumps(value) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main(sys.argv[1])
