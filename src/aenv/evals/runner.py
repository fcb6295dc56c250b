"""One evaluation from a program: the tasks, the agent, and what came of it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from aenv.client.environment import Environment
from aenv.evals.agents import agent as agent_named
from aenv.evals.results import Evaluation
from aenv.evals.statistics import PASSED
from aenv.evals.tasksets import Taskset
from aenv.rl.playing import Agent, agent_name, template
from aenv.rl.rules import Rules
from aenv.rl.runs import Asked, Run

LIMITS = ("max_turns", "turn_timeout", "episode_timeout", "score_late")
"""Of the rules, what an episode depends on beside its rewards."""
REUSED = 32
"""Episodes that an instance plays, where each is begun by a reset that is told the task."""


async def evaluate(
    env: str | Environment,
    agent: str | Agent,
    tasks: Taskset | None = None,
    *,
    n: int = 1,
    seed: int = 0,
    rules: Rules | None = None,
    reuse: int | None = None,
    threshold: float = PASSED,
    ks: Sequence[int] = (),
    folder: str | Path | None = None,
    resume: bool = False,
    **how: Any,
) -> Evaluation:
    """Play ``n`` episodes of each task, and work out what they are worth.

    ``agent`` is a name as ``aenv eval --agent`` takes it, or an agent. ``tasks`` are those that the environment
    tells, when none are given. ``reuse`` is how many episodes an instance plays; 32 when nothing is said and the
    environment's reset is told the task. Trajectories are kept in ``folder``, if given; with ``resume``, what has
    ended there is not played again. ``how`` are further arguments of ``aenv.rl.rollouts``.
    """
    made = template(env)
    taskset = tasks if tasks is not None else await Taskset.load(made)
    player = agent_named(agent) if isinstance(agent, str) else agent
    rules = rules or Rules()
    reuse = reuse or reusable(taskset)
    asked = asking(taskset, agent if isinstance(agent, str) else agent_name(agent), n, seed, rules, reuse=reuse)
    with TemporaryDirectory(prefix="aenv-eval-") as temporary:
        with Run.open(Path(folder or temporary), asked, resume=resume) as run:
            await run.play(made, player, taskset.tasks, rules=rules, reuse=reuse, **how)
            return evaluated(run, taskset, threshold=threshold, ks=ks)


def reusable(taskset: Taskset) -> int:
    """How many episodes an instance plays, when nobody says: several, where its reset is told which task it is."""
    return REUSED if all(task.reset for task in taskset) else 1


def asking(taskset: Taskset, agent: str, n: int, seed: int, rules: Rules, **settings: Any) -> Asked:
    """What must be the same for an evaluation to be gone on with."""
    about = {"source": str(taskset.source), "selection": dict(taskset.selection)}
    limits = {name: getattr(rules, name) for name in LIMITS}
    known = {"taskset": {name: value for name, value in about.items() if value}, **limits, **settings}
    return Asked(
        env=taskset.env,
        agent=agent,
        tasks=taskset.digest,
        n=n,
        seed=seed,
        rewards={reward.key: reward.weight for reward in rules.taken},
        settings={name: value for name, value in known.items() if value},
    )


def evaluated(run: Run, taskset: Taskset, *, threshold: float, ks: Sequence[int]) -> Evaluation:
    """What a run came to."""
    order = [task.id for task in taskset]
    return Evaluation(run.about.asked, run.trajectories(), threshold=threshold, ks=ks, order=order)
