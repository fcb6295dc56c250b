"""Instances as a vector of environments for Stable-Baselines3: ``PPO("MlpPolicy", AenvVecEnv("NAME", 8))``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy
from gymnasium.vector import AutoresetMode
from stable_baselines3.common.vec_env import VecEnv

from aenv.client.environment import Environment
from aenv.client.sync import wait
from aenv.errors import Unsupported
from aenv.integrations.checking import ENV, LOOK, TASK, WRITE, judge, lose
from aenv.integrations.gymnasium.envs import AenvVectorEnv
from aenv.integrations.gymnasium.faces import Face, Tools
from aenv.integrations.gymnasium.players import RETRIES


class AenvVecEnv(VecEnv):
    """Instances of one environment that step at the same time, and begin anew by themselves.

    There is no mask in Stable-Baselines3: an episode whose instance is lost goes on in another, or the failure is
    raised out of ``learn``. No row of what failed is ever trained on.
    """

    def __init__(
        self,
        env: str | Environment,
        num_envs: int,
        faces: Sequence[Face] | None = None,
        *,
        retries: int = RETRIES,
        per_instance: int = 1,
    ) -> None:
        """As ``AenvVectorEnv`` takes them."""
        mode = AutoresetMode.SAME_STEP
        self._envs = AenvVectorEnv(
            env, num_envs, faces, autoreset_mode=mode, retries=retries, per_instance=per_instance
        )
        self.render_mode = None
        self._actions: Any = None
        super().__init__(num_envs, self._envs.single_observation_space, self._envs.single_action_space)

    @property
    def instances(self) -> list[Environment]:
        """The instances at the moment."""
        return self._envs.instances

    def reset(self) -> Any:
        """Begin an episode in each, with the seeds that were given to ``seed``."""
        options = next((given for given in self._options if given), None)
        observations, infos = self._envs.reset(seed=self._seeds, options=options)
        self.reset_infos = [_of(infos, place) for place in range(self.num_envs)]
        self._reset_seeds()
        self._reset_options()
        return observations

    def step_async(self, actions: Any) -> None:
        """What is to be done in each."""
        self._actions = actions

    def step_wait(self) -> Any:
        """Do it. Where an episode is over, the observation is the first of the next one."""
        observations, rewards, terminated, truncated, found = self._envs.step(self._actions)
        infos = []
        for place in range(self.num_envs):
            info = _of(found, place)
            if terminated[place] or truncated[place]:
                info = {**info.pop("final_info", {}), "terminal_observation": info.pop("final_obs")}
            info["TimeLimit.truncated"] = bool(truncated[place] and not terminated[place])
            infos.append(info)
        return observations, rewards.astype(numpy.float32), terminated | truncated, infos

    def close(self) -> None:
        """Give all instances back."""
        self._envs.close()

    def get_attr(self, attr_name: str, indices: Any = None) -> list[Any]:
        """What all of them have in common."""
        return [getattr(self, attr_name) for _ in self._get_indices(indices)]

    def set_attr(self, attr_name: str, value: Any, indices: Any = None) -> None:
        """They are in sandboxes, where nothing can be set from here."""
        raise Unsupported(f"{attr_name!r} cannot be set in a sandbox")

    def env_method(self, method_name: str, *args: Any, indices: Any = None, **kwargs: Any) -> list[Any]:
        """They are in sandboxes, whose methods cannot be called from here."""
        raise Unsupported(f"{method_name!r} cannot be called in a sandbox", hint="register a function, and call that")

    def env_is_wrapped(self, wrapper_class: Any, indices: Any = None) -> list[bool]:
        """None of them is wrapped here."""
        return [False for _ in self._get_indices(indices)]


def check() -> str:
    """Play two episodes at a time, one of which loses its instance on the way."""
    envs = AenvVecEnv(ENV, 2, [Tools(TASK, max_steps=2) for _ in range(2)])
    try:
        envs.reset()
        envs.step((WRITE, WRITE))
        before = envs.instances[0].instance_id
        wait(lose(envs.instances[0]))
        _, rewards, _, _ = envs.step((LOOK, LOOK))
        return judge(min(rewards), before, envs.instances[0].instance_id)
    finally:
        envs.close()


def _of(infos: dict[str, Any], place: int) -> dict[str, Any]:
    """What a vector tells of one."""
    found = {}
    for name, values in infos.items():
        told = infos.get(f"_{name}")
        if told is not None and told[place]:
            found[name] = _of(values, place) if isinstance(values, dict) else values[place]
    return found
