"""A Gymnasium environment of every kind of space, as a project has it: the tests publish it, and play it themselves."""

import os
from typing import Any

import gymnasium
import numpy
from gymnasium import spaces


class Walk(gymnasium.Env[Any, Any]):
    """A walk on a line, with drift. It ends at either side, and is cut short after some steps."""

    observation_space = spaces.Dict(
        {
            "place": spaces.Box(-numpy.inf, numpy.inf, (1,), numpy.float32),
            "picture": spaces.Box(0, 255, (16, 16), numpy.uint8),
            "steps": spaces.Discrete(100),
            "words": spaces.Text(20, min_length=0),
            "pair": spaces.Tuple((spaces.MultiDiscrete([3, 4]), spaces.MultiBinary(5))),
        }
    )
    action_space = spaces.Dict({"way": spaces.Discrete(3, start=-1), "push": spaces.Box(-1, 1, (2,), numpy.float64)})

    def __init__(self, longest: int = 30) -> None:
        self.metadata = {"render_modes": []}
        self.longest = longest
        self.place, self.steps = 0.0, 0

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        super().reset(seed=seed)
        self.place, self.steps = float((options or {}).get("place", 0.0)), 0
        return self._seen(), {"drift": numpy.float32(0.5), "nothing": object()}

    def step(self, action: Any) -> Any:
        self.steps += 1
        self.place += float(action["way"]) + float(action["push"].sum()) + float(self.np_random.normal()) * 0.1
        over = abs(self.place) > 5
        reward = float(numpy.float32(self.place) / 7)
        return self._seen(), reward, over, not over and self.steps >= self.longest, {"steps": self.steps}

    def _seen(self) -> dict[str, Any]:
        picture = numpy.full((16, 16), self.steps, numpy.uint8)
        pair = (numpy.array([self.steps % 3, self.steps % 4]), numpy.array([self.steps % 2] * 5, numpy.int8))
        place = numpy.array([numpy.inf if self.place > 4 else self.place], numpy.float32)
        return {
            "place": place,
            "picture": picture,
            "steps": self.steps % 100,
            "words": "a" * (self.steps % 20),
            "pair": pair,
        }


class Moody(Walk):
    """One that is never twice the same."""

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        return super().reset(seed=int.from_bytes(os.urandom(4)), options=options)
