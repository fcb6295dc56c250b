"""Trainings of the examples by three trainers, with several seeds, with and without instances that are lost.

Fails when fewer than two seeds in three learn, or when a row was trained on whose reward is not its own.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks import venvs
from benchmarks.drawing import Panel, picture

TESTS = venvs.ROOT / "tests" / "peers"
IMAGE = venvs.ROOT / "docs" / "images" / "trainings.svg"
SHARES = (0.0, 0.1)
"""Of the episodes, how many lose their instance."""
LITTLE, MUCH = 0.35, 0.6
"""The mean reward of an episode before, at most, and after, at least."""
PATIENCE = 900


class Training(NamedTuple):
    """A program ``SEED SHARE`` that trains an example."""

    title: str
    venv: str
    script: str
    example: str


TRAININGS = (
    Training("PPO of Stable-Baselines3", "sb3", "sb3.py", "05-lights"),
    Training("PPO of RLlib", "ray", "rllib.py", "05-lights"),
    Training("GRPO of TRL", "trl", "trl_keypad.py", "06-keypad"),
)


def soak(seeds: int, *, record: bool) -> int:
    """Train with so many seeds each; ``record`` draws what came of it."""
    failed, panels = [], []
    for training in TRAININGS:
        curves: dict[str, list[list[float]]] = {}
        for share in SHARES:
            name = f"{share:.0%} lost" if share else "none lost"
            found = [_trained(training, seed, share) for seed in range(1, seeds + 1)]
            curves[name] = [one["curve"] for one in found]
            for seed, one in enumerate(found, 1):
                print(
                    f"{training.title}, seed {seed}, {name}: {one['before']:.2f} to {one['after']:.2f}, "
                    f"{one['rows']} rows, {one['wrong']} wrong, {one['lost']} instances lost",
                    flush=True,
                )
            learned = sum(one["before"] < LITTLE and one["after"] >= MUCH for one in found)
            if 3 * learned < 2 * seeds or any(one["wrong"] for one in found):
                failed.append(f"{training.title}, {name}: {learned} of {seeds} seeds learned")
        steps = min(len(curve) for lines in curves.values() for curve in lines)
        cut = {name: [line[:steps] for line in lines] for name, lines in curves.items()}
        panels.append(Panel(f"{training.title}: mean reward", range(1, steps + 1), cut))
    if record:
        IMAGE.write_text(picture("Mean reward of an episode, update by update", panels, across=3))
    print("\n".join(failed), file=sys.stderr)
    return 1 if failed else 0


def _trained(training: Training, seed: int, share: float) -> dict[str, Any]:
    wanted = TESTS / "requirements" / f"{training.venv}.txt"
    with tempfile.TemporaryDirectory(prefix="aenv-training-") as top:
        folder = shutil.copytree(venvs.ROOT / "examples" / training.example, Path(top, "example"))
        done = subprocess.run(
            [venvs.python(wanted, with_package=True), TESTS / "scripts" / training.script, str(seed), str(share)],
            cwd=folder,
            env={**os.environ, "AENV_HOME": f"{top}/home", "HOME": top, "PYTHONPATH": str(folder)},
            stdout=subprocess.PIPE,
            timeout=PATIENCE,
            check=True,
        )
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found
