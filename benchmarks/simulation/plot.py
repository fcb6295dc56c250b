"""The figures of a simulation as a picture: SVG, with nothing that draws but this."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from benchmarks.simulation.scale import Level

_WIDTH, _HEIGHT = 340, 220
_LEFT, _TOP, _RIGHT, _BOTTOM = 56, 34, 16, 36
_COLOURS = ("#2563eb", "#d97706")
_STYLE = """\
text { font: 11px sans-serif; fill: #444 } .title { font-size: 13px; font-weight: bold; fill: #111 }
.axis { stroke: #999 } .grid { stroke: #ddd }"""


class _Panel(NamedTuple):
    title: str
    series: dict[str, Callable[[Level], float]]


_PANELS = (
    _Panel("memory, MB", {"": lambda one: one.memory}),
    _Panel(
        "a look of the reaper, ms of CPU",
        {"when all are due": lambda one: 1e3 * one.all_due, "when none is": lambda one: 1e3 * one.look},
    ),
    _Panel("create, ms", {"median": lambda one: 1e3 * one.p50, "99%": lambda one: 1e3 * one.p99}),
    _Panel("changes heard of each pod", {"": lambda one: one.heard}),
)


def drawn(levels: Sequence[Level]) -> str:
    """The picture: two panels by two, each over the number of pods."""
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{2 * _WIDTH}" height="{2 * _HEIGHT}" '
        f'viewBox="0 0 {2 * _WIDTH} {2 * _HEIGHT}" role="img">',
        "<title>One Kubernetes engine with ever more pods</title>",
        f"<style>{_STYLE}</style>",
        '<rect width="100%" height="100%" fill="#fff"/>',
    ]
    for number, panel in enumerate(_PANELS):
        place = f"translate({number % 2 * _WIDTH},{number // 2 * _HEIGHT})"
        parts += [f'<g transform="{place}">', *_panel(panel, levels), "</g>"]
    return "\n".join([*parts, "</svg>", ""])


def _panel(panel: _Panel, levels: Sequence[Level]) -> list[str]:
    most_pods = levels[-1].pods
    most = _round(max(value(one) for value in panel.series.values() for one in levels))
    bottom, right = _HEIGHT - _BOTTOM, _WIDTH - _RIGHT

    def x(pods: float) -> float:
        return round(_LEFT + (right - _LEFT) * pods / most_pods, 1)

    def y(value: float) -> float:
        return round(bottom - (bottom - _TOP) * value / most, 1)

    parts = [f'<text class="title" x="{_LEFT}" y="20">{panel.title}</text>']
    for share in (0.0, 0.25, 0.5, 0.75, 1.0):
        at = y(most * share)
        parts.append(f'<line class="{"grid" if share else "axis"}" x1="{_LEFT}" x2="{right}" y1="{at}" y2="{at}"/>')
        parts.append(f'<text x="{_LEFT - 6}" y="{at + 4}" text-anchor="end">{most * share:g}</text>')
    parts += [f'<text x="{x(one.pods)}" y="{bottom + 16}" text-anchor="middle">{one.pods:,}</text>' for one in levels]
    for colour, (name, value) in zip(_COLOURS, panel.series.items(), strict=False):
        points = [(x(one.pods), y(value(one))) for one in levels]
        line = " ".join(f"{left},{top}" for left, top in points)
        parts.append(f'<polyline points="{line}" fill="none" stroke="{colour}" stroke-width="2"/>')
        parts += [f'<circle cx="{left}" cy="{top}" r="3" fill="{colour}"/>' for left, top in points]
        if name:
            left, top = points[-1]
            parts.append(f'<text x="{left}" y="{top - 8}" text-anchor="end" fill="{colour}">{name}</text>')
    return parts


def _round(value: float) -> float:
    """The next number above that is easy to read."""
    size = 1.0
    while size * 10 <= value:
        size *= 10
    while size > value:
        size /= 10
    return next(size * step for step in (1, 1.2, 1.6, 2, 3, 4, 5, 6, 8, 10) if size * step >= value)
