"""An instance's tools for CAMEL's agents, and a memory from which an episode is told what they hear and say."""

from __future__ import annotations

from typing import Any

from camel.memories import ChatHistoryMemory, ScoreBasedContextCreator
from camel.messages import OpenAIMessage
from camel.models import BaseModelBackend
from camel.toolkits import FunctionTool

from aenv.integrations.telling import Message, Telling
from aenv.integrations.toolbox import Offered
from aenv.rl.models import seen


class CamelTools(Telling):
    """``async with CamelTools(env) as tools``: ``tools.tools`` and ``tools.memory(model)`` are for a ``ChatAgent``
    with that model, which is asked by ``astep``."""

    @property
    def tools(self) -> list[FunctionTool]:
        return [self._tool(offered) for offered in self.offered]

    def memory(self, model: BaseModelBackend) -> ChatHistoryMemory:
        """A chat history, out of which the model is not asked any more once the run is over."""
        memory = _Memory(self, model)
        self.conversation = memory.conversation
        return memory

    def _tool(self, offered: Offered) -> FunctionTool:
        async def call(**arguments: Any) -> str:
            return seen(await self.use(offered.name, arguments))

        return FunctionTool(call, openai_tool_schema={"type": "function", "function": offered._asdict()})


class _Memory(ChatHistoryMemory):
    def __init__(self, tools: CamelTools, model: BaseModelBackend) -> None:
        super().__init__(ScoreBasedContextCreator(model.token_counter, model.token_limit))
        self._tools = tools

    def get_context(self) -> tuple[list[OpenAIMessage], int]:
        self._tools.go_on()
        context: tuple[list[OpenAIMessage], int] = super().get_context()
        return context

    def conversation(self) -> list[Message]:
        return [dict(record.memory_record.to_openai_message()) for record in self.retrieve()]
