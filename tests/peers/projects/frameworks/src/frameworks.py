"""Agents of frameworks as they are, each with a model that says how many messages of a user it was shown."""

from importlib.util import find_spec
from typing import Any

from aenv import register_agent


def answer(users: int) -> str:
    return f"heard {users}"


if find_spec("agents"):
    from agents import Agent, Model, ModelResponse, Usage, set_tracing_disabled
    from openai.types.responses import ResponseOutputMessage, ResponseOutputText

    set_tracing_disabled(True)

    class Counting(Model):
        async def get_response(self, system_instructions: Any, input: Any, *args: Any, **kwargs: Any) -> ModelResponse:
            text = answer(sum(item.get("role") == "user" for item in input))
            part = ResponseOutputText(text=text, type="output_text", annotations=[])
            said = ResponseOutputMessage(id="1", content=[part], role="assistant", status="completed", type="message")
            return ModelResponse(output=[said], usage=Usage(), response_id=None)

        def stream_response(self, *args: Any, **kwargs: Any) -> Any:
            raise NotImplementedError

    register_agent(Agent(name="it", model=Counting()), name="openai", description="Counts.")

if find_spec("pydantic_ai"):
    from pydantic_ai import Agent as Typed
    from pydantic_ai.messages import ModelMessage, TextPart, UserPromptPart
    from pydantic_ai.messages import ModelResponse as Answered
    from pydantic_ai.models.function import AgentInfo, FunctionModel

    def count(messages: list[ModelMessage], info: AgentInfo) -> Answered:
        parts = [part for message in messages for part in message.parts]
        return Answered(parts=[TextPart(answer(sum(isinstance(part, UserPromptPart) for part in parts)))])

    register_agent(Typed(FunctionModel(count)), name="pydantic")

if find_spec("langgraph"):
    from langchain_core.messages import AIMessage, HumanMessage
    from langgraph.graph import START, MessagesState, StateGraph

    def reply(state: MessagesState) -> dict[str, Any]:
        return {"messages": [AIMessage(answer(sum(isinstance(one, HumanMessage) for one in state["messages"])))]}

    graph = StateGraph(MessagesState)
    graph.add_node("reply", reply)
    graph.add_edge(START, "reply")
    register_agent(graph.compile(), name="langgraph")

if find_spec("camel"):
    from camel.agents import ChatAgent
    from camel.models.stub_model import StubModel
    from camel.types import ModelType

    class Stub(StubModel):
        async def _arun(self, messages: Any, *args: Any, **kwargs: Any) -> Any:
            found = await super()._arun(messages, *args, **kwargs)
            found.choices[0].message.content = answer(sum(one["role"] == "user" for one in messages))
            return found

    register_agent(ChatAgent("Count.", model=Stub(ModelType.STUB)), name="camel")
