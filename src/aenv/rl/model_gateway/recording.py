"""Records of the gateway as the messages and turns of an episode's trajectory."""

from __future__ import annotations

from typing import Any

import msgspec

from aenv.rl.model_gateway.episodes import Record
from aenv.rl.model_gateway.parts import arguments, text_of
from aenv.rl.recording import Episode
from aenv.rl.trajectory import Tokens

_TOKEN = 8
"""Bytes that a token counts for."""


async def tell(env: Episode, record: Record) -> int:
    """Write down what a model was given and answered; about how many bytes that is.

    A call that goes on with the conversation adds what is new. One that does not, as of an agent that has shortened
    its history, adds all that it was given.
    """
    if record.message is None:
        return 0
    env.go_on()
    known = [_compared(message) for message in env.messages]
    given = [_compared(message) for message in record.messages]
    told = len(known) if given[: len(known)] == known else 0
    new = record.messages[told:]
    if record.tools and not env.tools:
        env.tools = record.tools
    env.hear(*new)
    await env.say(
        record.message,
        model=record.model,
        finish_reason=record.finish_reason,
        seconds=record.seconds,
        prompt_tokens=record.prompt_tokens,
        completion_tokens=record.completion_tokens,
        tokens=record.tokens,
    )
    tokens = record.tokens or Tokens()
    ids = sum(len(each or ()) for each in (tokens.prompt, tokens.completion, tokens.logprobs))
    return len(msgspec.json.encode((new, record.message))) + _TOKEN * ids


def _compared(message: dict[str, Any]) -> bytes:
    """What must be the same for two messages to be the same one: clients write them anew in their own way."""
    calls = message.get("tool_calls")
    found = (
        message.get("role"),
        _said(message.get("content")),
        [_called(call) for call in calls] if isinstance(calls, list) else calls or [],
        message.get("tool_call_id"),
    )
    return msgspec.json.encode(found, order="sorted")


def _said(content: Any) -> Any:
    is_text = isinstance(content, list) and all(isinstance(part, dict) and "text" in part for part in content)
    return text_of(content) if content is None or is_text else content


def _called(call: Any) -> Any:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict):
        return call
    given = function.get("arguments")
    return call.get("id"), function.get("name"), arguments(given) if isinstance(given, str) else given or {}
