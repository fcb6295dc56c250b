"""Sixteen instances that step at the same time: chance, and a rule of thumb that pushes where the pole leans."""

from collections.abc import Callable
from typing import Any

import numpy

from aenv import Environment
from aenv.integrations.gymnasium import AenvVectorEnv

EPISODES = 48


def returns(envs: AenvVectorEnv, act: Callable[[Any], Any], episodes: int = EPISODES) -> list[float]:
    """What as many episodes came to, one after the other in each instance."""
    found: list[float] = []
    observations, _ = envs.reset(seed=1)
    envs.action_space.seed(1)
    totals = numpy.zeros(envs.num_envs)
    while len(found) < episodes:
        observations, rewards, terminated, truncated, _ = envs.step(act(observations))
        totals += rewards
        over = terminated | truncated
        found += totals[over].tolist()
        totals[over] = 0.0
    return found[:episodes]


def lean(observations: Any) -> Any:
    """Push the cart to the side that the pole falls to."""
    angle, speed = observations[:, 2], observations[:, 3]
    return (angle + speed > 0).astype(int)


def play(env: str | Environment = "cartpole", num_envs: int = 16) -> tuple[float, float]:
    """The mean return of chance, and of the rule."""
    envs = AenvVectorEnv(env, num_envs)
    try:
        chance = numpy.mean(returns(envs, lambda observations: envs.action_space.sample()))
        rule = numpy.mean(returns(envs, lean))
    finally:
        envs.close()
    return float(chance), float(rule)


if __name__ == "__main__":
    chance, rule = play()
    print(f"mean return of {EPISODES} episodes: chance {chance:.0f}, a rule of thumb {rule:.0f}")
