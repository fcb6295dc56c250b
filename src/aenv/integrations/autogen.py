"""An instance as a workbench of autogen's agents, and a model context that tells an episode what they hear and say."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from types import TracebackType
from typing import Any

from autogen_core import CancellationToken
from autogen_core.model_context import ChatCompletionContext, UnboundedChatCompletionContext
from autogen_core.models import AssistantMessage, FunctionExecutionResultMessage, LLMMessage
from autogen_core.tools import TextResultContent, ToolResult, ToolSchema, Workbench
from pydantic import BaseModel

from aenv.client.environment import Environment
from aenv.integrations.telling import Message, Telling, answered, assistant
from aenv.rl.models import seen
from aenv.rl.recording import Over


class AutogenTools(Telling):
    """``async with AutogenTools(env) as tools``. An agent is given both, ``tools.workbench`` and ``tools.context()``:
    it is the second that ends it when the platform fails."""

    def __init__(self, env: Environment) -> None:
        super().__init__(env)
        self.workbench = _Workbench(self)
        self._over: Over | None = None

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        over = self._over if isinstance(error, Exception) else None
        await super().__aexit__(kind, over or error, trace)
        if over is not None:
            raise over

    @contextmanager
    def ending(self) -> Iterator[None]:
        """What would end the agent does so by an ``Exception``: a team waits for ever for an agent that raises none."""
        try:
            yield
        except Over as exc:
            self._over = exc
            raise RuntimeError("the run is over") from exc

    def context(self) -> ChatCompletionContext:
        """A model context for one agent."""
        return _Context(self)


class _Workbench(Workbench):
    component_config_schema = BaseModel

    def __init__(self, tools: AutogenTools) -> None:
        self._tools = tools

    async def list_tools(self) -> list[ToolSchema]:
        return [
            ToolSchema(name=offered.name, description=offered.description, parameters=offered.parameters)
            for offered in self._tools.offered
        ]

    async def call_tool(
        self,
        name: str,
        arguments: Mapping[str, Any] | None = None,
        cancellation_token: CancellationToken | None = None,
        call_id: str | None = None,
    ) -> ToolResult:
        try:
            result = await self._tools.use(name, arguments, id=call_id or "")
        except Over:  # an agent whose tool raises waits for ever; the context raises instead, before a model is asked
            return ToolResult(name=name, result=[], is_error=True)
        return ToolResult(name=name, result=[TextResultContent(content=seen(result))], is_error=result.is_error)

    async def start(self) -> None:
        """The instance is there already, and stays when the agent ends."""

    async def stop(self) -> None:
        """As ``start``."""

    async def reset(self) -> None:
        """As ``start``."""

    async def save_state(self) -> Mapping[str, Any]:
        return {}

    async def load_state(self, state: Mapping[str, Any]) -> None:
        """What an instance is in is not the agent's."""


class _Context(UnboundedChatCompletionContext):
    def __init__(self, tools: AutogenTools) -> None:
        super().__init__()
        self._tools = tools

    async def add_message(self, message: LLMMessage) -> None:
        await super().add_message(message)
        if self._tools.failure is None:  # after which there are only the workbench's placeholders
            with self._tools.ending():
                await self._tools.tell(*_messages(message))

    async def get_messages(self) -> list[LLMMessage]:
        with self._tools.ending():
            self._tools.go_on()
        messages: list[LLMMessage] = await super().get_messages()
        return messages


def _messages(message: LLMMessage) -> Iterator[Message]:
    if isinstance(message, FunctionExecutionResultMessage):
        for result in message.content:
            yield answered(result.call_id, result.content)
    elif not isinstance(message, AssistantMessage):
        parts = [message.content] if isinstance(message.content, str) else message.content
        heard = "\n".join(part if isinstance(part, str) else "[image]" for part in parts)
        yield {"role": "system" if message.type == "SystemMessage" else "user", "content": heard}
    elif isinstance(message.content, str):
        yield assistant(message.content)
    else:
        yield assistant(message.thought, [(call.id, call.name, call.arguments) for call in message.content])
