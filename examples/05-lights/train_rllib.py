"""PPO of RLlib: an actor of Ray's plays in eight instances that step at the same time."""

import os
import sys
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")  # the network is small, and threads would only wait for each other

import ray
from gymnasium import VectorizeMode
from ray.rllib.algorithms.ppo import PPOConfig

from aenv.integrations.rllib import register

STEPS, BATCH = 8192, 512


def config(name: str, seed: int) -> Any:
    """What is trained, and how."""
    return (
        PPOConfig()
        .environment(name)
        .env_runners(
            num_env_runners=1,
            num_envs_per_env_runner=8,
            gym_env_vectorize_mode=VectorizeMode.VECTOR_ENTRY_POINT,  # all instances step at the same time
            rollout_fragment_length="auto",
        )
        .training(lr=3e-3, train_batch_size_per_learner=BATCH, minibatch_size=128, num_epochs=10)
        .reporting(metrics_num_episodes_for_smoothing=64)
        .debugging(seed=seed)
    )


def train(seed: int = 1, name: str = "") -> list[float]:
    """The mean reward of an episode, before each update."""
    algorithm = config(name or register("lights"), seed).build_algo()
    try:
        return [algorithm.train()["env_runners"]["episode_return_mean"] for _ in range(STEPS // BATCH)]
    finally:
        algorithm.stop()


if __name__ == "__main__":
    ray.init(num_cpus=2, include_dashboard=False, object_store_memory=2**27, log_to_driver=False)
    try:
        curve = train(int(sys.argv[1]) if len(sys.argv) > 1 else 1)
    finally:
        ray.shutdown()
    print(f"mean reward of an episode: {curve[0]:.2f} before, {curve[-1]:.2f} after {STEPS} steps")
    print(curve)
