"""Attacks by name. Each returns what it got, which is nothing when the sandbox holds.

Only a refusal of the system counts as held. Any other exception is a fault of the attack, and fails the test.
"""

import os
from collections.abc import Callable
from typing import Any

from _attacks import files, kernel, memory, network, processes

ATTACKS: dict[str, Callable[..., Any]] = {
    name: function
    for module in (files, kernel, memory, network, processes)
    for name, function in vars(module).items()
    if callable(function) and getattr(function, "__module__", "") == module.__name__ and not name.startswith("_")
}
"""Every public function of those modules."""


def run(name: str, arguments: dict[str, Any]) -> dict[str, Any]:
    try:
        return {"got": ATTACKS[name](**arguments), "pid": os.getpid()}
    except OSError as exc:
        return {"got": None, "refused": f"{type(exc).__name__}: {exc}", "pid": os.getpid()}


def run_all(plan: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Several at once: label -> ``{"attack": name, "with": arguments}``."""
    return {label: run(step["attack"], step.get("with", {})) for label, step in plan.items()}
