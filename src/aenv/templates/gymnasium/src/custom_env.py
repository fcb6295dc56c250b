"""A Gymnasium environment as tools: reset, step and observe, with the episode's return as the reward.

Which one: the instance's first argument, else the variable GYM_ENV, else CartPole-v1.
"""

from threading import Lock
from typing import Any

import gymnasium
import numpy

from aenv import Context, register_reset, register_reward, register_setup, register_teardown, register_tool

DEFAULT = "CartPole-v1"


class Episode:
    """One environment and how far it has come. Tools run in threads, so each step holds the lock."""

    def __init__(self, env_id: str, seed: int | None = None) -> None:
        self.env = gymnasium.make(env_id)
        self.lock = Lock()
        self.reset(seed)

    def reset(self, seed: int | None = None) -> dict[str, Any]:
        with self.lock:
            self.observation, _ = self.env.reset(seed=seed)
            self.total, self.steps, self.terminated, self.truncated = 0.0, 0, False, False
            return self.state()

    def step(self, action: int | float | list[float]) -> dict[str, Any]:
        with self.lock:
            if self.terminated or self.truncated:
                raise ValueError("the episode is over; call reset")
            space = self.env.action_space
            taken = numpy.asarray(action, dtype=space.dtype)
            if taken.tolist() != action or not space.contains(taken[()]):
                raise ValueError(f"{action!r} is not an action of {space}")
            self.observation, reward, self.terminated, self.truncated, _ = self.env.step(taken[()])
            self.total += float(reward)
            self.steps += 1
            return {"reward": float(reward), **self.state()}

    def state(self) -> dict[str, Any]:
        return {
            "observation": plain(self.observation),
            "terminated": bool(self.terminated),
            "truncated": bool(self.truncated),
            "steps": self.steps,
        }


def plain(value: Any) -> Any:
    """An observation as JSON can hold it."""
    if isinstance(value, dict):
        return {key: plain(item) for key, item in value.items()}
    if isinstance(value, (tuple, list)):
        return [plain(item) for item in value]
    return value.tolist() if hasattr(value, "tolist") else value


_episodes: list[Episode] = []


def current() -> Episode:
    if not _episodes:
        raise RuntimeError("there is no episode yet")
    return _episodes[0]


@register_setup
def start(ctx: Context) -> None:
    """Make the environment before the sandbox is ready; a wrong id fails the start."""
    chosen = ctx.arguments[0] if ctx.arguments else ctx.environment_variables.get("GYM_ENV", DEFAULT)
    _episodes[:] = [Episode(chosen, ctx.seed)]


@register_teardown
def stop() -> None:
    current().env.close()
    _episodes.clear()


@register_reset
def restart(seed: int | None = None) -> None:
    """What ``Environment.reset(seed=...)`` calls, for the program that runs the agent."""
    current().reset(seed)


@register_tool
def reset(seed: int | None = None) -> dict[str, Any]:
    """Begin a new episode and return the first observation.

    Args:
        seed: Makes the episode repeatable.
    """
    return current().reset(seed)


@register_tool
def step(action: int | float | list[float]) -> dict[str, Any]:
    """Take one action and return its reward and the observation after it.

    Args:
        action: A number in a discrete space, a list of numbers in a continuous one.
    """
    return current().step(action)


@register_tool
def observe() -> dict[str, Any]:
    """Return the present observation without taking an action."""
    return current().state()


@register_reward
def episode_return() -> dict[str, Any]:
    """The sum of the rewards of the episode so far."""
    episode = current()
    over = bool(episode.terminated or episode.truncated)
    return {"score": episode.total, "steps": episode.steps, "over": over}
