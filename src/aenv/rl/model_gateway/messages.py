"""Anthropic's messages, translated to chat completions and back."""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from typing import Any

import msgspec

from aenv.errors import Invalid
from aenv.rl.model_gateway.chat import Body
from aenv.rl.model_gateway.events import named
from aenv.rl.model_gateway.parts import arguments, called, content, text_of, thinking, thought, tool_call

_SAME = ("model", "temperature", "top_p", "top_k", "stream")
_REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use", "content_filter": "refusal"}
_CHOICES = {"auto": "auto", "any": "required", "none": "none"}


def request(body: Body) -> Body:
    """A client's request, as chat completions."""
    found: Body = {name: body[name] for name in _SAME if body.get(name) is not None}
    messages: list[Body] = []
    if body.get("system"):
        messages.append({"role": "system", "content": text_of(body["system"])})
    for message in body.get("messages") or ():
        messages += _assistant(message) if message.get("role") == "assistant" else _user(message)
    found["messages"] = messages
    if body.get("max_tokens") is not None:
        found["max_completion_tokens"] = body["max_tokens"]
    if body.get("stop_sequences"):
        found["stop"] = body["stop_sequences"]
    if body.get("tools"):
        found["tools"] = [_tool(tool) for tool in body["tools"]]
        _choose(found, body.get("tool_choice") or {})
    return found


def _tool(tool: Body) -> Body:
    if tool.get("type") not in (None, "custom") or "input_schema" not in tool:
        raise Invalid(f"the tool {tool.get('name')!r} would be run by the provider, and only an agent's own are")
    function = {"name": tool.get("name"), "parameters": tool["input_schema"]}
    return {"type": "function", "function": {**function, "description": tool.get("description") or ""}}


def _choose(found: Body, choice: Body) -> None:
    kind = choice.get("type")
    if kind == "tool":
        found["tool_choice"] = {"type": "function", "function": {"name": choice.get("name")}}
    elif kind in _CHOICES:
        found["tool_choice"] = _CHOICES[kind]
    if choice.get("disable_parallel_tool_use"):
        found["parallel_tool_calls"] = False


def _blocks(message: Body) -> list[Body]:
    given = message.get("content")
    return [{"type": "text", "text": given}] if isinstance(given, str) else list(given or ())


def _assistant(message: Body) -> Iterator[Body]:
    blocks = _blocks(message)
    said = [block.get("text") or "" for block in blocks if block.get("type") == "text"]
    found: Body = {"role": "assistant", "content": "".join(said) if said else None}
    if thoughts := [block["thinking"] for block in blocks if block.get("type") == "thinking"]:
        found |= thinking("".join(thoughts))
    calls = [block for block in blocks if block.get("type") == "tool_use"]
    if calls:
        found["tool_calls"] = [
            tool_call(block.get("id"), block.get("name"), msgspec.json.encode(block.get("input") or {}).decode())
            for block in calls
        ]
    yield found


def _user(message: Body) -> Iterator[Body]:
    """Results of tools first, which chat completions has as messages of their own, and of text alone: what else a tool
    has given is said by the user."""
    blocks, role = _blocks(message), str(message.get("role") or "user")
    rest = []
    for block in blocks:
        if block.get("type") == "tool_result":
            given = block.get("content")
            texts = [part for part in given if "text" in part] if isinstance(given, list) else given
            rest += [_part(part) for part in given if "text" not in part] if isinstance(given, list) else []
            yield {"role": "tool", "tool_call_id": block.get("tool_use_id"), "content": text_of(texts)}
        else:
            rest.append(_part(block))
    if rest:
        yield {"role": role, "content": content(rest)}


def _part(block: Body) -> Body:
    if block.get("type") == "text":
        return {"type": "text", "text": block.get("text") or ""}
    source = block.get("source") or {}
    if block.get("type") == "image":
        url = source.get("url") or f"data:{source.get('media_type')};base64,{source.get('data')}"
        return {"type": "image_url", "image_url": {"url": url}}
    raise Invalid(f"a content block of type {block.get('type')!r} cannot be told to this model")


