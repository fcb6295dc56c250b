"""An instance's tools for agents of the OpenAI Agents SDK, and what an episode writes down of them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from agents import FunctionTool, ModelResponse, RunHooks, ToolOutputImage, ToolOutputText
from agents.mcp import MCPServer
from agents.models.chatcmpl_converter import Converter
from agents.tool_context import ToolContext
from mcp import types

from aenv.integrations.listening import Listening
from aenv.integrations.toolbox import Offered
from aenv.models import ToolResult
from aenv.rl.models import seen

_TOLD = ("message", "function_call", "function_call_output")
"""Kinds of items that chat completions have, too."""


class OpenAIAgentsTools(Listening):
    """``async with OpenAIAgentsTools(env) as tools``: an agent has ``tools.tools``, or ``tools.server`` as one of its
    MCP servers, and a run has ``hooks=tools.hooks``."""

    @property
    def tools(self) -> list[FunctionTool]:
        return [self._tool(offered) for offered in self.offered]

    @property
    def server(self) -> MCPServer:
        """An MCP server that is the instance: nothing is connected to, and nothing served."""
        return _Server(self)

    @property
    def hooks(self) -> RunHooks[Any]:
        """What writes down what a model hears and says, and ends a run that is not to go on."""
        return _Hooks(self)

    def _tool(self, offered: Offered) -> FunctionTool:
        async def call(context: ToolContext[Any], arguments: str) -> Any:
            result = await self.use(offered.name, arguments, id=context.tool_call_id)
            if any(block.get("type") == "image" for block in result.content):
                return [_output(block) for block in result.content]
            return seen(result)

        return FunctionTool(offered.name, offered.description, offered.parameters, call, strict_json_schema=False)


class _Server(MCPServer):
    def __init__(self, tools: OpenAIAgentsTools) -> None:
        super().__init__()
        self._tools = tools

    @property
    def name(self) -> str:
        return self._tools.env.env_name

    async def connect(self) -> None:
        pass

    async def cleanup(self) -> None:
        pass

    async def list_tools(self, *_: Any, **__: Any) -> list[types.Tool]:
        return [
            types.Tool.model_validate(
                {"name": offered.name, "description": offered.description, "inputSchema": offered.parameters}
            )
            for offered in self._tools.offered
        ]

    async def call_tool(
        self, tool_name: str, arguments: dict[str, Any] | None, meta: dict[str, Any] | None = None
    ) -> types.CallToolResult:
        result = await self._tools.use(tool_name, arguments)
        answer = {"content": result.content, "isError": result.is_error, "structuredContent": result.structured}
        return types.CallToolResult.model_validate(answer)

    async def list_prompts(self) -> types.ListPromptsResult:
        return types.ListPromptsResult(prompts=[])

    async def get_prompt(self, name: str, arguments: dict[str, Any] | None = None) -> types.GetPromptResult:
        raise NotImplementedError(f"{self.name} has no prompts")


class _Hooks(RunHooks[Any]):
    def __init__(self, tools: OpenAIAgentsTools) -> None:
        self._tools = tools

    async def on_llm_start(self, context: Any, agent: Any, system_prompt: str | None, input_items: list[Any]) -> None:
        system = [{"role": "system", "content": system_prompt}] if system_prompt else []
        self._tools.hear([*system, *_messages(input_items)])

    async def on_llm_end(self, context: Any, agent: Any, response: ModelResponse) -> None:
        said = _messages(response.to_input_items())
        called = any(message.get("tool_calls") for message in said)
        cut = any(getattr(item, "status", None) == "incomplete" for item in response.output)
        await self._tools.say(
            *said,
            model=str(getattr(agent.model, "model", agent.model) or ""),
            finish_reason="length" if cut else "tool_calls" if called else "stop",
            prompt_tokens=response.usage.input_tokens,
            completion_tokens=response.usage.output_tokens,
        )


def _messages(items: Iterable[Any]) -> list[dict[str, Any]]:
    told = [item for item in items if item.get("type", "message") in _TOLD]
    return [dict(message) for message in Converter.items_to_messages(told)]


def _output(block: Mapping[str, Any]) -> Any:
    if block.get("type") == "image":
        return ToolOutputImage(image_url=f"data:{block['mimeType']};base64,{block['data']}")
    return ToolOutputText(text=seen(ToolResult(content=[dict(block)])))
