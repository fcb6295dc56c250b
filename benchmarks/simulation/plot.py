"""The figures of a simulation as a picture."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from benchmarks.drawing import Panel, picture
from benchmarks.simulation.scale import Level

_PANELS: dict[str, dict[str, Callable[[Level], float]]] = {
    "memory, MB": {"": lambda one: one.memory},
    "a look of the reaper, ms of CPU": {
        "when all are due": lambda one: 1e3 * one.all_due,
        "when none is": lambda one: 1e3 * one.look,
    },
    "create, ms": {"median": lambda one: 1e3 * one.p50, "99%": lambda one: 1e3 * one.p99},
    "changes heard of each pod": {"": lambda one: one.heard},
}


def drawn(levels: Sequence[Level]) -> str:
    """The picture: two panels by two, each over the number of pods."""
    pods = [one.pods for one in levels]
    panels = [
        Panel(title, pods, {name: [[value(one) for one in levels]] for name, value in series.items()})
        for title, series in _PANELS.items()
    ]
    return picture("One Kubernetes engine with ever more pods", panels)
