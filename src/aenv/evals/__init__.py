"""Benchmarks: many tasks of one environment, an agent that plays them, and a score with how sure it is.

Every public name is here, and each loads on first use.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from aenv.evals.agents import Command as Command
    from aenv.evals.agents import Nop as Nop
    from aenv.evals.agents import Oracle as Oracle
    from aenv.evals.agents import agent as agent
    from aenv.evals.comparing import Comparison as Comparison
    from aenv.evals.comparing import compare as compare
    from aenv.evals.report import page as page
    from aenv.evals.results import Evaluation as Evaluation
    from aenv.evals.results import TaskResult as TaskResult
    from aenv.evals.runner import evaluate as evaluate
    from aenv.evals.statistics import Estimate as Estimate
    from aenv.evals.tasksets import Taskset as Taskset

_HOME = {
    "agents": ("Command", "Nop", "Oracle", "agent"),
    "comparing": ("Comparison", "compare"),
    "report": ("page",),
    "results": ("Evaluation", "TaskResult"),
    "runner": ("evaluate",),
    "statistics": ("Estimate",),
    "tasksets": ("Taskset",),
}
_MODULE_OF = {name: module for module, names in _HOME.items() for name in names}

__all__ = [*_MODULE_OF]  # noqa: PLE0604 - names, all of them strings


def __getattr__(name: str) -> Any:
    module = _MODULE_OF.get(name)
    if module is None:
        raise AttributeError(f"module 'aenv.evals' has no attribute {name!r}")
    value = getattr(import_module(f"aenv.evals.{module}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
