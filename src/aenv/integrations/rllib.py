"""Instances as an environment for RLlib: ``PPOConfig().environment(register("NAME"))``."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from gymnasium import VectorizeMode
from gymnasium.spaces import Discrete
from ray.rllib.algorithms.algorithm_config import AlgorithmConfig
from ray.rllib.env.single_agent_env_runner import SingleAgentEnvRunner
from ray.tune.registry import register_env

from aenv.client.environment import Environment
from aenv.integrations.checking import ENV, TASK, WRITE, judge, lose
from aenv.integrations.gymnasium.envs import AenvEnv, AenvVectorEnv
from aenv.integrations.gymnasium.faces import Face, Seen, Tools
from aenv.integrations.gymnasium.instances import Instance
from aenv.integrations.gymnasium.players import RETRIES


def register(
    name: str, env: str | Environment | None = None, *, face: Callable[[], Face] | None = None, retries: int = RETRIES
) -> str:
    """Let RLlib know an environment by a name, which is its own where ``env`` is not given; the name.

    ``face`` makes how an instance is looked at; the rest is as in ``AenvEnv``.

    There is no mask in RLlib: an episode whose instance is lost goes on in another, or the failure is raised in the
    ``EnvRunner``, which drops what it has of the episode.
    """

    def create(config: Mapping[str, Any]) -> AenvEnv | AenvVectorEnv:
        """One instance, or as many as RLlib wants to step at the same time."""
        many = config.get("num_envs")
        if many is None:
            return AenvEnv(env or name, face() if face else None, retries=retries)
        return AenvVectorEnv(env or name, many, [face() for _ in range(many)] if face else None, retries=retries)

    register_env(name, create)
    return name


def check() -> str:
    """Let an ``EnvRunner`` play in two instances at a time, which are lost on the way."""
    config = AlgorithmConfig().environment(register("aenv-check", ENV, face=_Note))
    config.env_runners(
        num_env_runners=0, num_envs_per_env_runner=2, gym_env_vectorize_mode=VectorizeMode.VECTOR_ENTRY_POINT
    )
    runner = SingleAgentEnvRunner(config=config)
    try:
        envs = runner.env.unwrapped
        before = envs.instances[0].instance_id
        episodes = runner.sample(num_episodes=2, random_actions=True)
        return judge(min(episode.get_return() for episode in episodes), before, envs.instances[0].instance_id)
    finally:
        runner.stop()


class _Note(Tools):
    """There is one action, which does the task, and an instance that is lost before it is taken again."""

    def __init__(self) -> None:
        super().__init__(TASK, max_steps=2)
        self._has_lost = False

    async def meet(self, env: Instance) -> None:
        await super().meet(env)
        self.observation_space = self.action_space = Discrete(1)

    async def begin(self, env: Instance, seen: Any = None) -> Seen:
        return (await super().begin(env, seen))._replace(observation=0)

    async def step(self, env: Instance, action: Any) -> Seen:
        if self._steps == 1 and not self._has_lost:
            self._has_lost = True
            await lose(env)
        return (await super().step(env, WRITE))._replace(observation=0)
