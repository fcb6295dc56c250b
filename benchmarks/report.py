"""What is shown and written of a run, and how it is held against the recorded one."""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path

from benchmarks.measure import Line
from benchmarks.venvs import HERE

RATIOS = HERE / "ratios.json"
LATEST = HERE / "results" / "latest.json"
SLACK = 1.5
"""How much worse than recorded a ratio may be: machines differ, and are busy."""
_HEADINGS = ("figure", "ours", "other", "against", "ratio", "better", "limit", "recorded", "")


def recorded() -> dict[str, float]:
    """The ratios that were committed."""
    if not RATIOS.is_file():
        return {}
    found: dict[str, float] = json.loads(RATIOS.read_text())
    return found


def record(lines: Sequence[Line], *, whole: bool) -> None:
    """Take these ratios as the ones to be held against. Unless this is the whole, those of other figures stay."""
    kept = {} if whole else recorded()
    found = {**kept, **{line.name: round(line.ratio, 4) for line in lines if line.ratio is not None}}
    RATIOS.write_text(json.dumps(found, indent=2) + "\n")


def write(lines: Sequence[Line], path: Path = LATEST) -> None:
    """The run as JSON."""
    path.parent.mkdir(exist_ok=True)
    machine = {"python": platform.python_version(), "system": platform.platform(), "cores": os.cpu_count()}
    run = {"machine": machine, "lines": [asdict(line) for line in lines]}
    path.write_text(json.dumps(run, indent=2, ensure_ascii=False) + "\n")


def problem(line: Line, known: Mapping[str, float]) -> str:
    """What is wrong with the line, or nothing."""
    if line.ratio is None:
        return ""
    if line.limit is not None and line.ratio > line.limit:
        return "over its limit"
    before = known.get(line.name)
    if before is None:
        return "not recorded" if known else ""
    if line.ratio > before * SLACK:
        return f"{line.ratio / before:.1f}x of what is recorded"
    return ""


def unmeasured(lines: Sequence[Line], known: Mapping[str, float]) -> list[str]:
    """Recorded names that no figure has any more."""
    return sorted(set(known) - {line.name for line in lines})


def table(lines: Sequence[Line], known: Mapping[str, float]) -> str:
    """The lines for people."""
    rows = [_HEADINGS]
    for line in lines:
        if line.ratio is None or line.other is None:
            rows.append((line.name, _number(line.ours, line.unit), "", "", "", "", "", "", ""))
            continue
        before = known.get(line.name)
        rows.append(
            (
                line.name,
                _number(line.ours, line.unit),
                _number(line.other, line.unit),
                line.against,
                f"{line.ratio:.3f}",
                f"{1 / line.ratio:.1f}x" if line.ratio < 1 else "",
                "" if line.limit is None else f"{line.limit:.3f}",
                "" if before is None else f"{before:.3f}",
                problem(line, known) or ("ok" if line.limit is not None else ""),
            )
        )
    widths = [max(len(row[column]) for row in rows) for column in range(len(_HEADINGS))]
    left = (0, 3, 8)
    shown = [
        "  ".join(
            cell.ljust(width) if column in left else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]
    return "\n".join([shown[0], "-" * len(shown[0]), *shown[1:]])


def _number(value: float, unit: str) -> str:
    digits = 0 if value >= 100 else 1
    return f"{value:,.{digits}f} {unit}"
