"""An instance's tools for agents of pydantic-ai, and what an episode writes down of them."""

from __future__ import annotations

import base64
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from pydantic_ai import AbstractToolset, BinaryContent, RunContext, ToolDefinition, ToolFailed, ToolsetTool
from pydantic_ai.capabilities import AbstractCapability
from pydantic_ai.messages import (
    ModelMessage,
    ModelResponse,
    SystemPromptPart,
    TextPart,
    ToolCallPart,
    ToolReturnPart,
    UserPromptPart,
)
from pydantic_ai.models import ModelRequestContext
from pydantic_core import SchemaValidator, core_schema

from aenv.integrations.listening import Listening
from aenv.integrations.telling import Message, answered, assistant
from aenv.models import ToolResult
from aenv.rl.models import seen

_AN_OBJECT = SchemaValidator(core_schema.dict_schema(core_schema.str_schema(), core_schema.any_schema()))
"""What of the arguments is checked here: the instance knows the rest."""


class PydanticAITools(Listening):
    """``async with PydanticAITools(env) as tools``: an agent or a run has ``capabilities=[tools.capability]``."""

    @property
    def toolset(self) -> AbstractToolset[Any]:
        """The tools alone. Nothing is written down of what a model hears and says."""
        return _Toolset(self)

    @property
    def capability(self) -> AbstractCapability[Any]:
        """The tools, with what writes down what a model hears and says, and ends a run that is not to go on."""
        return _Capability(self)


class _Toolset(AbstractToolset[Any]):
    def __init__(self, tools: PydanticAITools) -> None:
        self._tools = tools

    @property
    def id(self) -> str | None:
        return self._tools.env.instance_id

    async def get_tools(self, ctx: RunContext[Any]) -> dict[str, ToolsetTool[Any]]:
        return {
            offered.name: ToolsetTool(
                toolset=self,
                tool_def=ToolDefinition(
                    name=offered.name, description=offered.description, parameters_json_schema=offered.parameters
                ),
                max_retries=ctx.max_retries,
                args_validator=_AN_OBJECT,
            )
            for offered in self._tools.offered
        }

    async def call_tool(self, name: str, tool_args: dict[str, Any], ctx: RunContext[Any], tool: Any) -> Any:
        result = await self._tools.use(name, tool_args, id=ctx.tool_call_id or "")
        if result.is_error:
            raise ToolFailed(seen(result))  # which pydantic-ai tells the model
        if any(block.get("type") == "image" for block in result.content):
            return [_content(block) for block in result.content]
        return seen(result)


@dataclass
class _Capability(AbstractCapability[Any]):
    tools: PydanticAITools

    def get_toolset(self) -> AbstractToolset[Any]:
        return self.tools.toolset

    async def before_model_request(
        self, ctx: RunContext[Any], request_context: ModelRequestContext
    ) -> ModelRequestContext:
        self.tools.hear(_conversation(request_context.messages))
        return request_context

    async def after_model_request(
        self, ctx: RunContext[Any], *, request_context: ModelRequestContext, response: ModelResponse
    ) -> ModelResponse:
        reason = response.finish_reason or ""
        await self.tools.say(
            _said(response),
            model=response.model_name or "",
            finish_reason="tool_calls" if reason == "tool_call" else reason,
            prompt_tokens=response.usage.input_tokens,
            completion_tokens=response.usage.output_tokens,
        )
        return response


def _conversation(messages: Sequence[ModelMessage]) -> list[Message]:
    found: list[Message] = []
    instructions = None
    for message in messages:
        if isinstance(message, ModelResponse):
            found.append(_said(message))
            continue
        instructions = message.instructions or instructions
        for part in message.parts:
            if isinstance(part, SystemPromptPart):
                found.append({"role": "system", "content": part.content})
            elif isinstance(part, UserPromptPart):
                pieces = [part.content] if isinstance(part.content, str) else part.content
                texts = (piece if isinstance(piece, str) else f"[{type(piece).__name__}]" for piece in pieces)
                found.append({"role": "user", "content": "\n".join(texts)})
            elif isinstance(part, ToolReturnPart):
                found.append(answered(part.tool_call_id, part.model_response_str(wrap_if_error=False)))
            else:
                found.append({"role": "user", "content": part.model_response()})
    return [{"role": "system", "content": instructions}, *found] if instructions else found


def _said(response: ModelResponse) -> Message:
    text = "".join(part.content for part in response.parts if isinstance(part, TextPart))
    calls = [part for part in response.parts if isinstance(part, ToolCallPart)]
    return assistant(text, [(call.tool_call_id, call.tool_name, _arguments(call)) for call in calls])


def _arguments(call: ToolCallPart) -> str:
    return call.args if isinstance(call.args, str) else call.args_as_json_str()  # also where it is no JSON


def _content(block: dict[str, Any]) -> Any:
    if block.get("type") == "image":
        return BinaryContent(base64.b64decode(block["data"]), media_type=block["mimeType"])
    return seen(ToolResult(content=[block]))
