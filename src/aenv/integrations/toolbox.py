"""The tools of one instance, for the agents of a framework.

What a tool says, also that it failed, is for the model. What the platform fails at ends the run: it is remembered here,
whatever a framework does with the exception, every later call raises it again, and so does the end of the block.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from types import TracebackType
from typing import Any, NamedTuple

import msgspec

from aenv.client.environment import Environment
from aenv.client.openai import openai_tools
from aenv.errors import AEnvError, Conflict
from aenv.models import ToolResult


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
        self._names: dict[str, str] = {}
        self._loop: asyncio.AbstractEventLoop | None = None
        self._under_way: set[asyncio.Task[Any]] = set()

    async def __aenter__(self) -> Toolbox:
        self._loop = asyncio.get_running_loop()
        listed, self._names = openai_tools(await self.env.list_tools())
        functions = [tool["function"] for tool in listed]
        self.offered = tuple(Offered(one["name"], one["description"], one["parameters"]) for one in functions)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._loop = None
        for task in self._under_way:
            task.cancel()
        if self._under_way:
            await asyncio.wait(self._under_way)
        if self.failure is not None and error is not self.failure and (error is None or isinstance(error, Exception)):
            raise self.failure from error

    async def call(self, name: str, arguments: Mapping[str, Any] | str | None = None) -> ToolResult:
        """Call a tool with what a model gave: an object, or the JSON of one."""
        if self._loop is None:
            raise Conflict("the tools are used after the block that they belong to")
        if self.failure is not None:
            raise self.failure
        if isinstance(arguments, str):
            try:
                arguments = msgspec.json.decode(arguments or "{}", type=dict[str, Any])
            except (msgspec.DecodeError, RecursionError) as exc:
                return _refused(f"the arguments are no JSON object: {exc}")
        try:
            return await self.env.call_tool(self._names.get(name, name), arguments)
        except AEnvError as exc:
            self.failure = self.failure or exc
            raise

    def call_blocking(self, name: str, arguments: Mapping[str, Any] | str | None = None) -> ToolResult:
        """The same from a thread, for frameworks that know no event loop. The end of the block cuts it short."""
        loop = self._loop
        if loop is None:
            raise Conflict("the tools are used after the block that they belong to")
        return asyncio.run_coroutine_threadsafe(self._cuttable(name, arguments), loop).result()

    async def _cuttable(self, name: str, arguments: Mapping[str, Any] | str | None) -> ToolResult:
        task = asyncio.current_task()
        assert task is not None
        self._under_way.add(task)
        try:
            return await self.call(name, arguments)
        finally:
            self._under_way.discard(task)


def _refused(said: str) -> ToolResult:
    return ToolResult(content=[{"type": "text", "text": said}], is_error=True)
