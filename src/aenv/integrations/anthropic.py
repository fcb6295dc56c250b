"""An instance's tools for the tool runner of Anthropic's SDK, and what an episode writes down of it."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from anthropic import AsyncAnthropic
from anthropic.lib.tools import BetaAsyncBuiltinFunctionTool, ToolError
from anthropic.types.beta import BetaMessage

from aenv.client.environment import Environment
from aenv.integrations.listening import Listening
from aenv.integrations.telling import Message, answered, assistant
from aenv.integrations.toolbox import Offered
from aenv.models import ToolResult
from aenv.rl.models import seen

_REASONS = {"end_turn": "stop", "stop_sequence": "stop", "tool_use": "tool_calls", "max_tokens": "length"}
"""Anthropic's words for why a model stopped, in OpenAI's."""
_IMAGES = ("image/jpeg", "image/png", "image/gif", "image/webp")


class AnthropicTools(Listening):
    """``async with AnthropicTools(env) as tools``: ``await tools.run(client, ...)`` is a tool runner to its end."""

    def __init__(self, env: Environment) -> None:
        super().__init__(env)
        self._coming: dict[str, list[str]] = {}
        """The ids of calls that are to come, by the name of the tool: the runner does not tell them."""

    @property
    def tools(self) -> list[BetaAsyncBuiltinFunctionTool]:
        """For a runner that you drive yourself. Nothing is written down of what its model hears and says."""
        return [_Tool(self, offered) for offered in self.offered]

    async def run(self, client: AsyncAnthropic, *, tools: Iterable[Any] = (), **asked: Any) -> BetaMessage:
        """``client.beta.messages.tool_runner(**asked)`` with these tools, and other ``tools`` beside them, to its end;
        what the model said last. No run is streamed."""
        runner = client.beta.messages.tool_runner(tools=[*self.tools, *tools], **asked)
        told = [*_messages("system", asked.get("system") or [])]
        for message in asked["messages"]:
            told += _messages(message["role"], message["content"])
        self.hear(told)
        async for said in runner:
            self._coming = {}
            for block in said.content:
                if block.type == "tool_use":
                    self._coming.setdefault(block.name, []).append(block.id)
            (message,) = _messages("assistant", said.to_dict()["content"])
            await self.say(
                message,
                model=said.model,
                finish_reason=_REASONS.get(said.stop_reason or "", said.stop_reason or ""),
                prompt_tokens=said.usage.input_tokens,
                completion_tokens=said.usage.output_tokens,
            )
            if said.stop_reason == "tool_use" and (heard := await runner.generate_tool_call_response()):
                told += [message, *_messages(heard["role"], heard["content"])]
                self.hear(told)
        return await runner.until_done()

    async def called(self, name: str, given: object) -> ToolResult:
        """Call a tool with what the runner gives."""
        ids = self._coming.get(name)
        arguments = given if isinstance(given, Mapping) else json.dumps(given)
        return await self.use(name, arguments, id=ids.pop(0) if ids else "")


class _Tool(BetaAsyncBuiltinFunctionTool):
    def __init__(self, tools: AnthropicTools, offered: Offered) -> None:
        self._tools = tools
        self._offered = offered

    def to_dict(self) -> Any:
        offered = self._offered
        return {"name": offered.name, "description": offered.description, "input_schema": offered.parameters}

    async def call(self, input: object) -> Any:
        result = await self._tools.called(self._offered.name, input)
        blocks = [_block(block) for block in result.content]
        if result.is_error:
            raise ToolError(blocks)  # which the runner tells the model
        return blocks


def _block(block: Mapping[str, Any]) -> Any:
    """Of a tool's answer, as Anthropic's API takes it."""
    if block.get("type") == "image" and block["mimeType"] in _IMAGES:
        source = {"type": "base64", "media_type": block["mimeType"], "data": block["data"]}
        return {"type": "image", "source": source}
    return {"type": "text", "text": seen(ToolResult(content=[dict(block)]))}


def _messages(role: str, content: str | Iterable[Any]) -> Iterator[Message]:
    """One of Anthropic's messages, as OpenAI's API has them: several, where it has answers of tools."""
    blocks: list[Any] = [{"type": "text", "text": content}] if isinstance(content, str) else list(content)
    texts, calls = [], []
    for block in blocks:
        if block["type"] == "tool_result":
            yield answered(block["tool_use_id"], _text(block.get("content") or ""))
        elif block["type"] == "tool_use":
            calls.append((block["id"], block["name"], json.dumps(block["input"])))
        elif block["type"] == "text" or role != "assistant":
            texts.append(_text([block]))
    if role == "assistant":
        yield assistant("\n".join(texts), calls)
    elif texts:
        yield {"role": role, "content": "\n".join(texts)}


def _text(content: Any) -> str:
    if isinstance(content, str):
        return content
    return "\n".join(block["text"] if block["type"] == "text" else f"[{block['type']}]" for block in content)
