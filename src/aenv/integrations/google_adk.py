"""An instance's tools for agents of google-adk, and a plugin that tells an episode what they hear and say."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from google.adk.agents.callback_context import CallbackContext
from google.adk.models import LlmRequest, LlmResponse
from google.adk.plugins.base_plugin import BasePlugin
from google.adk.tools import BaseTool, ToolContext
from google.genai import types

from aenv.client.environment import Environment
from aenv.integrations.telling import Message, Telling, answered, assistant
from aenv.integrations.toolbox import Offered
from aenv.rl.models import seen


class AdkTools(Telling):
    """``async with AdkTools(env) as tools``: ``tools.tools`` are for an agent, ``[tools.plugin]`` for its runner."""

    def __init__(self, env: Environment) -> None:
        super().__init__(env)
        self.plugin = _Plugin(self)

    @property
    def tools(self) -> list[BaseTool]:
        return [_Tool(self, offered) for offered in self.offered]


class _Tool(BaseTool):
    def __init__(self, tools: AdkTools, offered: Offered) -> None:
        super().__init__(name=offered.name, description=offered.description)
        self._tools = tools
        self._parameters = offered.parameters

    def _get_declaration(self) -> types.FunctionDeclaration:
        return types.FunctionDeclaration(
            name=self.name, description=self.description, parameters_json_schema=self._parameters
        )

    async def run_async(self, *, args: dict[str, Any], tool_context: ToolContext) -> dict[str, Any]:
        result = await self._tools.use(self.name, args, id=tool_context.function_call_id or "")
        return {"error" if result.is_error else "result": seen(result)}


class _Plugin(BasePlugin):
    """Its names of arguments are google-adk's."""

    def __init__(self, tools: AdkTools) -> None:
        super().__init__(name="aenv")
        self._tools = tools

    async def before_model_callback(self, *, callback_context: CallbackContext, llm_request: LlmRequest) -> None:
        instruction = llm_request.config.system_instruction
        heard: list[Message] = [{"role": "system", "content": instruction}] if isinstance(instruction, str) else []
        for content in llm_request.contents:
            heard += _messages(content) if content.role != "model" else ()
        self._tools.conversation = lambda: heard
        await self._tools.catch_up()
        self._tools.go_on()

    async def after_model_callback(self, *, callback_context: CallbackContext, llm_response: LlmResponse) -> None:
        if llm_response.partial or llm_response.content is None:
            return
        usage, finish = llm_response.usage_metadata, llm_response.finish_reason
        for message in _messages(llm_response.content):
            await self._tools.tell(
                message,
                model=llm_response.model_version or "",
                finish_reason=finish.value.lower() if finish else "",
                prompt_tokens=usage.prompt_token_count if usage else None,
                completion_tokens=usage.candidates_token_count if usage else None,
            )


def _messages(content: types.Content) -> Iterator[Message]:
    """A content as messages of chat completions: what several tools answered is one content, and several of those."""
    parts = content.parts or []
    text = "".join(part.text for part in parts if part.text and not part.thought)
    if content.role == "model":
        calls = [part.function_call for part in parts if part.function_call]
        yield assistant(text, [(call.id or "", call.name or "", json.dumps(call.args or {})) for call in calls])
        return
    for part in parts:
        if (response := part.function_response) is not None:
            yield answered(response.id or "", json.dumps(response.response))
    if text:
        yield {"role": "user", "content": text}
