"""An instance's tools for agents of LangChain and LangGraph, and what an episode writes down of them."""

from __future__ import annotations

from collections.abc import Mapping
from contextvars import ContextVar
from typing import Any

from langchain_core.callbacks import AsyncCallbackHandler
from langchain_core.messages import AIMessage, BaseMessage, convert_to_openai_messages
from langchain_core.outputs import ChatGeneration, LLMResult
from langchain_core.tools import BaseTool, ToolException

from aenv.integrations.listening import Listening
from aenv.integrations.toolbox import Offered
from aenv.models import ToolResult
from aenv.rl.models import seen

_id: ContextVar[str] = ContextVar("id", default="")
"""What the model called the call under way."""
_REASONS = {"end_turn": "stop", "tool_use": "tool_calls", "max_tokens": "length", "STOP": "stop"}
"""Words of some servers for why a model stopped, in OpenAI's."""


class LangChainTools(Listening):
    """``async with LangChainTools(env) as tools``: ``create_agent`` or a ``ToolNode`` has ``tools.tools``, and
    ``ainvoke`` has ``config=tools.config``."""

    @property
    def tools(self) -> list[BaseTool]:
        return [_tool(self, offered) for offered in self.offered]

    @property
    def config(self) -> dict[str, Any]:
        """With what writes down what a model hears and says, and ends a run that is not to go on."""
        return {"callbacks": [_Callback(self)]}


class _Tool(BaseTool):
    box: Any
    handle_tool_error: bool = True

    async def arun(self, tool_input: Any, *args: Any, tool_call_id: str | None = None, **options: Any) -> Any:
        _id.set(tool_call_id or "")
        return await super().arun(tool_input, *args, tool_call_id=tool_call_id, **options)

    async def _arun(self, /, **arguments: Any) -> Any:
        result = await self.box.use(self.name, arguments, id=_id.get())
        if result.is_error:
            raise ToolException(seen(result))  # which LangChain tells the model
        if any(block.get("type") == "image" for block in result.content):
            return [_block(block) for block in result.content]
        return seen(result)

    def _run(self, /, **arguments: Any) -> Any:
        raise NotImplementedError("an instance is called from its event loop: run the agent with ainvoke")


def _tool(tools: LangChainTools, offered: Offered) -> BaseTool:
    return _Tool(name=offered.name, description=offered.description, args_schema=offered.parameters, box=tools)


class _Callback(AsyncCallbackHandler):
    raise_error = True
    """What it raises ends the run."""

    def __init__(self, tools: LangChainTools) -> None:
        self._tools = tools

    async def on_chat_model_start(self, serialized: Any, messages: list[list[BaseMessage]], **_: Any) -> None:
        for conversation in messages:
            self._tools.hear([_message(message) for message in conversation])

    async def on_llm_end(self, response: LLMResult, **_: Any) -> None:
        for generation, *_others in response.generations:
            if not isinstance(generation, ChatGeneration) or not isinstance(generation.message, AIMessage):
                continue
            said = generation.message
            known = said.response_metadata
            reason = known.get("finish_reason") or known.get("stop_reason") or ""
            usage = said.usage_metadata
            await self._tools.say(
                _message(said),
                model=known.get("model_name", ""),
                finish_reason=_REASONS.get(reason, reason),
                prompt_tokens=usage["input_tokens"] if usage else None,
                completion_tokens=usage["output_tokens"] if usage else None,
            )


def _message(message: BaseMessage) -> dict[str, Any]:
    found = convert_to_openai_messages(message)
    assert isinstance(found, dict)
    for call in getattr(message, "invalid_tool_calls", ()):  # what LangChain could not read, the model said, too
        function = {"name": call["name"] or "", "arguments": call["args"] or ""}
        found.setdefault("tool_calls", []).append({"id": call["id"], "type": "function", "function": function})
    return found


def _block(block: Mapping[str, Any]) -> dict[str, Any]:
    if block.get("type") == "image":
        return {"type": "image", "base64": block["data"], "mime_type": block["mimeType"]}
    return {"type": "text", "text": seen(ToolResult(content=[dict(block)]))}