def answer(completion: Body, asked: Body) -> Body:
    """An answer, as a message."""
    choice = completion["choices"][0]
    message, usage = choice["message"], completion.get("usage") or {}
    blocks: list[Body] = []
    if said := thought(message):
        blocks.append({"type": "thinking", "thinking": said, "signature": ""})
    if message.get("content"):
        blocks.append({"type": "text", "text": message["content"]})
    for id, name, written in map(called, message.get("tool_calls") or ()):
        blocks.append({"type": "tool_use", "id": id, "name": name, "input": arguments(written)})
    made = _message(completion.get("model") or asked.get("model") or "", usage)
    return made | {"content": blocks, "stop_reason": _reason(choice.get("finish_reason"))}


def _reason(finish_reason: str | None) -> str:
    return _REASONS.get(finish_reason or "stop", "end_turn")


def _message(model: str, usage: Body) -> Body:
    return {
        "id": f"msg_{secrets.token_hex(12)}",
        "type": "message",
        "role": "assistant",
        "model": model,
        "content": [],
        "stop_reason": None,
        "stop_sequence": None,
        "usage": _usage(usage),
    }


def _usage(usage: Body) -> Body:
    return {"input_tokens": usage.get("prompt_tokens") or 0, "output_tokens": usage.get("completion_tokens") or 0}


class Streaming:
    """A stream of chat completions as a stream of messages."""

    def __init__(self, asked: Body) -> None:
        self._model = str(asked.get("model") or "")
        self._begun = False
        self._open: tuple[str, int] | None = None
        """The kind of block that is being written; for a call, which it is."""
        self._index = -1

    def feed(self, chunk: Body) -> Iterator[bytes]:
        """What the client is sent for a piece."""
        if not self._begun:
            self._begun = True
            yield named({"type": "message_start", "message": _message(chunk.get("model") or self._model, {})})
        for choice in chunk.get("choices") or ():
            delta = choice.get("delta") or {}
            if part := thought(delta):
                yield from self._start(("thinking", 0), {"type": "thinking", "thinking": "", "signature": ""})
                yield self._delta({"type": "thinking_delta", "thinking": part})
            if said := delta.get("content"):
                yield from self._start(("text", 0), {"type": "text", "text": ""})
                yield self._delta({"type": "text_delta", "text": said})
            for call in delta.get("tool_calls") or ():
                id, name, written = called(call)
                yield from self._start(
                    ("tool_use", call["index"]), {"type": "tool_use", "id": id, "name": name, "input": {}}
                )
                if written:
                    yield self._delta({"type": "input_json_delta", "partial_json": written})

    def _start(self, kind: tuple[str, int], block: Body) -> Iterator[bytes]:
        if self._open != kind:
            yield from self._stop()
            self._open = kind
            self._index += 1
            yield named({"type": "content_block_start", "index": self._index, "content_block": block})

    def _stop(self) -> Iterator[bytes]:
        if self._open is not None:
            self._open = None
            yield named({"type": "content_block_stop", "index": self._index})

    def _delta(self, delta: Body) -> bytes:
        return named({"type": "content_block_delta", "index": self._index, "delta": delta})

    def end(self, answer: Body) -> bytes:
        """What the client is sent last."""
        delta = {"stop_reason": _reason(answer["choices"][0].get("finish_reason")), "stop_sequence": None}
        usage = _usage(answer.get("usage") or {})
        last: list[Body] = [{"type": "message_delta", "delta": delta, "usage": usage}, {"type": "message_stop"}]
        return b"".join((*self._stop(), *map(named, last)))

    def broken(self, message: str) -> bytes:
        """What the client is sent when there will be no more."""
        return named(failure(502, message))


def failure(status: int, message: str) -> dict[str, Any]:
    """A failure as clients of Anthropic read it."""
    return {"type": "error", "error": {"type": _TYPES.get(status, "api_error"), "message": message}}


_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
}
