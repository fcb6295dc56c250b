"""An agent that says a message again, word by word, and one that never ends."""

import asyncio
from collections.abc import AsyncIterator

from aenv import Conversation, ModelError, register_agent, register_reward

begun: list[str] = []
ended: list[str] = []


@register_agent
async def parrot(message: str, conversation: Conversation, loud: bool = False) -> AsyncIterator[str]:
    """Says again what it hears, and how much that was so far.

    Args:
        loud: In capitals.
    """
    conversation.state["heard"] = conversation.state.get("heard", 0) + len(message.split())
    if message == "fail":
        raise ValueError("I cannot")
    if message == "lost":
        raise ModelError("the model is gone")
    if message == "odd":
        yield b"no text"
    if message == "go on":
        begun.append(conversation.session)
        yield "I "
        try:
            await asyncio.Event().wait()
        finally:
            ended.append(conversation.session)
    for word in message.split():
        yield f"{word.upper() if loud else word} "
    yield f"({conversation.state['heard']})"


@register_reward
def words(conversations: list[Conversation]) -> dict[str, float]:
    """How many words were heard, how many turns go on, and how many were cut off."""
    heard = float(sum(one.state["heard"] for one in conversations))
    return {"score": heard, "going": len(begun) - len(ended), "cut": len(ended)}
