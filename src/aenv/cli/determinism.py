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


_NO_TASK = ("invalid", "reset")
"""How an episode fails without a task, where the reset has to be told which."""
_FIX_RESET = "have @register_reset put back all that a tool changes, files among it, or play with reuse=1"


def determinism_checks(found: Project, startup_timeout: float, episodes: Path | None) -> list[Check]:
    """Two episodes of one seed, or recorded ones twice; and two in one instance, where it can be reset.

    Each time has an event loop of its own, and with it an engine and an interpreter of its own: what only two forks
    of one process have in common, such as the order of a set, is not taken for the seed's doing.
    """
    recorded = None if episodes is None else _read(episodes)
    with chdir(found.root):  # from where the project is found by its name
        try:
            if recorded is not None:
                return [_replayed(recorded, [run_async(_replay(found, startup_timeout, recorded)) for _ in range(2)])]
            played = [run_async(_exercise(found, startup_timeout)) for _ in range(2)]
            checks = [_exercised(played)]
            if checks[0].status == "ok" and played[0].provenance.reset:
                checks.append(_reused(played[0], run_async(_exercise_again(found, startup_timeout))))
            return checks
        except AEnvError as exc:
            return [Check("determinism", "fail", f"nothing could be compared: {exc.message}", exc.hint or "")]


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
        if trajectory.failure is not None and (trajectory.failure.kind, trajectory.failure.phase) == _NO_TASK:
            detail = (
                f"nothing was compared, since only its tasks know what its reset takes: {trajectory.failure.reason}"
            )
            return Check("determinism", "warn", detail, "give recorded episodes: --episode")
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


async def _exercise_again(found: Project, startup_timeout: float) -> Trajectory:
    """The second of two episodes in one instance, of which the first has another seed."""
    from aenv.rl.batches import rollouts
    from aenv.rl.exercising import RULES, exercise
    from aenv.rl.tasks import Task

    tasks = [Task(id="first", seed=SEED + 1), Task(id="second", seed=SEED)]
    async with rollouts(*(_like(found, startup_timeout), exercise, tasks), rules=RULES, concurrency=1, reuse=2) as run:
        return [trajectory async for trajectory in run][-1]


def _reused(new: Trajectory, second: Trajectory) -> Check:
    """Whether an instance that has played plays as a new one does."""
    from aenv.rl.exercising import differing

    if second.failure is not None or not second.provenance.earlier:
        detail = f"no second episode was played in one instance: {second.failure or 'the first was not scored'}"
        return Check("reuse", "warn", detail, _FIX_RESET)
    if difference := differing(new, second):
        detail = f"after its reset, an instance plays otherwise than a new one:\n{difference}"
        return Check("reuse", "warn", detail, _FIX_RESET)
    return Check("reuse", "ok", "after its reset, an instance plays as a new one does")


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
