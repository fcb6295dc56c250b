"""Plots as SVG that stands in a page. Pure: numbers in, text out; colours are the page's."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from operator import add
from typing import NamedTuple

from aenv.evals import statistics
from aenv.evals.statistics import Interval

BINS = 20
_HEIGHT = 190
_LEFT, _RIGHT, _TOP, _BOTTOM = 44, 10, 12, 30
_ROW = 24


class Rate(NamedTuple):
    """A task in the plot of pass rates."""

    id: str
    value: float
    interval: Interval
    link: str
    """The address of an episode of it; empty where the page has none."""


def histogram(scores: Sequence[float], threshold: float, width: int = 380) -> str:
    """How many episodes have which score."""
    low, high = min([0.0, *scores]), max([1.0, *scores])
    missed, passed = [0] * BINS, [0] * BINS
    for score in scores:
        counts = passed if statistics.passed(score, threshold) else missed
        counts[min(BINS - 1, int((score - low) / (high - low) * BINS))] += 1
    most = max(1, *map(add, missed, passed))
    step = (width - _LEFT - _RIGHT) / BINS
    parts = []
    for place in range(BINS):
        begin, end = (low + (high - low) * at / BINS for at in (place, place + 1))
        y: float = _HEIGHT - _BOTTOM
        for kind, count in (("bin", missed[place]), ("bin passed", passed[place])):
            if count:
                tall = max(count / most * (_HEIGHT - _TOP - _BOTTOM), 2)
                y -= tall
                title = _tag("title", f"{kind.partition(' ')[2]} {begin:.3g} to {end:.3g}: {count}".strip())
                x = _LEFT + place * step + 1
                parts.append(_tag("rect", title, class_=kind, x=x, y=y, width=step - 2, height=tall))
    parts += [_tick(0, width, "0"), _tick(1, width, f"{most}")]
    parts += _below(width, f"{low:.3g}", f"{high:.3g}", "score of an episode")
    return _plot("Scores", width, _HEIGHT, parts)


def rates(tasks: Sequence[Rate], width: int = 780) -> str:
    """The pass rate of every task, best first, with its interval."""
    ordered = sorted(tasks, key=lambda task: -task.value)  # and in their own order where they are alike
    step = (width - _LEFT - _RIGHT) / max(1, len(ordered))
    radius = max(1.2, min(4.0, step / 3))
    parts = [_tick(share, width, f"{share * 100:g} %") for share in (0, 0.5, 1)]
    for place, task in enumerate(ordered):
        x = _LEFT + (place + 0.5) * step
        low, high = task.interval
        title = _tag("title", f"{task.id}: {task.value:.0%} ({low:.0%} to {high:.0%})")
        marks = _tag("line", class_="whisker", x1=x, x2=x, y1=_height(low), y2=_height(high))
        marks += _tag("circle", title, class_="dot", cx=x, cy=_height(task.value), r=radius)
        parts.append(_tag("a", marks, href=task.link) if task.link else marks)
    parts += _below(width, "", "", f"{len(ordered)} tasks, best first")
    return _plot("Pass rate by task", width, _HEIGHT, parts)


def phases(seconds: Mapping[str, float], width: int = 380) -> str:
    """Where the time of all episodes went."""
    known = {name: spent for name, spent in seconds.items() if spent > 0}
    total = sum(known.values()) or 1.0
    parts = []
    for place, (name, spent) in enumerate(known.items()):
        y = _TOP + place * _ROW
        bar = (width - 190) * spent / total
        parts.append(_tag("text", name, x=74, y=y + 13, text_anchor="end"))
        parts.append(_tag("rect", class_=f"phase {name}", x=82, y=y, width=max(bar, 1), height=_ROW - 7, rx=2))
        parts.append(_tag("text", f"{shown(spent)}, {spent / total:.0%}", x=90 + bar, y=y + 13))
    return _plot("Time of all episodes by phase", width, _TOP + max(1, len(known)) * _ROW, parts)


def shown(seconds: float) -> str:
    """A time as people say it."""
    if seconds < 1:
        return f"{seconds * 1000:.0f} ms"
    return f"{seconds:.1f} s" if seconds < 600 else f"{seconds / 60:.0f} min"


def _height(share: float) -> float:
    return _TOP + (1 - share) * (_HEIGHT - _TOP - _BOTTOM)


def _tick(share: float, width: int, text: str) -> str:
    y = _height(share)
    line = _tag("line", class_="grid", x1=_LEFT, x2=width - _RIGHT, y1=y, y2=y)
    return line + _tag("text", text, x=_LEFT - 6, y=y + 4, text_anchor="end")


def _below(width: int, left: str, right: str, middle: str) -> list[str]:
    y = _HEIGHT - _BOTTOM + 16
    return [
        _tag("text", left, x=_LEFT, y=y),
        _tag("text", middle, x=(width + _LEFT) / 2, y=y, text_anchor="middle"),
        _tag("text", right, x=width - _RIGHT, y=y, text_anchor="end"),
    ]


def _plot(name: str, width: int, height: int, parts: Sequence[str]) -> str:
    drawn = _tag("svg", "".join(parts), viewBox=f"0 0 {width} {height}", role="img", aria_label=name)
    return _tag("figure", _tag("figcaption", name) + drawn, class_="wide" if width > 500 else "plot", raw=True)


def _tag(tag: str, inside: str = "", *, raw: bool = False, **attributes: object) -> str:
    """One element. Text is escaped; what is markup already stands in tags that hold nothing else."""
    held = inside if raw or tag in ("svg", "a", "rect", "circle") else escape(inside)
    written = "".join(
        f' {name.rstrip("_").replace("_", "-")}="{escape(f"{value:.6g}" if isinstance(value, float) else str(value))}"'
        for name, value in attributes.items()
    )
    return f"<{tag}{written}>{held}</{tag}>"
