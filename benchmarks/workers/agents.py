"""Runs of agents that call a tool, in an episode: ``python -m benchmarks.workers.agents URL``.

A round is a line ``{"framework": ..., "own": ..., "calls": n}``, answered with the CPU seconds of a call. ``own`` is a
function tool of the framework, whose author calls the instance; else it is the adapter, which writes down what is said.
"""

import asyncio
import json
import sys
import time
from collections.abc import Sequence
from typing import Any

from agents import Agent, Model, ModelResponse, Runner, Usage, function_tool, set_tracing_disabled
from openai.types.responses import ResponseFunctionToolCall, ResponseOutputMessage, ResponseOutputText
from pydantic_ai import Agent as PydanticAgent
from pydantic_ai.messages import ModelMessage, TextPart, ToolCallPart
from pydantic_ai.messages import ModelResponse as PydanticResponse
from pydantic_ai.models.function import AgentInfo, FunctionModel

from aenv import attach
from aenv.integrations.openai_agents import OpenAIAgentsTools
from aenv.integrations.pydantic_ai import PydanticAITools
from aenv.rl import Episode, Rules, Task

GIVEN = '{"a": 1, "b": 2}'


class Scripted(Model):
    """Calls the tool so often, and is done."""

    def __init__(self, calls: int) -> None:
        self.left = calls

    async def get_response(self, *_: Any, **__: Any) -> ModelResponse:
        self.left -= 1
        said: Any
        if self.left >= 0:
            said = ResponseFunctionToolCall(
                arguments=GIVEN, call_id=f"c{self.left}", name="add", type="function_call", status="completed"
            )
        else:
            text = ResponseOutputText(annotations=[], text="Done.", type="output_text")
            said = ResponseOutputMessage(id="m", content=[text], role="assistant", status="completed", type="message")
        return ModelResponse(output=[said], usage=Usage(), response_id=None)

    def stream_response(self, *_: Any, **__: Any) -> Any:
        raise NotImplementedError


async def openai_agents(env: Episode, own: bool, calls: int) -> None:
    async def add(a: int, b: int) -> str:
        return (await env.call_tool("add", {"a": a, "b": b})).text

    async with OpenAIAgentsTools(env) as tools:
        offered: Sequence[Any] = [function_tool(add)] if own else tools.tools
        agent = Agent("adder", tools=[*offered], model=Scripted(calls))
        await Runner.run(agent, "Add.", hooks=None if own else tools.hooks, max_turns=calls + 1)


async def pydantic_ai(env: Episode, own: bool, calls: int) -> None:
    left = calls

    def answer(messages: list[ModelMessage], info: AgentInfo) -> PydanticResponse:
        nonlocal left
        left -= 1
        return PydanticResponse([ToolCallPart("add", GIVEN) if left >= 0 else TextPart("Done.")])

    async def add(a: int, b: int) -> str:
        return (await env.call_tool("add", {"a": a, "b": b})).text

    async with PydanticAITools(env) as tools:
        agent: PydanticAgent[Any] = PydanticAgent(
            FunctionModel(answer), tools=[add] if own else [], capabilities=[] if own else [tools.capability]
        )
        await agent.run("Add.")


async def main(url: str) -> None:
    """Run agents until stdin ends."""
    set_tracing_disabled(True)
    runs = {"openai-agents": openai_agents, "pydantic-ai": pydantic_ai}
    _answer({"ready": True})
    while line := await asyncio.to_thread(sys.stdin.readline):
        asked = json.loads(line)
        env = Episode("few", provision=attach(url))
        env.begin(Task(), Rules(), None)
        async with env:
            await env.list_tools()
            begun = time.process_time()
            await runs[asked["framework"]](env, asked["own"], asked["calls"])
            spent = time.process_time() - begun
        if len([call for turn in env.turns for call in turn.calls]) != asked["calls"]:
            raise RuntimeError(f"not all was called: {env.turns}")
        _answer(spent / asked["calls"])


def _answer(value: object) -> None:
    sys.stdout.write(json.dumps(value) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1]))
