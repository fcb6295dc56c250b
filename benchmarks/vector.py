"""What steps of 64 environments cost that go on together: ours beside OpenEnv's sessions and Gymnasium's processes."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from statistics import median

from benchmarks import owners, venvs
from benchmarks.measure import Effort, Line, interleave, line, rate
from benchmarks.processes import OURS, asked, environment, running, told
from benchmarks.rollouts import openenv

ENVS, STEPS, SHARED = 64, 100, 32
CARTPOLE = venvs.ROOT / "examples" / "04-cartpole"
MOST_OPENENV, MOST_GYMNASIUM, MOST_STEP = 1 / 3, 4.0, 0.0003
WELL = (2.0, 0.25, 0.4, 0.5)
"""Ratios, line by line, below which it makes no difference: what is held is that they do not come near their limits."""
_NAME = f"{ENVS} environments at once, {SHARED} an instance, steps"
_ALONE = f"{ENVS} environments at once, an instance each, steps"


def vector(effort: Effort) -> list[Line]:
    """Steps of 64 environments, each waiting for all, beside the same on OpenEnv, and in Gymnasium's processes.

    OpenEnv's sessions share one process; ours share two isolated instances, or have one each. Gymnasium's environments
    have a process each, and nothing around it.
    """
    with ExitStack() as stack:

        def side(*command: str | Path, python: Path = OURS, steps: int = STEPS) -> Callable[[], dict[str, float]]:
            env = environment(PYTHONPATH=f"{venvs.ROOT}:{venvs.ROOT / 'src'}", **stood)
            process = stack.enter_context(running([python, "-m", *command], cwd=CARTPOLE, env=env, piped=True))
            told(process)  # that it is ready
            return lambda: _stepped(process, steps)

        stood = {"AENV_HOME": str(stack.enter_context(owners.new_home())), "AENV_ISOLATION": "strict"}
        peer = venvs.peer("openenv")
        sides = [
            side("benchmarks.workers.vector", str(SHARED)),
            side("benchmarks.workers.vector", "1", steps=STEPS // 5),
            side("benchmarks.workers.vector"),
            *(
                side("benchmarks.workers.openenv_vector", stack.enter_context(openenv(*mode, "cartpole")), python=peer)
                for mode in ((), ("tuned",))
            ),
        ]
        for warm in sides:
            warm()
        ours, alone, gymnasium, as_made, tuned = interleave(effort.rounds(9), *sides)

    def wall(samples: list[dict[str, float]]) -> list[float]:
        return [each["wall"] for each in samples]

    cpu = [each["cpu"] for each in ours]
    lines = [
        rate(_NAME, wall(ours), "Gymnasium's AsyncVectorEnv", wall(gymnasium), limit=MOST_GYMNASIUM),
        rate(f"{_NAME} (OpenEnv)", wall(ours), "OpenEnv", wall(as_made), limit=MOST_OPENENV),
        rate(f"{_NAME} (OpenEnv, tuned)", wall(ours), "OpenEnv, tuned", wall(tuned), limit=None),
        line(f"{_NAME}, CPU a step", "µs", cpu, "300 µs", [MOST_STEP] * len(cpu), limit=1.0, scale=1e6),
    ]
    each = Line(_ALONE, "calls/s", 1 / median(wall(alone)))
    return [*(replace(one, ratio=max(one.ratio or 0.0, WELL[place])) for place, one in enumerate(lines)), each]


def _stepped(process: subprocess.Popen[bytes], steps: int) -> dict[str, float]:
    """Seconds of a step of one environment."""
    found: dict[str, float] = asked(process, {"steps": steps})
    return {name: seconds / (ENVS * steps) for name, seconds in found.items()}
