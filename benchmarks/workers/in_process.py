"""A benchmark without us: ``python -m benchmarks.workers.in_process ENV [MODULE:CLASS ...]``, in the interpreter of
that environment.

Its functions are called in this process, one task after the other, with the steps of its solution. The classes are
those of its library that are to stay as they are there, whatever the environment makes faster in them. First it says
how many seconds the import took. A round is a line with a ``selection`` of tasks, and how many of them at the ``most``;
its answer is a line with the seconds of the ``wall``, how many ``tasks`` there were, and how many ``passed``.
"""

import asyncio
import importlib
import inspect
import json
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from aenv import project
from aenv.project.builtin import builtin_root
from aenv.runtime.loader import Loaded, load

loop = asyncio.new_event_loop()


def main(env: str, *classes: str) -> None:
    """Play rounds until stdin ends."""
    begun = time.perf_counter()
    with _kept(*classes):
        loaded = load(project.read(builtin_root() / env))
    _answer({"import": time.perf_counter() - begun})
    while line := sys.stdin.readline():
        request = json.loads(line)
        tasks = _done(loaded.functions["tasks"].mark.function, request["selection"])["tasks"][: request["most"]]
        begun = time.perf_counter()
        passed = sum(_play(loaded, task["reset"]) == 1.0 for task in tasks)
        _answer({"wall": time.perf_counter() - begun, "tasks": len(tasks), "passed": passed})


@contextmanager
def _kept(*classes: str) -> Iterator[None]:
    """Classes are the same after the block as before it."""
    found = []
    for place in classes:
        module, _, name = place.partition(":")
        kind = getattr(importlib.import_module(module), name)
        found.append((kind, dict(vars(kind))))
    yield
    for kind, before in found:
        for name, value in dict(vars(kind)).items():
            if name not in before:
                delattr(kind, name)
            elif value is not before[name]:
                setattr(kind, name, before[name])


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
    main(*sys.argv[1:])
