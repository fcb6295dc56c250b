"""What it costs that environments are made of others: compositions, and agents as environments."""

from __future__ import annotations

from benchmarks.measure import Effort, Line, interleave, line
from benchmarks.processes import OURS, asked, environment, running
from benchmarks.venvs import ROOT

MOST_START, MOST_ANSWER = 2.0, 1.3
CALLS = 50


def composed(effort: Effort) -> list[Line]:
    """An environment that needs two others, to its first answer, beside one of these
    alone; and a call that asks another one, beside one that does not."""
    command = [OURS, "-m", "benchmarks.workers.composer"]
    folder = ROOT / "benchmarks" / "projects" / "composed"
    # Without spares: with one, most of a create was done before it was asked for.
    env = environment(PYTHONPATH=f"{ROOT}:{ROOT / 'src'}", AENV_SPARE="0")
    with (
        running(command, cwd=folder / "whole", env=env, piped=True) as whole,
        running(command, cwd=folder / "left", env=env, piped=True) as left,
    ):
        sides = (
            lambda: float(asked(whole, {"do": "start", "name": "whole"})),
            lambda: float(asked(left, {"do": "start", "name": "left"})),
            lambda: float(asked(whole, {"do": "call", "name": "whole", "tool": "through", "count": CALLS})),
            lambda: float(asked(left, {"do": "call", "name": "left", "tool": "echo", "count": CALLS})),
        )
        for warm in sides:
            warm()
        three, one, through, straight = interleave(effort.rounds(21), *sides)
    return [
        line("composition of three, start to first answer", "ms", three, "one", one, limit=MOST_START, scale=1e3),
        line("call through a composition, wall time", "ms", through, "a call", straight, scale=1e3),
    ]


def agent_answer(effort: Effort) -> list[Line]:
    """An answer of an agent that is an environment, beside one of the same agent in the process that asks it."""
    command = [OURS, "-m", "benchmarks.workers.composer"]
    folder = ROOT / "benchmarks" / "projects" / "agent"
    env = environment(PYTHONPATH=f"{ROOT}:{ROOT / 'src'}:{folder / 'src'}")
    chat = {"do": "call", "name": "agent", "tool": "chat", "argument": "message", "count": CALLS}
    with running(command, cwd=folder, env=env, piped=True) as worker:
        sides = (
            lambda: float(asked(worker, chat)),
            lambda: float(asked(worker, {"do": "think", "count": CALLS})),
        )
        for warm in sides:
            warm()
        apart, inside = interleave(effort.rounds(9), *sides)
    return [line("agent as environment, an answer", "ms", apart, "in-process", inside, limit=MOST_ANSWER, scale=1e3)]
