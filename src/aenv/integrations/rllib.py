"""Instances as an environment for RLlib: ``PPOConfig().environment(register("NAME"))``."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from ray.tune.registry import register_env

from aenv.client.environment import Environment
from aenv.integrations.gymnasium.envs import AenvEnv, AenvVectorEnv
from aenv.integrations.gymnasium.faces import Face
from aenv.integrations.gymnasium.players import RETRIES


def register(
    name: str, env: str | Environment | None = None, *, face: Callable[[], Face] | None = None, retries: int = RETRIES
) -> str:
    """Let RLlib know an environment by a name, which is its own where ``env`` is not given; the name.

    ``face`` makes how an instance is looked at; the rest is as in ``AenvEnv``.
    """

    def create(config: Mapping[str, Any]) -> Any:
        """One instance, or as many as RLlib wants to step at the same time."""
        many = config.get("num_envs")
        if many is None:
            return AenvEnv(env or name, face() if face else None, retries=retries)
        return AenvVectorEnv(env or name, many, [face() for _ in range(many)] if face else None, retries=retries)

    register_env(name, create)
    return name
