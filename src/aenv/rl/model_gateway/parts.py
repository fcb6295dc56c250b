"""What the dialects have in common: text, tool calls and their arguments."""

from __future__ import annotations

from typing import Any

import msgspec

from aenv.errors import Invalid
from aenv.rl.model_gateway.chat import Body


def text_of(given: Any) -> str:
    """Text, or a list of blocks of it."""
    if given is None or isinstance(given, str):
        return given or ""
    if isinstance(given, list) and all(isinstance(block, dict) and "text" in block for block in given):
        return "\n".join(str(block["text"]) for block in given)
    raise Invalid("text, or a list of blocks of text, is wanted")


def content(parts: list[Body]) -> str | list[Body]:
    """Parts of a message; text alone is told as such."""
    if all(part["type"] == "text" for part in parts):
        return "\n".join(part["text"] for part in parts)
    return parts


def thought(message: Body) -> str:
    """What a model has thought, as older servers call it, and newer ones."""
    return message.get("reasoning_content") or message.get("reasoning") or ""


def thinking(said: str) -> Body:
    """The same, to be told to either."""
    return {"reasoning_content": said, "reasoning": said}


def tool_call(id: Any, name: Any, written: str) -> Body:
    """A call as chat completions has it."""
    return {"id": id, "type": "function", "function": {"name": name, "arguments": written}}


def called(call: Body) -> tuple[str, str, str]:
    """A call of a model: its id, the tool's name, and the arguments as they were written."""
    function = call.get("function") or {}
    return call.get("id") or "", function.get("name") or "", function.get("arguments") or ""


def arguments(written: str) -> Body:
    """Arguments as an object. What a model wrote that is none is kept under a name, and its agent will refuse it."""
    try:
        found = msgspec.json.decode(written or "{}")
    except (msgspec.MsgspecError, UnicodeError, RecursionError):
        found = None
    return found if isinstance(found, dict) else {"_not_json": written}
