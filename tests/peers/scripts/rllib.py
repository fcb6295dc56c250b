"""RLlib on instances of ours: ``rllib.py SEED SHARE`` trains the example, while that share of episodes loses its
instance on the way; ``rllib.py drops`` lets RLlib drop them."""

import contextlib
import importlib.util
import json
import os
import random
import sys
from pathlib import Path
from typing import Any, ClassVar

os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy
import ray
from ray.rllib.algorithms.ppo.torch.ppo_torch_learner import PPOTorchLearner

from aenv import AEnvError
from aenv.integrations.gymnasium import Published
from aenv.integrations.rllib import register

PRESSES = 8
LOST = Path("../lost").resolve()
"""Beside the project: a change in it would have it imported anew."""


def example() -> Any:
    """The example's module, in whose folder this runs."""
    spec = importlib.util.spec_from_file_location("train_rllib", Path("train_rllib.py"))
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class Rows(PPOTorchLearner):
    """Looks at every row that is trained on: its reward is that of its observation and its action."""

    rows = wrong = 0
    curve: ClassVar[list[float]] = []

    def update(self, *, training_data: Any, **kwargs: Any) -> Any:
        rewards = numpy.concatenate([episode.get_rewards() for episode in training_data.episodes])
        Rows.curve.append(float(rewards.mean()) * PRESSES)
        for episode in training_data.episodes:
            right = episode.get_observations()[:-1].argmax(axis=-1) == episode.get_actions()
            Rows.rows += len(right)
            Rows.wrong += int((episode.get_rewards() != right / PRESSES).sum())
        return super().update(training_data=training_data, **kwargs)


def losing(share: float, seed: int) -> Any:
    """What lets that share of episodes lose its instance, each before one of its steps, in the process of an actor."""

    def lose(**_: Any) -> None:
        if hasattr(Published, "losing"):
            return
        step, draw = Published.step, random.Random(seed)

        async def lossy(face: Published, env: Any, action: Any) -> Any:
            if draw.random() < share / PRESSES:
                with LOST.open("a") as lost:
                    lost.write(".")
                with contextlib.suppress(AEnvError):
                    await env.exec("kill -9 $PPID")
            return await step(face, env, action)

        Published.step = lossy  # type: ignore[method-assign]
        Published.losing = True  # type: ignore[attr-defined]

    return lose


def train(seed: int, share: float) -> dict[str, Any]:
    return trained(example(), register("lights"), seed, share)


def drops() -> dict[str, Any]:
    """Without a way back, RLlib drops what it has of a fragment, and begins it anew."""
    module = example()
    module.STEPS = 2 * module.BATCH
    return trained(module, register("lights", retries=0), 1, 0.03, restart_failed_sub_environments=True)


def trained(module: Any, name: str, seed: int, share: float, **tolerance: Any) -> dict[str, Any]:
    config = module.config(name, seed).learners(learner_class=Rows).fault_tolerance(**tolerance)
    config.callbacks(on_environment_created=losing(share, seed))
    config.env_runners(rollout_fragment_length=PRESSES if tolerance else "auto")
    before, after = module.train(config)
    lost = len(LOST.read_text()) if LOST.exists() else 0
    told = {"before": before, "after": after, "lost": lost, "rows": Rows.rows, "wrong": Rows.wrong}
    return {**told, "curve": Rows.curve}


if __name__ == "__main__":
    ray.init(num_cpus=2, include_dashboard=False, object_store_memory=2**27, log_to_driver=False)
    try:
        found = drops() if sys.argv[1] == "drops" else train(int(sys.argv[1]), float(sys.argv[2]))
    finally:
        ray.shutdown()
    print(json.dumps(found))
