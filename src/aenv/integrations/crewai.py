"""An instance's tools for agents of CrewAI, and hooks that tell an episode what they hear and say."""

from __future__ import annotations

from contextlib import ExitStack
from types import TracebackType
from typing import Any

from crewai.hooks.dispatch import InterceptionPoint, scoped_hooks
from crewai.hooks.llm_hooks import LLMCallHookContext
from crewai.tools import BaseTool
from crewai.tools.tool_failure import ToolFailure
from pydantic import BaseModel, ConfigDict, GetJsonSchemaHandler, PrivateAttr
from pydantic_core import CoreSchema

from aenv.client.environment import Environment
from aenv.integrations.telling import Message, Telling, assistant
from aenv.integrations.toolbox import Offered
from aenv.rl.models import seen

PARTS = ("role", "content", "tool_calls", "tool_call_id")
"""What is kept of a message; CrewAI notes more of it."""


class CrewTools(Telling):
    """``async with CrewTools(env) as tools``: agents with ``tools.tools`` are run in a thread, by
    ``asyncio.to_thread(crew.kickoff)``. The hooks hold in the block."""

    def __init__(self, env: Environment) -> None:
        super().__init__(env)
        self._hooks = ExitStack()

    async def __aenter__(self) -> CrewTools:
        await super().__aenter__()
        hooks = {
            InterceptionPoint.PRE_MODEL_CALL: [self._before_model],
            InterceptionPoint.POST_MODEL_CALL: [self._after_model],
        }
        self._hooks.enter_context(scoped_hooks(hooks))
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._hooks.close()
        await super().__aexit__(kind, error, trace)

    @property
    def tools(self) -> list[BaseTool]:
        return [_Tool.of(self, offered) for offered in self.offered]

    def _before_model(self, context: LLMCallHookContext) -> None:
        self.conversation = lambda: [found for message in context.messages if (found := _message(message))]
        self.blocking(self._going_on)

    async def _going_on(self) -> None:
        await self.catch_up()
        self.go_on()

    def _after_model(self, context: LLMCallHookContext) -> None:
        """What it said in words. For calls by function calling CrewAI has no hook; they come with the messages."""
        if context.response is not None:
            said = assistant(context.response)
            self.blocking(lambda: self.tell(said))


class _Tool(BaseTool):
    _tools: CrewTools = PrivateAttr()
    _required: frozenset[str] = PrivateAttr()

    @classmethod
    def of(cls, tools: CrewTools, offered: Offered) -> _Tool:
        made = cls(
            name=offered.name,
            description=offered.description or offered.name,
            args_schema=_arguments(offered.parameters),
            cache_function=_never,
        )
        made._tools = tools
        made._required = frozenset(offered.parameters.get("required", ()))
        return made

    def _run(self, **arguments: Any) -> str | ToolFailure:
        # CrewAI has its model give all arguments, and null for those that it would leave out.
        given = {name: value for name, value in arguments.items() if value is not None or name in self._required}
        result = self._tools.blocking(lambda: self._tools.use(self.name, given))
        return ToolFailure(message=seen(result)) if result.is_error else seen(result)


def _arguments(parameters: dict[str, Any]) -> type[BaseModel]:
    """Arguments that the instance checks."""

    class Arguments(BaseModel):
        model_config = ConfigDict(extra="allow")

        @classmethod
        def __get_pydantic_json_schema__(cls, core: CoreSchema, handler: GetJsonSchemaHandler) -> dict[str, Any]:
            return parameters

    return Arguments


def _never(arguments: Any = None, result: Any = None) -> bool:
    """Whether a call is answered by what an earlier one got: an instance has a state."""
    return False


def _message(message: dict[str, Any]) -> Message | None:
    """What is to be told of one. Where a model writes its calls, CrewAI puts the answer behind its words."""
    if message["role"] == "assistant" and not message.get("tool_calls"):
        _, is_answered, answer = (message["content"] or "").partition("\nObservation: ")
        return {"role": "user", "content": f"Observation: {answer}"} if is_answered else None
    return {part: message[part] for part in PARTS if message.get(part) is not None or part == "content"}
