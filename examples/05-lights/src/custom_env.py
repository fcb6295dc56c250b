"""A panel of lights: one is on, and pressing the button below it is right. Small enough to be learned in seconds."""

from typing import Any

import gymnasium
import numpy
from gymnasium import spaces

from aenv.integrations.gymnasium import publish

LIGHTS, PRESSES = 4, 8


class Lights(gymnasium.Env[Any, Any]):
    """Eight presses an episode. Each that is right is worth an eighth, so an episode is worth 1 at most."""

    observation_space = spaces.Box(0.0, 1.0, (LIGHTS,), numpy.float32)
    action_space = spaces.Discrete(LIGHTS)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        super().reset(seed=seed)
        self.left = PRESSES
        return self._next(), {}

    def step(self, action: Any) -> Any:
        right = int(action) == self.on
        self.left -= 1
        return self._next(), right / PRESSES, self.left == 0, False, {}

    def _next(self) -> Any:
        self.on = int(self.np_random.integers(LIGHTS))
        return numpy.eye(LIGHTS, dtype=numpy.float32)[self.on]


publish(Lights)
