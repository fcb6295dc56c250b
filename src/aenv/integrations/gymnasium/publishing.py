"""A Gymnasium environment as one of ours: an author's module calls ``publish``, and nothing else is needed."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from typing import Any

import gymnasium

from aenv.errors import Conflict
from aenv.integrations.gymnasium import spaces
from aenv.models import NOT_JSON, to_json
from aenv.runtime.context import Context
from aenv.runtime.registry import (
    register_function,
    register_reset,
    register_reward,
    register_setup,
    register_teardown,
    register_tool,
)

Make = Callable[..., "gymnasium.Env[Any, Any]"]


def publish(make: Make) -> None:
    """Register tools ``reset`` and ``step``, the reward ``episode_return`` and what trainers ask of an environment.

    ``make`` gives the Gymnasium environment, before an instance is ready. Where it takes an argument, that is the
    instance's ``Context``.
    """
    game = Game(make)
    register_setup(game.start)
    register_teardown(game.stop)
    register_reset(game.restart)
    register_tool(name="reset", input_schema=_RESET)(game.reset)
    register_tool(name="step", input_schema=_STEP)(game.step)
    register_reward(name="episode_return")(game.episode_return)
    for name, function in (("reset", game.reset), ("step", game.step), ("spaces", game.spaces)):
        register_function(name=f"gymnasium_{name}")(function)


_GIVEN = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
_RESET = {
    "type": "object",
    "properties": {
        "seed": {"type": ["integer", "null"], "description": "Makes the episode repeatable."},
        "options": {"type": ["object", "null"], "description": "What the environment takes as options of a reset."},
    },
}
_STEP = {
    "type": "object",
    "properties": {"action": {"description": "A member of the action space: a number, a list, or an object."}},
    "required": ["action"],
}


class Game:
    """The environment of an instance, and how far its episode has come.

    All of it happens on the thread of the event loop: what draws or simulates often wants one thread.
    """

    def __init__(self, make: Make) -> None:
        self._make = make
        self._made: gymnasium.Env[Any, Any] | None = None
        self._total = 0.0
        self._steps = 0
        self._is_over = True

    async def start(self, ctx: Context) -> None:
        """Make the environment."""
        wanted = inspect.signature(self._make).parameters.values()
        takes_context = any(one.default is one.empty and one.kind in _GIVEN for one in wanted)
        self._made = self._make(ctx) if takes_context else self._make()

    async def stop(self) -> None:
        """Close it."""
        made, self._made = self._made, None
        if made is not None:
            made.close()

    @property
    def _env(self) -> gymnasium.Env[Any, Any]:
        if self._made is None:
            raise Conflict("the environment is not made yet")
        return self._made

    async def spaces(self) -> dict[str, Any]:
        """The spaces of observations and actions."""
        return {
            "observation": spaces.told(self._env.observation_space),
            "action": spaces.told(self._env.action_space),
        }

    async def restart(self, seed: int | None = None) -> dict[str, Any]:
        """Begin a new episode, as ``Environment.reset`` wants it."""
        return await self.reset(seed)

    async def reset(self, seed: int | None = None, options: dict[str, Any] | None = None) -> dict[str, Any]:
        """Begin a new episode; the first observation."""
        observation, info = self._env.reset(seed=seed, options=options)
        self._total, self._steps, self._is_over = 0.0, 0, False
        return {"observation": self._observed(observation), "info": _plain(info)}

    async def step(self, action: Any) -> dict[str, Any]:
        """Take one action: its reward, the observation after it, and whether the episode is over."""
        if self._is_over:
            raise Conflict("there is no episode under way: call reset")
        given = spaces.taken(self._env.action_space, action)
        observation, reward, terminated, truncated, info = self._env.step(given)
        self._total += float(reward)
        self._steps += 1
        self._is_over = bool(terminated or truncated)
        return {
            "observation": self._observed(observation),
            "reward": float(reward) if math.isfinite(reward) else str(float(reward)),
            "terminated": bool(terminated),
            "truncated": bool(truncated),
            "info": _plain(info),
        }

    async def episode_return(self) -> dict[str, Any]:
        """The sum of the rewards of the episode so far."""
        return {"score": self._total, "steps": self._steps, "over": self._is_over}

    def _observed(self, observation: Any) -> Any:
        return spaces.written(self._env.observation_space, observation)


def _plain(info: dict[str, Any]) -> dict[str, Any]:
    """Of what an environment tells beside, all that JSON can carry."""
    found = {}
    for name, value in info.items():
        given = value.tolist() if hasattr(value, "tolist") else value
        try:
            to_json(given)
        except NOT_JSON:
            continue
        found[str(name)] = given
    return found
