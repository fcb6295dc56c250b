"""Agents as environments: each is served as tools to talk to it, whether it is a function or a framework's object."""

from __future__ import annotations

import functools
import inspect
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator
from contextlib import aclosing
from typing import Any

from aenv.errors import AuthorError, StartFailed, TooLarge
from aenv.models import ToolResult
from aenv.runtime import signatures
from aenv.runtime.context import Context, printable
from aenv.runtime.conversations import MOST_BYTES, Conversation, Conversations
from aenv.runtime.functions import Function, Raised
from aenv.runtime.registry import Mark

CHAT, HISTORY, RESET = "chat", "chat_history", "chat_reset"
TOOLS_EACH = 3
_CONTEXT = "aenv_context"
_SESSION = "Which conversation it is; each name is one of its own."
_ANSWERED = {
    "type": "object",
    "properties": {"answer": {"type": "string"}, "session": {"type": "string"}},
    "required": ["answer", "session"],
}


# What frameworks want. What their agents remember is kept in the conversation, so that it is saved and forked.


async def _openai_agents(agent: Any, message: str, conversation: Conversation) -> str:
    from agents import Runner

    asked = {"role": "user", "content": message}
    found = await Runner.run(agent, [*conversation.state.get("items", ()), asked])
    conversation.state["items"] = found.to_input_list()
    return str(found.final_output)


async def _pydantic_ai(agent: Any, message: str, conversation: Conversation) -> str:
    from pydantic_ai.messages import ModelMessagesTypeAdapter

    before = ModelMessagesTypeAdapter.validate_python(conversation.state.get("messages", []))
    found = await agent.run(message, message_history=before)
    conversation.state["messages"] = ModelMessagesTypeAdapter.dump_python(found.all_messages(), mode="json")
    return str(found.output)


async def _langgraph(graph: Any, message: str, conversation: Conversation) -> str:
    from langchain_core.messages import messages_from_dict, messages_to_dict

    before = messages_from_dict(conversation.state.get("messages", []))
    found = await graph.ainvoke({"messages": [*before, ("user", message)]})
    conversation.state["messages"] = messages_to_dict(found["messages"])
    return str(found["messages"][-1].text)


async def _camel(agent: Any, message: str, conversation: Conversation) -> str:
    from camel.messages import BaseMessage
    from camel.types import OpenAIBackendRole

    own = agent.clone(with_memory=False)
    for said in conversation.messages:
        role = OpenAIBackendRole(said["role"])
        make = BaseMessage.make_user_message if said["role"] == "user" else BaseMessage.make_assistant_message
        own.update_memory(make(said["role"], said["content"]), role)
    return str((await own.astep(message)).msgs[0].content)


_FRAMEWORKS: dict[tuple[str, str], Callable[[Any, str, Conversation], Awaitable[str]]] = {
    ("agents", "Agent"): _openai_agents,
    ("camel", "ChatAgent"): _camel,
    ("langgraph", "CompiledStateGraph"): _langgraph,
    ("pydantic_ai", "Agent"): _pydantic_ai,
}
"""How objects are asked, by the package and the name of their class."""


