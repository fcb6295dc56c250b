"""Rewards of an episode: which are taken, what each weighs, and the one number that comes of them."""

from __future__ import annotations

import asyncio
import inspect
import math
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Protocol

import msgspec

from aenv.errors import AEnvError, AuthorError, Invalid
from aenv.models import NOT_JSON, to_json
from aenv.rl.trajectory import Component, Scored, Trajectory, Turn

Function = Callable[[Any], Any]
"""Gives a number, or a mapping whose ``score`` is one, of a trajectory that has no outcome yet; of a ``Turn`` when it
is taken of every turn. It may be async."""


@dataclass(frozen=True, kw_only=True)
class Reward:
    """One reward: the environment's own of that name, or, with ``function``, one that is worked out here."""

    name: str = ""
    """Empty for the only one that the environment has."""
    weight: float = 1.0
    arguments: Mapping[str, Any] | None = None
    """Given to the environment's reward over those that the task has."""
    function: Function | None = None
    every_turn: bool = False
    """Whether it is taken after every turn; what the episode gets is the sum."""

    def __post_init__(self) -> None:
        if isinstance(self.weight, bool) or not math.isfinite(self.weight):
            raise Invalid(f"the weight of reward {self.key!r} is {self.weight!r}", hint="a weight is a finite number")
        if self.function is not None and self.arguments:
            raise Invalid(f"reward {self.key!r} is a function, which takes no arguments")

    @property
    def key(self) -> str:
        """Its name among the components."""
        return self.name or getattr(self.function, "__name__", "reward")

    @property
    def is_local(self) -> bool:
        """Whether it takes more than the environment and the task."""
        return self.function is not None or bool(self.arguments)


Rewards = str | Reward | Function | Mapping[str, float] | Iterable["str | Reward | Function"] | None
"""What callers may give: a name, names with weights, functions, or any of these in a row. None is the environment's
only one."""


def chosen(given: Rewards) -> tuple[Reward, ...]:
    """The rewards that are meant."""
    if given is None:
        return (Reward(),)
    if isinstance(given, Mapping):
        found = [Reward(name=name, weight=weight) for name, weight in given.items()]
    elif isinstance(given, (str, Reward)) or callable(given):
        found = [_one(given)]
    else:
        found = [_one(part) for part in given]
    if not found:
        raise Invalid("an episode without a reward has no outcome", hint="name a reward, or give a function")
    keys = [reward.key for reward in found]
    if twice := {key for key in keys if keys.count(key) > 1}:
        raise Invalid(f"two rewards are called {', '.join(sorted(twice))}", hint="give each a name of its own")
    return tuple(found)


def _one(given: str | Reward | Function) -> Reward:
    if isinstance(given, Reward):
        return given
    return Reward(name=given) if isinstance(given, str) else Reward(function=given)


class Asked(Protocol):
    """Whoever can be asked for a reward of the environment."""

    async def call_reward(
        self, arguments: Mapping[str, Any] | None = None, name: str | None = None, timeout: float | None = None
    ) -> Any: ...


async def score(trajectory: Trajectory, rewards: Sequence[Reward], env: Asked | None) -> Scored:
    """Take the rewards of an episode whose agent is done. Whatever goes wrong is raised, and no number comes of it."""
    components: dict[str, Component] = {}
    for reward in rewards:
        if reward.every_turn:
            found = _summed(reward, trajectory.turns)
        elif reward.function is not None:
            found = component(reward, await _worked_out(reward, trajectory))
        else:
            found = await asked(reward, env, trajectory.task.reward)
        components[reward.key] = found
    try:
        total = math.fsum(found.score * found.weight for found in components.values())
        return Scored(score=total, components=components)
    except (ValueError, OverflowError) as exc:
        raise AuthorError(f"the rewards add up to no finite number: {exc}") from exc


async def of_turn(reward: Reward, turn: Turn, env: Asked | None, arguments: Mapping[str, Any]) -> Component:
    """What a reward gives for one turn."""
    if reward.function is not None:
        return component(reward, await _worked_out(reward, turn))
    return await asked(reward, env, arguments)


async def asked(reward: Reward, env: Asked | None, arguments: Mapping[str, Any]) -> Component:
    """What the environment's own reward gives."""
    if env is None:
        raise Invalid(f"reward {reward.key!r} is the environment's, and there is none to ask", hint="replay it")
    given = {**arguments, **(reward.arguments or {})}
    return component(reward, await env.call_reward(given or None, reward.name or None))


def _summed(reward: Reward, turns: Sequence[Turn]) -> Component:
    if missing := [number for number, turn in enumerate(turns) if reward.key not in turn.rewards]:
        raise AuthorError(f"reward {reward.key} was not taken of turn {missing[0]}, and a part of a sum is no reward")
    found = [turn.rewards[reward.key].score for turn in turns]
    try:
        return Component(score=math.fsum(found), weight=reward.weight)
    except (ValueError, OverflowError) as exc:
        raise AuthorError(f"reward {reward.key}() adds up to no finite number: {exc}") from exc


async def _worked_out(reward: Reward, given: Trajectory | Turn) -> Any:
    assert reward.function is not None
    try:
        value = reward.function(given)
        return await value if isinstance(value, Awaitable) or inspect.isawaitable(value) else value
    except AEnvError:
        raise
    except asyncio.CancelledError as exc:
        task = asyncio.current_task()
        if task is None or task.cancelling():
            raise
        raise AuthorError(f"reward {reward.key}() waited for something that was cancelled") from exc
    except Exception as exc:
        raise AuthorError(f"reward {reward.key}() raised {type(exc).__name__}: {exc}") from exc


def component(reward: Reward, value: Any) -> Component:
    """What a reward gave, as a component; anything that has no finite number is the author's failure."""
    found: Any = value.get("score") if isinstance(value, Mapping) else value
    if hasattr(found, "item"):  # of NumPy or torch
        with suppress(TypeError, ValueError, RuntimeError):  # more than one number is none
            found = found.item()
    try:
        details = msgspec.json.decode(to_json(value)) if isinstance(value, Mapping) else None
        return Component(score=found, weight=reward.weight, details=details)
    except (*NOT_JSON, ValueError) as exc:
        hint = "return a finite number, or a mapping whose 'score' is one"
        raise AuthorError(f"reward {reward.key}() gave {value!r}"[:300], hint=hint) from exc
