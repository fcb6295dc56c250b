"""``python -m benchmarks``: measure, show, and with ``--check`` fail on what got worse."""

from __future__ import annotations

import argparse
import signal
import sys
import time
from collections.abc import Callable

from benchmarks import (
    agents,
    calls,
    clients,
    composed,
    containers,
    evals,
    gateway,
    http_client,
    instances,
    kubernetes,
    lineage,
    model_gateway,
    platform,
    replicas,
    report,
    rollouts,
    startup,
    stores,
    vector,
)
from benchmarks.measure import Effort, Line
from benchmarks.simulation import scale

FIGURES: dict[str, Callable[[Effort], list[Line]]] = {
    "import": startup.imports,
    "server_cpu": calls.server_cpu,
    "client_cpu": clients.client_cpu,
    "throughput": clients.throughput,
    "many_tools": calls.many_tools,
    "run": startup.run,
    "init": startup.init,
    "kinds": calls.kinds,
    "http_client": http_client.http_client,
    "gateway": gateway.hop,
    "gateway_service": gateway.service,
    "gateway_observed": gateway.observed,
    "instance_start": instances.start,
    "instances": instances.live,
    "instance_calls": instances.calls,
    "stores": stores.stores,
    "platform_create": platform.create,
    "platform_warm": platform.warm,
    "platform_many": platform.many,
    "platform_list": platform.listing,
    "replicas": replicas.replicas,
    "containers": containers.create,
    "containers_many": containers.many,
    "second": containers.second,
    "kubernetes": kubernetes.kubernetes,
    "simulation": scale.simulation,
    "episodes": rollouts.episodes,
    "rollout": rollouts.overhead,
    "evals": evals.evals,
    "journal": lineage.journal,
    "lineage": lineage.lineage,
    "composed": composed.composed,
    "agent_answer": composed.agent_answer,
    "model_gateway": model_gateway.model_gateway,
    "vector": vector.vector,
    "agents": agents.agents,
}
ISOLATED = (
    "instance_start",
    "instances",
    "instance_calls",
    "platform_create",
    "platform_warm",
    "platform_many",
    "episodes",
    "rollout",
    "evals",
    "lineage",
    "composed",
    "vector",
)
"""What is measured only where a sandbox can be isolated in every way."""
LACKING: dict[str, Callable[[], str]] = {
    "agents": agents.lacking,
    "replicas": replicas.lacking,
    "containers": containers.lacking,
    "containers_many": containers.lacking,
    "second": containers.lacking_second,
    "kubernetes": kubernetes.lacking,
    "simulation": scale.lacking,
    "evals": evals.lacking,
}
"""Why other figures cannot be measured here, if they cannot."""
TRIES = 3


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    mode = parser.add_mutually_exclusive_group()
    mode.add_argument("--check", action="store_true", help="measure less, and fail on what got worse")
    mode.add_argument("--update", action="store_true", help="take the ratios as the recorded ones")
    parser.add_argument("--only", action="append", choices=FIGURES, metavar="NAME", help=", ".join(FIGURES))
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # the children end with us

    known = report.recorded()
    wanted, whole = options.only or list(FIGURES), not options.only
    if any(name in ISOLATED for name in wanted) and (reason := instances.lacking()):
        sys.stderr.write(f"skipped: {', '.join(ISOLATED)} ({reason})\n")
        wanted, whole = [name for name in wanted if name not in ISOLATED], False
    for name, lacking in LACKING.items():
        if name in wanted and (reason := lacking()):
            sys.stderr.write(f"skipped: {name} ({reason})\n")
            wanted, whole = [other for other in wanted if other != name], False
    lines: list[Line] = []
    for name in wanted:
        lines += _measured(name, Effort(quick=options.check), known, again=options.check)
    print(report.table(lines, known))
    report.write(lines)
    if options.update:
        report.record(lines, whole=whole)
    return _verdict(lines, known, whole=whole) if options.check else 0


def _verdict(lines: list[Line], known: dict[str, float], *, whole: bool) -> int:
    worse = [line for line in lines if report.problem(line, known)]
    if worse:
        print(f"\nworse than it may be:\n{report.table(worse, known)}")
    gone = report.unmeasured(lines, known) if whole else []
    if gone:
        print(f"\nrecorded, but not measured: {', '.join(gone)}\nhint: python -m benchmarks --update")
    return 1 if worse or gone else 0


def _measured(name: str, effort: Effort, known: dict[str, float], *, again: bool) -> list[Line]:
    """The lines of a figure. One that looks worse in a check is measured again: the machine may have been busy."""
    lines = _timed(name, effort)
    for _ in range(TRIES - 1 if again else 0):
        if not any(report.problem(line, known) for line in lines):
            break
        sys.stderr.write("  looks worse; once more\n")
        more = _timed(name, Effort())
        lines = [min(pair, key=lambda line: line.ratio or 0.0) for pair in zip(lines, more, strict=True)]
    return lines


def _timed(name: str, effort: Effort) -> list[Line]:
    sys.stderr.write(f"{name}: {(FIGURES[name].__doc__ or '').strip().splitlines()[0]}\n")
    begin = time.monotonic()
    lines = FIGURES[name](effort)
    sys.stderr.write(f"  {time.monotonic() - begin:.0f} s\n")
    return lines


if __name__ == "__main__":
    sys.exit(main())
