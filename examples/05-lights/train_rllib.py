"""PPO of RLlib: an actor of Ray's plays in eight instances that step at the same time."""

import os
import sys

os.environ.setdefault("OMP_NUM_THREADS", "1")  # the network is small, and threads would only wait for each other

import ray
from gymnasium import VectorizeMode
from ray.rllib.algorithms.ppo import PPOConfig

from aenv.integrations.rllib import register

STEPS, BATCH = 4096, 512


def config(name: str, seed: int = 1) -> PPOConfig:
    """What is trained, and how."""
    return (
        PPOConfig()
        .environment(name)
        .env_runners(
            num_env_runners=1,
            num_envs_per_env_runner=8,
            gym_env_vectorize_mode=VectorizeMode.VECTOR_ENTRY_POINT,
        )
        .training(lr=3e-3, train_batch_size_per_learner=BATCH, minibatch_size=128, num_epochs=10)
        .reporting(metrics_num_episodes_for_smoothing=BATCH // 8)
        .debugging(seed=seed)
    )


def train(given: PPOConfig) -> tuple[float, float]:
    """The mean reward of an episode before the first update, and before the last."""
    algorithm = given.build_algo()
    try:
        curve = [algorithm.train()["env_runners"]["episode_return_mean"] for _ in range(STEPS // BATCH)]
    finally:
        algorithm.stop()
    return float(curve[0]), float(curve[-1])


if __name__ == "__main__":
    ray.init(num_cpus=2, include_dashboard=False)
    try:
        before, after = train(config(register("lights"), int(sys.argv[1]) if len(sys.argv) > 1 else 1))
    finally:
        ray.shutdown()
    print(f"mean reward of an episode: {before:.2f} before, {after:.2f} after {STEPS} steps")
