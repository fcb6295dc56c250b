"""What somebody else's environment registers to be one of ours, in the order that tells the same on every framework."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple, Protocol

from aenv.runtime.registry import (
    register_function,
    register_reset,
    register_reward,
    register_setup,
    register_teardown,
    register_tool,
)


class Published(Protocol):
    """What plays the episodes of an instance."""

    @property
    def start(self) -> Callable[..., Any]: ...
    async def stop(self) -> None: ...
    @property
    def restart(self) -> Callable[..., Any]: ...


class Offer(NamedTuple):
    """A tool, under its name and schema in the framework."""

    name: str
    call: Callable[..., Any]
    schema: dict[str, Any]
    description: str | None = None
    agents: tuple[str, ...] | None = None
    anytime: bool | None = None
    """Of several agents, who has it, and whether they need no turn for it."""


def register(
    played: Published, tools: Iterable[Offer], reward: Callable[..., Any], functions: dict[str, Callable[..., Any]]
) -> None:
    """Register all of it. The reward has the name of its function."""
    register_setup(played.start)
    register_teardown(played.stop)
    register_reset(played.restart)
    for tool in tools:
        register_tool(
            name=tool.name,
            description=tool.description,
            input_schema=tool.schema,
            agents=tool.agents,
            anytime=tool.anytime,
        )(tool.call)
    register_reward(reward)
    for name, function in functions.items():
        register_function(name=name)(function)


def steps(played: Any, action: dict[str, Any], options: str) -> tuple[Offer, Offer]:
    """The tools ``reset`` and ``step`` of what is played in steps. ``options`` says what these are of a reset."""
    reset = {
        "seed": {"type": ["integer", "null"], "description": "Makes the episode repeatable."},
        "options": {"type": ["object", "null"], "description": options},
    }
    return (
        Offer("reset", played.reset, {"type": "object", "properties": reset}),
        Offer("step", played.step, {"type": "object", "properties": {"action": action}, "required": ["action"]}),
    )


_GIVEN = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)


def with_context(make: Callable[..., Any], ctx: Any) -> Callable[..., Any]:
    """An author's function, given the instance's ``Context`` where it takes an argument."""
    wanted = inspect.signature(make).parameters.values()
    needs = any(one.default is one.empty and one.kind in _GIVEN for one in wanted)
    return functools.partial(make, ctx) if needs else make
