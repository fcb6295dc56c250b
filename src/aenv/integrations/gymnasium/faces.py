"""What an instance looks like to Gymnasium: what may be done in it, what is seen, and what that is worth."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple, Protocol

import msgspec

from aenv.errors import AuthorError, Invalid, Unsupported, did_you_mean
from aenv.integrations.gymnasium import spaces
from aenv.integrations.gymnasium.instances import Instance
from aenv.integrations.gymnasium.spaces import Space, ToolCalls, Words, made, read, written
from aenv.models import ToolResult
from aenv.rl.tasks import Task


class Seen(NamedTuple):
    """What comes of a reset or a step."""

    observation: Any
    reward: float = 0.0
    terminated: bool = False
    truncated: bool = False
    info: Mapping[str, Any] = {}
    told: Any = None
    """The observation as JSON carried it, if it did."""


class Face(Protocol):
    """One way to look at an instance. Each instance has one of its own."""

    observation_space: Space
    action_space: Space

    async def meet(self, env: Instance) -> None:
        """Learn the spaces of an instance that is ready."""

    async def reset(self, env: Instance, seed: int, options: Mapping[str, Any]) -> Seen:
        """Begin an episode. ``Unsupported`` where only a new instance is one."""

    def action(self, given: Any) -> Any:
        """What is done, as it is kept and sent. ``Invalid`` where it is no action."""

    async def step(self, env: Instance, action: Any) -> Seen:
        """Do it."""


@contextmanager
def _understood(env: Instance) -> Iterator[None]:
    """What an environment tells is read in the block: it is the author's, and may be anything."""
    try:
        yield
    except (TypeError, ValueError, LookupError, OverflowError, AttributeError) as exc:
        raise AuthorError(f"{env.env_name} does not tell what one of Gymnasium's does: {exc!r}"[:500]) from exc


class Published:
    """An environment that was one of Gymnasium's before it was published as ours."""

    observation_space: Space
    action_space: Space

    def __init__(self, seat: int = 0) -> None:
        """``seat``: which of the environments in the instance it is."""
        self._seat = seat

    async def meet(self, env: Instance) -> None:
        """Ask for the spaces."""
        found = await env.call_function("gymnasium_spaces")
        with _understood(env):
            self.observation_space, self.action_space = made(found["observation"]), made(found["action"])

    async def reset(self, env: Instance, seed: int, options: Mapping[str, Any]) -> Seen:
        """Begin an episode."""
        found = await env.play(self._seat, "reset", {"seed": seed, "options": dict(options) or None})
        with _understood(env):
            told = found["observation"]
            return Seen(read(self.observation_space, told), info=dict(found["info"]), told=told)

    def action(self, given: Any) -> Any:
        """A member of the action space, as JSON carries it."""
        return written(self.action_space, spaces.action(self.action_space, given))

    async def step(self, env: Instance, action: Any) -> Seen:
        """Take an action."""
        found = await env.play(self._seat, "step", action)
        with _understood(env):
            told = found["observation"]
            over = bool(found["terminated"]), bool(found["truncated"])
            return Seen(read(self.observation_space, told), float(found["reward"]), *over, dict(found["info"]), told)


