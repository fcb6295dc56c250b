"""A Gymnasium environment as one of ours: an author's module calls ``publish``, and nothing else is needed."""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Callable
from typing import Any, Literal

import gymnasium

from aenv.errors import AEnvError, AuthorError, Conflict, Invalid
from aenv.integrations.gymnasium import spaces
from aenv.integrations.published import register, steps, with_context
from aenv.runtime.context import Context
from aenv.runtime.functions import Raised

Make = Callable[..., "gymnasium.Env[Any, Any]"]
log = logging.getLogger("aenv.integrations")
MOST_SEATS = 1024
"""Environments in one instance."""
_LONG = 0.002
"""Seconds of moves after which others have their turn."""


def publish(make: Make) -> None:
    """Register tools ``reset`` and ``step``, the reward ``episode_return`` and what trainers ask of an environment.

    ``make`` gives the Gymnasium environment, before an instance is ready. Where it takes an argument, that is the
    instance's ``Context``. It is called once more for each further environment that a trainer wants in one instance.
    """
    seats = Seats(make)
    action = {"description": "A member of the action space: a number, a list, or an object."}
    tools = steps(seats, action, "What the environment takes as options of a reset.")
    register(seats, tools, seats.episode_return, {"gymnasium_spaces": seats.spaces, "gymnasium_play": seats.play})


class Seats:
    """The environments of an instance, each with an episode of its own. The first is that of the tools and the reward.

    All of it happens on the thread of the event loop: what draws or simulates often wants one thread.
    """

    def __init__(self, make: Make) -> None:
        self._make = make
        self._games: dict[int, Game] = {}
        self._turn = asyncio.Lock()

    async def start(self, ctx: Context) -> None:
        """Make the first environment."""
        self._make = with_context(self._make, ctx)
        self._game(0)

    async def stop(self) -> None:
        """Close all."""
        games, self._games = self._games, {}
        for game in games.values():
            game.close()

    async def spaces(self) -> dict[str, Any]:
        """The spaces of observations and actions."""
        return self._game(0).spaces()

    async def restart(self, seed: int | None = None) -> dict[str, Any]:
        """Begin a new episode, as ``Environment.reset`` wants it."""
        return self._game(0).reset(seed)

    async def reset(self, seed: int | None = None, options: dict[str, Any] | None = None) -> dict[str, Any]:
        """Begin a new episode; the first observation."""
        return self._game(0).reset(seed, options)

    async def step(self, action: Any) -> dict[str, Any]:
        """Take one action: its reward, the observation after it, and whether the episode is over."""
        return self._game(0).step(action)

    async def episode_return(self) -> dict[str, Any]:
        """The sum of the rewards of the episode so far."""
        return self._game(0).episode_return()

    async def play(self, moves: list[tuple[int, Literal["reset", "step"], Any]]) -> list[dict[str, Any]]:
        """What comes of each move: ``[seat, "reset", {"seed": ..., "options": ...}]`` or ``[seat, "step", action]``.

        Of several, one that fails is answered with its ``error``, and the others are made.
        """
        async with self._turn:  # those of a caller who has gone are made before those of the next
            if len(moves) == 1:
                return [self._moved(*moves[0])]
            found, since = [], time.monotonic()
            for move in moves:
                try:
                    found.append(self._moved(*move))
                except Exception as exc:
                    found.append({"error": _failure(exc).to_wire()})
                if time.monotonic() - since > _LONG:  # whether the instance is well can be asked meanwhile
                    await asyncio.sleep(0)
                    since = time.monotonic()
            return found

    def _moved(self, seat: int, kind: Literal["reset", "step"], given: Any) -> dict[str, Any]:
        game = self._game(seat)
        return game.reset(**given) if kind == "reset" else game.step(given)

    def _game(self, seat: int) -> Game:
        game = self._games.get(seat)
        if game is None:
            if not 0 <= seat < MOST_SEATS:
                raise Invalid(f"there is no environment {seat} in an instance", hint=f"they are 0 to {MOST_SEATS - 1}")
            game = self._games[seat] = Game(self._make())
        return game


class Game:
    """One environment, and how far its episode has come."""

    def __init__(self, env: gymnasium.Env[Any, Any]) -> None:
        self._env = env
        self._total = 0.0
        self._steps = 0
        self._is_over = True

    def close(self) -> None:
        self._env.close()

    def spaces(self) -> dict[str, Any]:
        return {
            "observation": spaces.told(self._env.observation_space),
            "action": spaces.told(self._env.action_space),
        }

    def reset(self, seed: int | None = None, options: dict[str, Any] | None = None) -> dict[str, Any]:
        observation, info = self._env.reset(seed=seed, options=options)
        self._total, self._steps, self._is_over = 0.0, 0, False
        return {"observation": self._observed(observation), "info": spaces.plain(info)}

    def step(self, action: Any) -> dict[str, Any]:
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
            "info": spaces.plain(info),
        }

    def episode_return(self) -> dict[str, Any]:
        return {"score": self._total, "steps": self._steps, "over": self._is_over}

    def _observed(self, observation: Any) -> Any:
        return spaces.written(self._env.observation_space, observation)


def _failure(exc: Exception) -> AEnvError:
    """What is told of a move that failed."""
    if isinstance(exc, (Invalid, Conflict)):
        return exc
    raised = Raised(exc)
    log.warning("a move failed\n%s", raised.details())
    return AuthorError(f"the environment raised {raised.summary}")