class Agent:
    """One registered agent: what it takes, and the tools it is served as."""

    def __init__(self, mark: Mark, conversations: Conversations) -> None:
        self.name = mark.name
        self._conversations = conversations
        self._function = function = Function(mark._replace(function=_callable(mark)))
        self.description = function.description or "An agent: send it a message, and it answers."
        properties = function.arguments.schema["properties"]
        if "message" not in properties or {*function.arguments.schema.get("required", ())} > {"message"}:
            raise StartFailed(
                f"{mark.place}: {self.name}() is an agent, and is given a message alone",
                hint="let it take 'message: str'; what it takes beside needs a default",
            )
        if "session" in properties:
            raise StartFailed(
                f"{mark.place}: {self.name}() takes a session, which is the runtime's",
                hint="take a Conversation: it knows its session",
            )

    def tools(self, prefix: str) -> Iterator[Function]:
        """What it is served as. The first is to talk to it."""
        chat = Function(Mark("agent", self._chatting(), prefix + CHAT, {}))
        chat.result.schema = _ANSWERED
        yield chat
        for name, make in ((HISTORY, self._telling), (RESET, self._resetting)):
            yield Function(Mark("agent", make(), prefix + name, {}))

    async def answer(self, given: dict[str, Any], session: str, context: Context) -> str:
        """Its answer to a message in a conversation; pieces of it go to the caller as they come."""
        message = given["message"]
        async with self._conversations.turn(self.name, session) as conversation:
            self._conversations.check(conversation, message)
            try:
                value = await self._function.call(given, context.within(conversation))
            except Raised as exc:
                raise exc.cause from None
            answer = await _joined(value, context) if inspect.isasyncgen(value) else value
            if not isinstance(answer, str):
                raise AuthorError(f"{self.name}() is an agent, and returned {type(answer).__name__}: return text")
            answer = printable(answer)
            self._conversations.keep(conversation, message, answer)
            return answer

    def _chatting(self) -> Callable[..., Any]:
        async def chat(**given: Any) -> ToolResult:
            context, session = given.pop(_CONTEXT), given.pop("session", "")
            answer = await self.answer(given, session, context)
            structured = {"answer": answer, "session": session}
            return ToolResult(content=[{"type": "text", "text": answer}], structured=structured, is_error=False)

        function = self._function.mark.function
        hints = signatures.hints_of(function)
        properties = self._function.arguments.schema["properties"]
        kept = [
            parameter.replace(annotation=hints.get(name, Any), kind=parameter.KEYWORD_ONLY)
            for name, parameter in inspect.signature(function).parameters.items()
            if name in properties
        ]
        own = inspect.Parameter("session", inspect.Parameter.KEYWORD_ONLY, default="", annotation=str)
        filled = inspect.Parameter(_CONTEXT, inspect.Parameter.KEYWORD_ONLY, annotation=Context)
        chat.__signature__ = inspect.Signature([*kept, own, filled])  # type: ignore[attr-defined]
        chat.__annotations__ = {one.name: one.annotation for one in (*kept, own, filled)}
        known = {name: found["description"] for name, found in properties.items() if "description" in found}
        about = {"message": "What to say.", **known, "session": _SESSION}
        arguments = "\n".join(f"    {name}: {text}" for name, text in about.items())
        chat.__doc__ = f"{self.description}\n\nArgs:\n{arguments}"
        chat.__wrapped__ = function  # type: ignore[attr-defined]
        return chat

    def _telling(self) -> Callable[..., Any]:
        async def chat_history(session: str = "") -> dict[str, Any]:
            return {"session": session, "messages": self._conversations.get(self.name, session).messages}

        chat_history.__doc__ = f"What was said in a conversation so far.\n\nArgs:\n    session: {_SESSION}"
        return chat_history

    def _resetting(self) -> Callable[..., Any]:
        async def chat_reset(session: str = "") -> dict[str, Any]:
            return {"session": session, "forgotten": await self._conversations.forget(self.name, session)}

        chat_reset.__doc__ = (
            f"Forget a conversation; its next message begins it anew.\n\nArgs:\n    session: {_SESSION}"
        )
        return chat_reset


def _callable(mark: Mark) -> Callable[..., Any]:
    """The agent as a function: an object of a framework is asked as that wants."""
    found: Any = mark.function
    if inspect.isroutine(found) or isinstance(found, functools.partial):
        return mark.function
    for cls in type(found).__mro__:
        if ask := _FRAMEWORKS.get((cls.__module__.partition(".")[0], cls.__name__)):
            return functools.partial(ask, found)
    if callable(found):
        return mark.function
    known = ", ".join(f"{package}.{name}" for package, name in _FRAMEWORKS)
    raise StartFailed(
        f"agent {mark.name!r} is a {type(found).__name__}, which nobody here knows how to ask",
        hint=f"register a function, or an object of {known}",
    )


async def _joined(pieces: AsyncGenerator[Any, Any], context: Context) -> str:
    """The answer of a generator."""
    said: list[str] = []
    size = told = 0
    printing = context.printing

    async def tell(text: str) -> None:
        nonlocal told
        if text:
            told += 1
            await context.piece(text, told)

    async with aclosing(pieces):
        async for piece in pieces:
            if not isinstance(piece, str):
                raise AuthorError(f"an agent's pieces are text, and one is {type(piece).__name__}")
            said.append(piece)
            size += len(piece)
            if size > MOST_BYTES:
                raise TooLarge(f"the answer is over {MOST_BYTES} bytes")
            # A secret may come in two pieces, so what may become one waits for the next.
            await tell(piece if printing is None else printing.pass_on(printable(piece).encode()).decode())
    if printing is not None:
        await tell(printing.end().decode())
    return "".join(said)
