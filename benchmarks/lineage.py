"""What a journal costs a call, and what siblings and checkpoints cost beside new instances."""

from __future__ import annotations

import subprocess
from collections.abc import Callable

from benchmarks.clients import OURS_CALLS
from benchmarks.measure import Effort, Line, interleave, line
from benchmarks.processes import OURS, Worker, asked, environment, ours, running, server, worker
from benchmarks.venvs import ROOT

AT_ONCE, MANY = 16, 100
MOST_CALL, MOST_FORK, MOST_RESTORE = 1.25, 3.0, 5.0


def journal(effort: Effort) -> list[Line]:
    """CPU of the client for ``call_tool`` with its journal, beside the same without."""
    with server(ours("few")) as target, worker("sdk", target) as mine, worker("sdk", target, AENV_JOURNAL="0") as other:

        def cost(client: Worker) -> float:
            return client.round("add", OURS_CALLS, 1).client_cpu

        for client in (mine, other):
            cost(client)
        kept, none = interleave(effort.rounds(13), lambda: cost(mine), lambda: cost(other))
    name = "call_tool with a journal, client CPU a call"
    return [line(name, "µs", kept, "without", none, limit=MOST_CALL, scale=1e6)]


def lineage(effort: Effort) -> list[Line]:
    """16 siblings of an instance that has had 8 calls, beside 16 new instances; a checkpoint and its restore, beside a
    new instance: by forks of the process, by what the author's code says, and by the journal. Each to its first answer.
    And what 100 forks have in memory, beside 100 new instances."""
    command = [OURS, "-m", "benchmarks.workers.forker"]
    # Without spares: with one, most of a create was done before it was asked for.
    folder, env = ROOT / "examples" / "03-maze", environment(PYTHONPATH=f"{ROOT}:{ROOT / 'src'}", AENV_SPARE="0")
    with (
        running([*command, "live"], cwd=folder, env=env, piped=True) as live,
        running([*command, "saved"], cwd=folder, env=env, piped=True) as saved,
        running([*command, "journal"], cwd=folder, env=env, piped=True) as journal,
    ):

        def side(process: subprocess.Popen[bytes], do: str, **more: int) -> Callable[[], float]:
            return lambda: float(asked(process, {"do": do, **more}))

        sides = (
            side(live, "fork", count=AT_ONCE),
            side(live, "fresh", count=AT_ONCE),
            side(live, "restore"),
            side(live, "fresh", count=1),
            side(saved, "fork", count=AT_ONCE),
            side(saved, "restore"),
            side(journal, "fork", count=AT_ONCE),
            side(journal, "restore"),
        )
        for warm in sides:
            warm()
        forks, many, restores, one, alike, there, again, back = interleave(effort.rounds(13), *sides)
        each = interleave(3, side(live, "forks_memory", count=MANY), side(live, "fresh_memory", count=MANY))
    creates = f"{AT_ONCE} creates"
    return [
        line(f"fork({AT_ONCE}), live", "ms", forks, creates, many, limit=MOST_FORK, scale=1e3),
        line("checkpoint and restore, live", "ms", restores, "a create", one, limit=MOST_RESTORE, scale=1e3),
        line(f"fork({AT_ONCE}), saved", "ms", alike, creates, many, limit=MOST_FORK, scale=1e3),
        line("checkpoint and restore, saved", "ms", there, "a create", one, limit=MOST_RESTORE, scale=1e3),
        line(f"fork({AT_ONCE}), by the journal", "ms", again, creates, many, limit=MOST_FORK, scale=1e3),
        line("checkpoint and restore, by the journal", "ms", back, "a create", one, limit=MOST_RESTORE, scale=1e3),
        line(f"fork({MANY}), live, memory of each", "MB", each[0], f"of {MANY} creates", each[1], scale=1e-6),
    ]
