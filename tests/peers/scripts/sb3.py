"""Stable-Baselines3 on instances of ours: ``sb3.py SEED SHARE`` trains the example, while so many episodes of a hundred
lose their instance on the way; ``sb3.py api`` and ``sb3.py raises`` look at what a trainer gets."""

import contextlib
import importlib.util
import json
import random
import sys
from pathlib import Path
from typing import Any

import numpy
from stable_baselines3 import PPO
from stable_baselines3.common.callbacks import BaseCallback
from stable_baselines3.common.env_checker import check_env

from aenv import AEnvError
from aenv.integrations.gymnasium import AenvEnv, Published
from aenv.integrations.stable_baselines3 import AenvVecEnv

PRESSES = 8
lost = 0


def example() -> Any:
    """The example's module, in whose folder this runs."""
    spec = importlib.util.spec_from_file_location("train_sb3", Path("train_sb3.py"))
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def lose(share: float, seed: int) -> None:
    """Let that share of episodes lose its instance, each before one of its steps."""
    step, draw = Published.step, random.Random(seed)

    async def lossy(face: Published, env: Any, action: Any) -> Any:
        global lost
        if draw.random() < share / PRESSES:
            lost += 1
            with contextlib.suppress(AEnvError):
                await env.exec("kill -9 $PPID")
        return await step(face, env, action)

    Published.step = lossy  # type: ignore[method-assign]


class Rows(BaseCallback):
    """Looks at every row that is trained on: its reward is that of its observation and its action."""

    def __init__(self) -> None:
        super().__init__()
        self.rows = self.wrong = 0
        self.curve: list[float] = []

    def _on_step(self) -> bool:
        return True

    def _on_rollout_end(self) -> None:
        buffer = self.model.rollout_buffer
        right = buffer.observations.argmax(axis=-1) == buffer.actions[..., 0]
        self.rows += buffer.rewards.size
        self.curve.append(float(buffer.rewards.mean()) * PRESSES)
        self.wrong += int((buffer.rewards != right / numpy.float32(PRESSES)).sum())


def train(seed: int, share: float) -> dict[str, Any]:
    lose(share, seed)
    rows = Rows()
    before, after = example().train(seed=seed, callback=rows)
    return {"before": before, "after": after, "lost": lost, "rows": rows.rows, "wrong": rows.wrong, "curve": rows.curve}


def api() -> dict[str, Any]:
    one = AenvEnv("lights")
    check_env(one)
    one.close()
    envs = AenvVecEnv("lights", 3)
    envs.seed(7)
    first = envs.reset()
    again = []
    for _ in range(2):
        envs.seed(7)
        again.append(envs.reset())
    assert (first == again[0]).all()
    assert (first == again[1]).all()
    for press in range(PRESSES):
        observations, rewards, over, infos = envs.step(numpy.zeros(3, dtype=int))
        assert over.tolist() == [press == PRESSES - 1] * 3
        assert all(("terminal_observation" in info) == (press == PRESSES - 1) for info in infos)
        assert not any(info["TimeLimit.truncated"] for info in infos)
    assert observations.shape == (3, 4)
    assert rewards.dtype == numpy.float32
    assert infos[0]["terminal_observation"].shape == (4,)
    assert envs.env_is_wrapped(object) == [False] * 3
    assert envs.get_attr("num_envs", 1) == [3]
    refused = []
    for ask in (lambda: envs.set_attr("left", 3), lambda: envs.env_method("reset")):
        try:
            ask()
        except AEnvError as exc:
            refused.append(exc.code)
    envs.close()
    return {"refused": refused}


def raises() -> dict[str, Any]:
    """Without a way back, a failure ends the training."""
    lose(0.5, 1)
    envs = AenvVecEnv("lights", 4, retries=0)
    try:
        PPO("MlpPolicy", envs, n_steps=64, device="cpu").learn(1024)
    except AEnvError as exc:
        return {"raised": exc.code}
    finally:
        envs.close()
    return {}


if __name__ == "__main__":
    what = sys.argv[1]
    found = api() if what == "api" else raises() if what == "raises" else train(int(what), float(sys.argv[2]))
    print(json.dumps(found))
