"""What the adapters of frameworks of agents add to a tool call, over a function tool that calls the instance."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from benchmarks import venvs
from benchmarks.measure import Effort, Line, interleave, line
from benchmarks.processes import asked, environment, ours, running, server, told

WANTED = venvs.ROOT / "tests" / "peers" / "requirements" / "agents.txt"
FRAMEWORKS = ("openai-agents", "pydantic-ai")
CALLS = 20
"""Of a run: what is said so far is looked through before each."""
MOST = 0.0005
"""Seconds of CPU that the adapter may add to a call, with what it writes down."""


def lacking() -> str:
    """Why it cannot be measured here, if it cannot."""
    made = venvs.is_made(WANTED, with_package=True)
    return "" if made else "the frameworks of agents are not installed: make components"


def agents(effort: Effort) -> list[Line]:
    """CPU of a call of an agent's, model included, by the adapter less that by the framework's own function tool."""
    python = venvs.python(WANTED, with_package=True)
    env = environment(PYTHONPATH=str(venvs.ROOT))
    found = []
    with (
        server(ours("few")) as target,
        running([python, "-m", "benchmarks.workers.agents", target.url], env=env, piped=True) as worker,
    ):
        told(worker)

        def cost(framework: str, own: bool) -> Callable[[], float]:
            return lambda: float(asked(worker, {"framework": framework, "own": own, "calls": CALLS}))

        for framework in FRAMEWORKS:
            sides = cost(framework, False), cost(framework, True)
            for side in sides:
                side()
            adapter, own = interleave(effort.rounds(21), *sides)
            added = [mine - theirs for mine, theirs in zip(adapter, own, strict=True)]
            name = f"{framework}, a tool call, CPU"
            one = line(f"{name} added", "ms", added, "0.5 ms", [MOST] * len(added), limit=1.0, scale=1e3)
            found += [
                replace(one, ratio=max(one.ratio or 0.0, 0.5)),  # below half of its limit, it makes no difference
                line(name, "ms", adapter, "its own function tool", own, scale=1e3),
            ]
    return found
