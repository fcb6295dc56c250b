"""The clients of OpenAI and Anthropic and an agent of openai-agents, as they are, on a base URL that they are told."""

from __future__ import annotations

import asyncio
import json

import anthropic
import openai
from agents import (
    Agent,
    ModelSettings,
    OpenAIChatCompletionsModel,
    OpenAIResponsesModel,
    Runner,
    function_tool,
    set_tracing_disabled,
)

ASKED = [{"role": "user", "content": "say hello there"}]
CALL = [{"role": "user", "content": 'call work {"times": 2}'}]
SCHEMA = {"type": "object", "properties": {"times": {"type": "integer"}}}


def chat() -> list[object]:
    client = openai.OpenAI(max_retries=0)
    tools = [{"type": "function", "function": {"name": "work", "parameters": SCHEMA}}]
    said = client.chat.completions.create(model="stand-in", messages=ASKED).choices[0].message.content
    streamed = "".join(
        chunk.choices[0].delta.content or ""
        for chunk in client.chat.completions.create(model="stand-in", messages=ASKED, stream=True)
    )
    called = client.chat.completions.create(model="stand-in", messages=CALL, tools=tools).choices[0].message.tool_calls
    return [said, streamed, called[0].function.name, json.loads(called[0].function.arguments)]


def responses() -> list[object]:
    client = openai.OpenAI(max_retries=0)
    tools = [{"type": "function", "name": "work", "parameters": SCHEMA, "strict": False}]
    said = client.responses.create(model="stand-in", input="say hello there").output_text
    with client.responses.stream(model="stand-in", input="say hello there") as stream:
        streamed = "".join(event.delta for event in stream if event.type == "response.output_text.delta")
        final = stream.get_final_response()
    assert final.output_text == streamed
    with client.responses.stream(model="stand-in", input=CALL[0]["content"], tools=tools) as stream:
        called = stream.get_final_response().output[0]
    return [said, streamed, called.name, json.loads(called.arguments)]


def messages() -> list[object]:
    client = anthropic.Anthropic(max_retries=0)
    tools = [{"name": "work", "input_schema": SCHEMA}]
    said = client.messages.create(model="stand-in", max_tokens=99, messages=ASKED).content[0].text
    with client.messages.stream(model="stand-in", max_tokens=99, messages=ASKED) as stream:
        streamed = "".join(stream.text_stream)
        assert stream.get_final_message().usage.output_tokens == len(said)
    with client.messages.stream(model="stand-in", max_tokens=99, messages=CALL, tools=tools) as stream:
        final = stream.get_final_message()
    assert final.stop_reason == "tool_use"
    return [said, streamed, final.content[0].name, final.content[0].input]


async def agents() -> list[object]:
    set_tracing_disabled(True)
    seen = []

    @function_tool
    def work(times: int) -> str:
        seen.append(times)
        return "say worked"

    found: list[object] = []
    client = openai.AsyncOpenAI()
    for kind in (OpenAIChatCompletionsModel, OpenAIResponsesModel):
        agent = Agent("worker", model=kind("stand-in", client), tools=[work], model_settings=ModelSettings(top_p=0.5))
        found.append((await Runner.run(agent, CALL[0]["content"])).final_output)
        running = Runner.run_streamed(agent, CALL[0]["content"])
        async for _ in running.stream_events():
            pass
        found.append(running.final_output)
    return [*found, seen]


def refused() -> list[object]:
    codes: list[object] = []
    for client in (openai.OpenAI(api_key="ek-wrong"), anthropic.Anthropic(api_key="ek-wrong")):
        try:
            client.models.list() if isinstance(client, openai.OpenAI) else client.messages.create(
                model="stand-in", max_tokens=9, messages=ASKED
            )
        except (openai.AuthenticationError, anthropic.AuthenticationError) as exc:
            codes.append(exc.status_code)
    return codes


told = {"chat": chat(), "responses": responses(), "messages": messages(), "refused": refused()}
told["agents"] = asyncio.run(agents())
print(json.dumps(told))
