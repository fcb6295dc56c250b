"""A model of google-adk that asks a server of chat completions: google-adk's own ask Google, or need LiteLLM."""

import json
from collections.abc import AsyncGenerator
from typing import Any

from google.adk.models import BaseLlm, LlmRequest, LlmResponse
from google.genai import types
from openai import AsyncOpenAI

from aenv.integrations.google_adk import _messages


class Scripted(BaseLlm):
    url: str

    async def generate_content_async(
        self, llm_request: LlmRequest, stream: bool = False
    ) -> AsyncGenerator[LlmResponse, None]:
        messages: list[Any] = [message for content in llm_request.contents for message in _messages(content)]
        tools: list[Any] = []
        for tool in llm_request.config.tools or []:
            for declared in tool.function_declarations or []:
                function = {"name": declared.name, "parameters": declared.parameters_json_schema}
                tools.append({"type": "function", "function": function})
        async with AsyncOpenAI(base_url=self.url, api_key="none") as client:
            (choice,) = (await client.chat.completions.create(model="qwen3", messages=messages, tools=tools)).choices
        parts = [types.Part(text=choice.message.content)] if choice.message.content else []
        for call in choice.message.tool_calls or []:
            try:
                given = json.loads(call.function.arguments)
            except ValueError:  # Gemini's calls are objects, whatever their model wrote
                given = {"key": call.function.arguments}
            asked = types.FunctionCall(id=call.id, name=call.function.name, args=given)
            parts.append(types.Part(function_call=asked))
        yield LlmResponse(content=types.Content(role="model", parts=parts))