class Tools:
    """Actions are calls of tools, observations are what these say, and the environment's reward is given at the end.

    The observation of a reset is the task's instruction, and what the environment's reset returned.
    """

    observation_space: Space
    action_space: Space

    def __init__(
        self,
        task: Task | str | Mapping[str, Any] | None = None,
        *,
        text: bool = False,
        final: str = "",
        max_steps: int | None = None,
        every_step: bool = False,
    ) -> None:
        """``text``: whether calls are written as JSON, as a model writes them; ``final`` is the tool that ends the
        episode; ``max_steps`` is after how many it is cut short; ``every_step``: whether each step is worth what the
        reward has risen by, and not only the last one."""
        self.task = Task.of(task)
        self.final = final
        self.max_steps = max_steps
        self.every_step = every_step
        self.observation_space = Words()
        self._text = text
        self._names: tuple[str, ...] = ()
        self._steps = 0
        self._score = 0.0

    async def meet(self, env: Instance) -> None:
        """Ask which tools there are."""
        found = [tool["name"].partition("/")[2] for tool in await env.list_tools()]
        self._names = tuple(name for name in found if not self.task.tools or name in self.task.tools)
        if self.final and self.final not in self._names:
            raise Invalid(f"{env.env_name} has no tool {self.final!r}", hint=did_you_mean(self.final, self._names))
        self.action_space = Words() if self._text else ToolCalls(self._names)

    async def reset(self, env: Instance, seed: int, options: Mapping[str, Any]) -> Seen:
        """Begin an episode; ``options`` are arguments of the author's reset."""
        seen = await env.reset(seed, {**self.task.reset, **options})
        return await self.begin(env, seen)

    async def begin(self, env: Instance, seen: Any = None) -> Seen:
        """The same in an instance in which nothing has been done."""
        for path, content in self.task.files.items():
            await env.upload(path, content)
        self._steps, self._score = 0, 0.0
        if self.every_step:
            self._score = await self._taken(env)
        parts = (self.task.system, self.task.instruction, _said(seen))
        return Seen("\n\n".join(part for part in parts if part))

    def action(self, given: Any) -> Any:
        """Whatever it is: what is no call is told, as a model is told of it."""
        return copy.deepcopy(given)

    async def step(self, env: Instance, action: Any) -> Seen:
        """Call a tool. A call that cannot be made is told, as a model is told of it."""
        self._steps += 1
        is_final = False
        try:
            name, arguments = self._call(action)
        except Invalid as exc:
            said = exc.message
        else:
            result = await env.call_tool(name, arguments)
            said = _shown(result)
            is_final = name == self.final and not result.is_error
        cut = not is_final and self.max_steps is not None and self._steps >= self.max_steps
        reward = 0.0
        if is_final or cut or self.every_step:
            before, self._score = self._score, await self._taken(env)
            reward = self._score - before
        return Seen(said, reward, is_final, cut)

    def _call(self, action: Any) -> tuple[str, dict[str, Any]]:
        if isinstance(action, str):
            try:
                action = msgspec.json.decode(action)
            except (msgspec.MsgspecError, UnicodeError, RecursionError) as exc:
                raise Invalid(
                    f'a call is JSON: {{"name": ..., "arguments": {{...}}}}, and this is none: {exc}'
                ) from exc
        if not isinstance(action, Mapping) or not isinstance(action.get("arguments", {}), Mapping):
            raise Invalid('a call is {"name": ..., "arguments": {...}}')
        name = action.get("name")
        if name not in self._names:
            raise Invalid(f"there is no tool {str(name)[:100]!r}; {did_you_mean(str(name), self._names)}")
        return str(name), dict(action.get("arguments", {}))

    async def _taken(self, env: Instance) -> float:
        found = await env.call_reward(self.task.reward or None)
        score = found.get("score") if isinstance(found, Mapping) else found
        if not isinstance(score, (int, float)):
            raise Invalid(f"the reward of {env.env_name} is no number: {str(found)[:200]}")
        return float(score)


def _shown(result: ToolResult) -> str:
    return "\n".join(str(block.get("text", f"[{block.get('type')}]")) for block in result.content)


def _said(seen: Any) -> str:
    return "" if seen is None else seen if isinstance(seen, str) else msgspec.json.encode(seen).decode()


async def face_of(env: Instance, seat: int) -> Face:
    """How an environment is looked at when nothing else is said."""
    known = await env.list_functions()
    if any(function["name"] == "gymnasium_spaces" for function in known["functions"]):
        return Published(seat)
    raise Unsupported(
        f"{env.env_name} was none of Gymnasium's before",
        hint="say how it is played: face=Tools(task, final=..., max_steps=...)",
    )
