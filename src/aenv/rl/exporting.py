"""Trajectories as the rows that trainers take. Only a scored episode becomes a row, and every other one is counted.

A row holds what a model read and wrote, and the score. What else is known of a task, such as the arguments of its
reward, is in none.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

from aenv.errors import Invalid, did_you_mean
from aenv.rl.trajectory import Trajectory
from aenv.rl.viewing import message_text, result_text, tool_calls

Row = dict[str, Any]
Message = dict[str, Any]
_KEPT = ("role", "content", "name", "tool_calls", "tool_call_id")
_THOUGHT = ("reasoning_content", "thinking")
"""Names under which servers give what a model thought, and chat templates take it."""
_SIDES = {"system": "system", "developer": "system", "user": "human", "tool": "observation", "function": "observation"}


class LeftOut(Exception):
    """Why a trajectory is no row, in few words: they are what is counted."""


class Exported:
    """The rows, made one after the other while they are read. The counters are of the rows read so far."""

    def __init__(self, trajectories: Iterable[Trajectory], format: str) -> None:
        self.format = format
        self.rows = 0
        self.left_out: dict[str, int] = {}
        """How many trajectories are in no row, by the reason."""
        self._trajectories = trajectories
        self._make = FORMATS[format]

    def __iter__(self) -> Iterator[Row]:
        self.rows = 0
        self.left_out = counted = Counter[str]()
        for row in self._make(_scored(self._trajectories, counted), counted):
            self.rows += 1
            yield row


def export(trajectories: Iterable[Trajectory], format: str) -> Exported:
    """Rows in one of ``FORMATS``."""
    if format not in FORMATS:
        raise Invalid(f"there is no format {str(format)[:100]!r}", hint=did_you_mean(str(format), FORMATS))
    return Exported(trajectories, format)


def _scored(trajectories: Iterable[Trajectory], counted: Counter[str]) -> Iterator[Trajectory]:
    for trajectory in trajectories:
        if trajectory.ok:
            yield trajectory
        else:
            counted["failed"] += 1


# Conversations


def conversation(of: Trajectory) -> list[Message]:
    """What was said and done, in OpenAI's form. Of an agent that told none, it is made of its task and its calls."""
    messages = of.messages or list(_made(of))
    if not any(message.get("role") == "assistant" for message in messages):
        raise LeftOut("nothing said or done")
    return messages


def _made(of: Trajectory) -> Iterator[Message]:
    if of.task.system:
        yield {"role": "system", "content": of.task.system}
    yield {"role": "user", "content": of.task.instruction}
    number = 0
    for turn in of.turns:
        calls = [(call.id or f"call_{number + place}", call) for place, call in enumerate(turn.calls)]
        number += len(calls)
        if calls:
            asked = [_tool_call(id, _tool_name(call.name), json.dumps(call.arguments)) for id, call in calls]
            yield {"role": "assistant", "content": None, "tool_calls": asked}
        for id, call in calls:
            said = "(no result)" if call.result is None else result_text(call.result)
            yield {"role": "tool", "tool_call_id": id, "content": said}
    if isinstance(of.answer, str) and of.answer:
        yield {"role": "assistant", "content": of.answer}


def _tool_name(name: str) -> str:
    """Without the environment before it, as a model would have been offered it."""
    return re.sub(r"[^A-Za-z0-9_-]", "_", name.rsplit("/", 1)[-1])[:64] or "tool"


def _tool_call(id: str, name: str, arguments: Any) -> dict[str, Any]:
    return {"id": id, "type": "function", "function": {"name": name, "arguments": arguments}}


def _parts(of: Trajectory) -> tuple[list[Message], list[Message]]:
    """What stood there before the model first spoke, and everything after, as chat templates take it."""
    messages = [_templated(message) for message in conversation(of)]
    first = next(place for place, message in enumerate(messages) if message["role"] == "assistant")
    return messages[:first], messages[first:]


def _templated(message: Message) -> Message:
    """Templates write the arguments of a call themselves, and so take objects; and few of them bear a null."""
    found = {key: message[key] for key in (*_KEPT, *_THOUGHT) if message.get(key) is not None}
    found.setdefault("content", "")
    if asked := tool_calls(message):
        found["tool_calls"] = [_tool_call(call.id, call.name, call.arguments) for call in asked]
    else:
        found.pop("tool_calls", None)
    return {"role": "", **found}


# Formats


def _each(make: Callable[[Trajectory], Row]) -> Callable[[Iterable[Trajectory], Counter[str]], Iterator[Row]]:
    """A format with one row for each trajectory."""

    def rows(trajectories: Iterable[Trajectory], counted: Counter[str]) -> Iterator[Row]:
        for trajectory in trajectories:
            try:
                row = make(trajectory)
            except LeftOut as exc:
                counted[str(exc)] += 1
            else:
                yield row

    return rows


def _openai(of: Trajectory) -> Row:
    row: Row = {"messages": [_strict(message) for message in conversation(of)]}
    return row | {"tools": of.tools} if of.tools else row  # an empty list is refused


def _strict(message: Message) -> Message:
    """Only what the format knows: a file with anything else is refused."""
    found = {key: message[key] for key in _KEPT if message.get(key) is not None}
    asked = [_tool_call(call.id, call.name, call.written) for call in tool_calls(message)]
    found.pop("tool_calls", None)
    found.setdefault("content", None if asked else "")
    return found | {"tool_calls": asked} if asked else found


