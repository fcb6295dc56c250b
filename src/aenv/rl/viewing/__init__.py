"""Trajectories for eyes: in a terminal (``text``) and as one page for a browser (``html``). Here is what both share.

What tools and models wrote is hostile: neither viewer lets it act.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, NamedTuple

from aenv.models import ToolResult
from aenv.rl.trajectory import Trajectory


class Step(NamedTuple):
    """A turn, and the messages that came before it."""

    heard: list[int]
    """Of the trajectory's messages, those that the model was given here and that no call already shows."""
    turn: int | None
    """None after the last turn."""


def steps(trajectory: Trajectory) -> list[Step]:
    """The order in which things were said and done."""
    made = {call.id for call in trajectory.calls if call.id}

    def between(begin: int, end: int) -> list[int]:
        return [place for place in range(begin, end) if not _answers(trajectory.messages[place], made)]

    found: list[Step] = []
    seen, count = 0, len(trajectory.messages)
    if not any(turn.generation for turn in trajectory.turns) and count:
        found, seen = [Step(between(0, count), None)], count
    for number, turn in enumerate(trajectory.turns):
        at = seen if turn.generation is None else min(max(turn.generation.message, seen), count)
        found.append(Step(between(seen, at), number))
        seen = at if turn.generation is None else min(at + 1, count)
    if rest := between(seen, count):
        found.append(Step(rest, None))
    return found


def _answers(message: Mapping[str, Any], made: set[str]) -> bool:
    """Whether a message only repeats the result of a call that is shown."""
    return message.get("role") == "tool" and str(message.get("tool_call_id")) in made


def as_json(value: Any) -> str:
    """A value as it is read best; of one that goes too deep, that it does."""
    try:
        return json.dumps(value, ensure_ascii=False)
    except RecursionError:
        return "(nested too deep to show)"


def message_text(message: Mapping[str, Any]) -> str:
    """What a message in OpenAI's form says; of parts that are no text, what they are."""
    thought = message.get("reasoning_content")
    said = _content(message.get("content"))
    return f"({thought})\n{said}" if isinstance(thought, str) and thought else said


def _content(content: Any) -> str:
    if not isinstance(content, list):
        return content if isinstance(content, str) else "" if content is None else as_json(content)
    return "\n".join(_block(block) for block in content)


def _block(block: Any) -> str:
    if isinstance(block, Mapping) and isinstance(block.get("text"), str):
        return str(block["text"])
    kind = block.get("mimeType") or block.get("type") if isinstance(block, Mapping) else None
    return f"[{kind or 'content'}]"


def result_text(result: ToolResult) -> str:
    """What a tool answered, as text; of content that is none, what it is."""
    return _content(result.content) or ("" if result.structured is None else as_json(result.structured))


class Asked(NamedTuple):
    """A call that a model asked for."""

    id: str
    name: str
    written: str
    """Its arguments as the model wrote them, which need not be JSON."""

    @property
    def arguments(self) -> dict[str, Any]:
        """The arguments; what is no object is kept as one called ``arguments``."""
        try:
            found = json.loads(self.written)
        except (ValueError, RecursionError):
            return {"arguments": self.written}
        return found if isinstance(found, dict) else {"arguments": found}


def tool_calls(message: Mapping[str, Any]) -> list[Asked]:
    """The calls that a message in OpenAI's form asks for."""
    asked = message.get("tool_calls")
    found = []
    for call in asked if isinstance(asked, list) else []:
        function = call.get("function") if isinstance(call, Mapping) else None
        if isinstance(function, Mapping):
            given = function.get("arguments")
            written = given if isinstance(given, str) else as_json(given)
            found.append(Asked(str(call.get("id") or ""), str(function.get("name")), written.strip() or "{}"))
    return found
