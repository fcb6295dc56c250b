"""PPO of Stable-Baselines3 on eight instances that step at the same time."""

import os
import sys

os.environ.setdefault("OMP_NUM_THREADS", "1")  # the network is small, and threads would only wait for each other

from stable_baselines3 import PPO
from stable_baselines3.common.callbacks import BaseCallback
from stable_baselines3.common.evaluation import evaluate_policy
from stable_baselines3.common.vec_env import VecMonitor

from aenv import Environment
from aenv.integrations.stable_baselines3 import AenvVecEnv

STEPS = 8192


def train(
    env: str | Environment = "lights", seed: int = 1, callback: BaseCallback | None = None
) -> tuple[float, float]:
    """The mean reward of an episode before, and after."""
    envs = VecMonitor(AenvVecEnv(env, 8))
    try:
        model = PPO("MlpPolicy", envs, n_steps=64, batch_size=128, learning_rate=3e-3, seed=seed, device="cpu")
        before, _ = evaluate_policy(model, envs, n_eval_episodes=64, deterministic=False)
        model.learn(STEPS, callback=callback)
        after, _ = evaluate_policy(model, envs, n_eval_episodes=64, deterministic=False)
    finally:
        envs.close()
    return float(before), float(after)


if __name__ == "__main__":
    before, after = train(seed=int(sys.argv[1]) if len(sys.argv) > 1 else 1)
    print(f"mean reward of an episode: {before:.2f} before, {after:.2f} after {STEPS} steps")