def _sharegpt(of: Trajectory) -> Row:
    turns: list[dict[str, str]] = []
    for message in conversation(of):
        side, value = _turn(message)
        if turns and turns[-1]["from"] == side and side != "function_call":  # readers want the sides to alternate
            turns[-1]["value"] += f"\n{value}"
        else:
            turns.append({"from": side, "value": value})
    offered = [tool.get("function", tool) for tool in of.tools]
    return {"conversations": turns, "tools": json.dumps(offered, ensure_ascii=False)}


def _turn(message: Message) -> tuple[str, str]:
    role = str(message.get("role"))
    said = message_text({"content": message.get("content")})
    if role != "assistant":
        if role not in _SIDES:
            raise LeftOut("a role that the format does not have")
        return _SIDES[role], said
    thought = next((message[key] for key in _THOUGHT if isinstance(message.get(key), str)), "")
    asked = [{"name": call.name, "arguments": call.arguments} for call in tool_calls(message)]
    if not asked:
        return "gpt", _thinking(thought) + said
    # There is no turn that has both words and calls. What is said before calls is taken for thinking, as readers do.
    before = "\n".join(part for part in (thought, said) if part)
    return "function_call", _thinking(before) + json.dumps(asked[0] if len(asked) == 1 else asked, ensure_ascii=False)


def _thinking(text: str) -> str:
    return f"<think>\n{text}\n</think>\n\n" if text else ""


def _trl(of: Trajectory) -> Row:
    prompt, completion = _parts(of)
    return {
        "prompt": prompt,
        "completion": completion,
        "reward": of.reward,
        "group": _group(of),
        "tools": of.tools,
    }


def _group(of: Trajectory) -> str:
    return of.group or of.task.id


class _Side(NamedTuple):
    """What a pair needs of a trajectory."""

    reward: float
    prompt: list[Message]
    completion: list[Message]
    tools: list[dict[str, Any]]


def _dpo(trajectories: Iterable[Trajectory], counted: Counter[str]) -> Iterator[Row]:
    """The best and the worst of each group. Only these two are kept while the others are read."""
    groups: dict[str, tuple[_Side, _Side, int]] = {}
    for of in trajectories:
        try:
            side = _Side(of.reward, *_parts(of), of.tools)
        except LeftOut as exc:
            counted[str(exc)] += 1
            continue
        best, worst, count = groups.get(_group(of), (side, side, 0))
        best = side if side.reward > best.reward else best
        worst = side if side.reward < worst.reward else worst
        groups[_group(of)] = best, worst, count + 1
    for best, worst, count in groups.values():
        if not best.reward > worst.reward:
            counted["no other reward in its group"] += count
        elif best.prompt != worst.prompt:
            counted["another prompt than its pair"] += count
        else:
            if count > 2:
                counted["neither best nor worst of its group"] += count - 2
            row = {"prompt": best.prompt, "chosen": best.completion, "rejected": worst.completion}
            yield row | {"tools": best.tools} if best.tools else row


def _tokens(of: Trajectory) -> Row:
    """One sequence: what came between two answers of the model is in the completion, and masked."""
    prompt: list[int] = []
    completion: list[int] = []
    mask: list[int] = []
    logprobs: list[float] | None = []
    if not of.turns:
        raise LeftOut("no token ids")
    for number, turn in enumerate(of.turns):
        tokens = turn.generation.tokens if turn.generation else None
        if tokens is None or tokens.prompt is None or tokens.completion is None:
            raise LeftOut("no token ids")
        if turn.generation and turn.generation.completion_tokens not in (None, len(tokens.completion)):
            raise LeftOut("token ids are missing")
        if number == 0:
            prompt = tokens.prompt
        seen = len(prompt) + len(completion)
        if tokens.prompt[:seen] != prompt + completion:
            raise LeftOut("a turn does not continue the one before")
        between = tokens.prompt[seen:]
        completion = completion + between + tokens.completion
        mask += [0] * len(between) + [1] * len(tokens.completion)
        known = tokens.logprobs is not None and len(tokens.logprobs) == len(tokens.completion)
        logprobs = logprobs + [0.0] * len(between) + (tokens.logprobs or []) if known and logprobs is not None else None
    if not any(mask):
        raise LeftOut("nothing said or done")
    return {
        "prompt_ids": prompt,
        "completion_ids": completion,
        "logprobs": logprobs,
        "loss_mask": mask,
        "reward": of.reward,
        "group": _group(of),
    }


FORMATS: Mapping[str, Callable[[Iterable[Trajectory], Counter[str]], Iterator[Row]]] = {
    "openai": _each(_openai),
    "sharegpt": _each(_sharegpt),
    "trl": _each(_trl),
    "dpo": _dpo,
    "tokens": _each(_tokens),
}
"""``openai``: messages and tools, as its fine-tuning takes them. ``sharegpt``: conversations, as LLaMA-Factory takes
them. ``trl``: prompt, completion and reward. ``dpo``: prompt, chosen and rejected. ``tokens``: ids, with which of them
the model wrote, and how likely each was to it."""
