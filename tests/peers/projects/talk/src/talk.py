"""An agent that says a message again, word by word, and one that never ends."""

import asyncio
from collections.abc import AsyncIterator

from aenv import Conversation, ModelError, register_agent, register_reward

ended: list[str] = []


@register_agent(name="parrot")
async def parrot(message: str, conversation: Conversation) -> AsyncIterator[str]:
    """Says again what it hears, and how much that was so far."""
    if message == "fail":
        raise ValueError("I cannot")
    if message == "lost":
        raise ModelError("the model is gone")
    if message == "go on":
        yield "I "
        try:
            await asyncio.Event().wait()
        finally:
            ended.append(conversation.session)
    conversation.state["heard"] = conversation.state.get("heard", 0) + len(message.split())
    for word in message.split():
        yield word + " "
    yield f"({conversation.state['heard']})"


@register_reward
def words(conversations: list[Conversation]) -> dict[str, float]:
    """How many words were heard, and how many turns were cut off."""
    return {"score": float(sum(one.state["heard"] for one in conversations)), "cut": float(len(ended))}
