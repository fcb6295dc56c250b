"""The tools of one instance, for the agents of a framework.

What a tool says, also that it failed, is for the model. What the platform fails at ends the run: it is remembered here,
whatever a framework does with the exception, every later call raises it again, and so does the end of the block.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Mapping
from types import TracebackType
from typing import Any, NamedTuple, Self, TypeVar

import msgspec

from aenv.client.environment import Environment
from aenv.errors import AEnvError, Conflict, Invalid, did_you_mean
from aenv.models import NOT_JSON, ToolResult, to_json
from aenv.rl.recording import Episode

R = TypeVar("R")
_LEFT = (asyncio.CancelledError, KeyboardInterrupt, SystemExit, GeneratorExit)
"""What leaves the block as it is, whatever failed."""


class Offered(NamedTuple):
    """A tool as a model is offered it."""

    name: str
    """Such as every API of models allows."""
    description: str
    parameters: dict[str, Any]
    """A JSON Schema."""


class Toolbox:
    """``async with Toolbox(env) as tools``: what ``env`` offers, called under the names in ``offered``."""

    def __init__(self, env: Environment) -> None:
        self.env = env
        self.offered: tuple[Offered, ...] = ()
        self.failure: AEnvError | None = None
        """What the platform failed at, first."""
        self._loop: asyncio.AbstractEventLoop | None = None
        self._under_way: set[asyncio.Task[Any]] = set()

    async def __aenter__(self) -> Self:
        functions = [tool["function"] for tool in await self.env.list_openai_tools()]
        self.offered = tuple(Offered(one["name"], one["description"], one["parameters"]) for one in functions)
        self._loop = asyncio.get_running_loop()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._loop = None
        for task in self._under_way:
            task.cancel()
        if self._under_way:
            await asyncio.wait(self._under_way)
        if self.failure is not None and error is not self.failure and not isinstance(error, _LEFT):
            raise self.failure from None  # a framework's own words for it add nothing

    @property
    def is_open(self) -> bool:
        """Whether the block has not ended."""
        return self._loop is not None

    async def call(self, name: str, arguments: Mapping[str, Any] | str | None = None, *, id: str = "") -> ToolResult:
        """Call a tool with what a model gave: an object, or the JSON of one. ``id`` is what it called the call."""
        if self._loop is None:
            raise Conflict("the tools are used after the block that they belong to")
        if self.failure is not None:
            raise self.failure
        names = [tool.name for tool in self.offered]
        if name not in names:
            return _refused(f"there is no tool {name[:100]!r}; {did_you_mean(name, names)}")
        if isinstance(arguments, str):
            try:
                arguments = msgspec.json.decode(arguments.strip() or "{}", type=dict[str, Any])
            except NOT_JSON as exc:
                return _refused(f"the arguments of {name} are no JSON object: {exc}")
        task = asyncio.current_task()
        assert task is not None
        self._under_way.add(task)
        try:
            if isinstance(self.env, Episode):
                return await self.env.call_tool(name, arguments, id=id)
            return await self.env.call_tool(name, arguments)
        except AEnvError as exc:
            if isinstance(exc, Invalid) and (why := _no_json(arguments)):
                return _refused(f"the arguments of {name} cannot be sent: {why}")
            self.failure = self.failure or exc
            raise
        finally:
            self._under_way.discard(task)

    def call_blocking(self, name: str, arguments: Mapping[str, Any] | str | None = None, *, id: str = "") -> ToolResult:
        """The same from a thread, for frameworks that know no event loop. The end of the block cuts it short."""
        return self.wait_for(lambda: self.call(name, arguments, id=id))

    def wait_for(self, work: Callable[[], Coroutine[Any, Any, R]]) -> R:
        """Do it in the block's event loop, from a thread. The end of the block cuts it short."""
        loop = self._loop  # once: the block may end meanwhile, and its end is no error of Python's for a model to read
        if loop is None:
            raise Conflict("the tools are used after the block that they belong to")
        return asyncio.run_coroutine_threadsafe(self._cuttable(work), loop).result()

    async def _cuttable(self, work: Callable[[], Coroutine[Any, Any, R]]) -> R:
        if self._loop is None:  # it ended meanwhile
            raise Conflict("the tools are used after the block that they belong to")
        task = asyncio.current_task()
        assert task is not None
        self._under_way.add(task)
        try:
            return await work()
        finally:
            self._under_way.discard(task)


def _refused(said: str) -> ToolResult:
    return ToolResult(content=[{"type": "text", "text": said}], is_error=True)


def _no_json(arguments: Mapping[str, Any] | None) -> str:
    """Why JSON cannot carry what a framework made of a model's words; nothing where it can."""
    try:
        to_json(arguments)
    except NOT_JSON as exc:
        return str(exc)
    return ""
