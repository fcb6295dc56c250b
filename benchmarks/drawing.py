"""Figures as a picture: SVG, with nothing that draws but this."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

_WIDTH, _HEIGHT = 340, 220
_LEFT, _TOP, _RIGHT, _BOTTOM = 56, 34, 16, 36
_COLOURS = ("#2563eb", "#d97706")
_FEW = 12
"""Points of a line that are marked and named one by one, where a line has its colour for itself."""
_STYLE = """\
text { font: 11px sans-serif; fill: #444 } .title { font-size: 13px; font-weight: bold; fill: #111 }
.axis { stroke: #999 } .grid { stroke: #ddd }"""


class Panel(NamedTuple):
    """One plot of a picture."""

    title: str
    at: Sequence[float]
    """Where the values are, from left to right."""
    series: Mapping[str, Sequence[Sequence[float]]]
    """Lines by what they are called; several of one name have its colour."""


def picture(title: str, panels: Sequence[Panel], across: int = 2) -> str:
    """Plots in rows of so many."""
    width, height = across * _WIDTH, -(-len(panels) // across) * _HEIGHT
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" '
        f'viewBox="0 0 {width} {height}" role="img">',
        f"<title>{title}</title>",
        f"<style>{_STYLE}</style>",
        '<rect width="100%" height="100%" fill="#fff"/>',
    ]
    for number, panel in enumerate(panels):
        place = f"translate({number % across * _WIDTH},{number // across * _HEIGHT})"
        parts += [f'<g transform="{place}">', *_drawn(panel), "</g>"]
    return "\n".join([*parts, "</svg>", ""])


def _drawn(panel: Panel) -> list[str]:
    furthest = panel.at[-1]
    most = _round(max(value for lines in panel.series.values() for line in lines for value in line))
    bottom, right = _HEIGHT - _BOTTOM, _WIDTH - _RIGHT

    def x(place: float) -> float:
        return round(_LEFT + (right - _LEFT) * place / furthest, 1)

    def y(value: float) -> float:
        return round(bottom - (bottom - _TOP) * value / most, 1)

    parts = [f'<text class="title" x="{_LEFT}" y="20">{panel.title}</text>']
    for share in (0.0, 0.25, 0.5, 0.75, 1.0):
        at = y(most * share)
        parts.append(f'<line class="{"grid" if share else "axis"}" x1="{_LEFT}" x2="{right}" y1="{at}" y2="{at}"/>')
        parts.append(f'<text x="{_LEFT - 6}" y="{at + 4}" text-anchor="end">{most * share:g}</text>')
    few = len(panel.at) <= _FEW and all(len(lines) == 1 for lines in panel.series.values())
    named = panel.at if few else (furthest / 4, furthest / 2, furthest)
    parts += [f'<text x="{x(one)}" y="{bottom + 16}" text-anchor="middle">{one:,.0f}</text>' for one in named]
    for number, (colour, (name, lines)) in enumerate(zip(_COLOURS, panel.series.items(), strict=False)):
        for line in lines:
            points = [(x(at), y(value)) for at, value in zip(panel.at, line, strict=True)]
            drawn = " ".join(f"{left},{top}" for left, top in points)
            parts.append(
                f'<polyline points="{drawn}" fill="none" stroke="{colour}" stroke-width="{2 if few else 1.2}"/>'
            )
            parts += [f'<circle cx="{left}" cy="{top}" r="3" fill="{colour}"/>' for left, top in points if few]
        if name:
            left, top = (points[-1][0], points[-1][1] - 8) if few else (right, bottom - 8 - 14 * number)
            parts.append(f'<text x="{left}" y="{top}" text-anchor="end" style="fill: {colour}">{name}</text>')
    return parts


def _round(value: float) -> float:
    """The next number above that is easy to read."""
    size = 1.0
    while size * 10 <= value:
        size *= 10
    while size > value:
        size /= 10
    return next(size * step for step in (1, 1.2, 1.6, 2, 3, 4, 5, 6, 8, 10) if size * step >= value)
