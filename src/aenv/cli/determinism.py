"""``aenv validate --determinism``: whether an episode is the same when it is run twice with one seed."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import chdir
from pathlib import Path
from typing import TYPE_CHECKING

from aenv.cli.output import Check
from aenv.cli.project import run_async
from aenv.errors import AEnvError

if TYPE_CHECKING:
    from aenv.client.environment import Environment
    from aenv.project import Project
    from aenv.rl.replaying import Replayed
    from aenv.rl.trajectory import Trajectory

SEED = 20_260_101
"""What both episodes are given."""
_FIX = (
    "draw from random, numpy.random or random.Random(ctx.seed), which the seed reaches;\n"
    "sort what comes from sets and directories; leave time and identity out of results"
)


def determinism_check(found: Project, startup_timeout: float, episodes: Path | None) -> Check:
    """Two episodes of one seed, or recorded ones twice.

    Each time has an event loop of its own, and with it an engine and an interpreter of its own: what only two forks
    of one process have in common, such as the order of a set, is not taken for the seed's doing.
    """
    recorded = None if episodes is None else _read(episodes)
    with chdir(found.root):  # from where the project is found by its name
        try:
            if recorded is None:
                return _exercised([run_async(_exercise(found, startup_timeout)) for _ in range(2)])
            return _replayed(recorded, [run_async(_replay(found, startup_timeout, recorded)) for _ in range(2)])
        except AEnvError as exc:
            return Check("determinism", "fail", f"nothing could be compared: {exc.message}", exc.hint or "")


def _like(found: Project, startup_timeout: float) -> Environment:
    """On this machine, whatever platform the settings name: it is the project here that is looked at."""
    from aenv.client.environment import Environment
    from aenv.client.local import embedded

    return Environment(f"{found.name}@{found.version}", startup_timeout=startup_timeout, provision=embedded)


# Without records


async def _exercise(found: Project, startup_timeout: float) -> Trajectory:
    from aenv.rl.exercising import RULES, exercise
    from aenv.rl.playing import rollout

    return await rollout(_like(found, startup_timeout), exercise, None, SEED, rules=RULES)


def _exercised(played: Sequence[Trajectory]) -> Check:
    from aenv.rl.exercising import differing

    first, second = played
    for trajectory in played:
        if trajectory.failure is not None:
            detail = f"nothing could be compared: {trajectory.failure}"
            return Check("determinism", "fail", detail, trajectory.failure.hint or "give episodes that work: --episode")
    if difference := differing(first, second):
        return Check("determinism", "fail", f"two episodes of one seed differ:\n{difference}", _FIX)
    tools = dict.fromkeys(call.name for call in first.calls)
    names = [*(f"tool {name}" for name in tools), *(f"reward {name}" for name in first.answer)]
    return Check(
        "determinism", "ok", f"the same twice, {len(first.calls)} calls: {', '.join(names) or 'nothing to ask'}"
    )


# With records


def _read(path: Path) -> list[Trajectory]:
    from aenv.errors import Invalid
    from aenv.rl.files import read
    from aenv.rl.replaying import is_replayable

    if found := [trajectory for trajectory in read(path) if is_replayable(trajectory)]:
        return found
    raise Invalid(f"{path} has no episode to replay")


async def _replay(found: Project, startup_timeout: float, recorded: Sequence[Trajectory]) -> list[Replayed]:
    from aenv.rl.replaying import replay

    like = _like(found, startup_timeout)
    return [await replay(trajectory, like) for trajectory in recorded]


def _replayed(recorded: Sequence[Trajectory], rounds: Sequence[Sequence[Replayed]]) -> Check:
    for replayed in (one for each in rounds for one in each):
        if replayed.failure is not None:
            detail = f"episode {replayed.id} could not be replayed: {replayed.failure}"
            return Check("determinism", "fail", detail, replayed.failure.hint or "")
        if replayed.difference is not None:
            return Check("determinism", "fail", f"episode {replayed.id} differs:\n{replayed.difference}", _FIX)
    steps = sum(replayed.steps for replayed in rounds[0])
    return Check("determinism", "ok", f"the same twice: {len(recorded)} episodes, {steps} calls")
