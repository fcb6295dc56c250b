"""``python -m benchmarks.simulation``: an engine with ever more pods, in figures; with ``--record`` also in docs."""

from __future__ import annotations

import argparse
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

from benchmarks import report
from benchmarks.simulation import plot, scale
from benchmarks.simulation.scale import Level
from benchmarks.venvs import ROOT

PAGE = ROOT / "docs" / "concepts" / "kubernetes-scale.md"
PLOT = ROOT / "docs" / "images" / "kubernetes-scale.svg"
_BEGIN, _END = "<!-- figures: make simulation RECORD=1 -->\n", "<!-- end of the figures -->\n"


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.simulation", description=__doc__)
    parser.add_argument("--pods", type=int, default=scale.PODS, help="how many in the end (%(default)s)")
    parser.add_argument("--record", action="store_true", help="write the figures and their plot to docs, too")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # the children end with us
    if reason := scale.lacking():
        sys.stderr.write(f"skipped: {reason}\n")
        return 0
    counts = [int(options.pods * share) for share in scale.SHARES]
    if counts[0] < scale.FIRST + scale.PROBES:
        parser.error(f"--pods must be at least {int((scale.FIRST + scale.PROBES) / scale.SHARES[0])}")
    levels = []
    for level in scale.simulate(counts):
        sys.stderr.write(f"{level.pods:,} pods\n")
        levels.append(level)
    found = table(levels)
    lines = scale.lines(levels)
    print(f"{found}\n{report.table(lines, {})}")
    if options.record:
        record(levels, found)
    return 1 if any(report.problem(line, {}) for line in lines) else 0


def table(levels: Sequence[Level]) -> str:
    """The figures of each level, as a table of Markdown."""
    names = (
        "pods",
        "memory, MB",
        "a look, µs",
        "all due, ms",
        "find, ms",
        "requests, each",
        "heard, each",
        "KB, each",
        "create p50, ms",
        "p99, ms",
        "creates/s",
        "known again, s",
        "with, MB",
    )
    rows = [f"| {' | '.join(names)} |", f"|{'--:|' * len(names)}"]
    for one in levels:
        numbers = (
            f"{one.pods:,}",
            f"{one.memory:.1f}",
            f"{1e6 * one.look:.1f}",
            f"{1e3 * one.all_due:.1f}",
            f"{1e3 * one.find:.1f}",
            f"{one.asked:.2f}",
            f"{one.heard:.2f}",
            f"{one.heard_bytes / 1024:.1f}",
            f"{1e3 * one.p50:.1f}",
            f"{1e3 * one.p99:.1f}",
            f"{one.rate:.0f}",
            f"{one.reopened:.2f}",
            f"{one.reopened_memory:.1f}",
        )
        rows.append(f"| {' | '.join(numbers)} |")
    return "\n".join(rows) + "\n"


def record(levels: Sequence[Level], found: str, page: Path = PAGE, image: Path = PLOT) -> None:
    """Put them where they are read."""
    image.parent.mkdir(exist_ok=True)
    image.write_text(plot.drawn(levels))
    before, _, rest = page.read_text().partition(_BEGIN)
    page.write_text(f"{before}{_BEGIN}\n{found}\n{_END}{rest.partition(_END)[2]}")


if __name__ == "__main__":
    sys.exit(main())
