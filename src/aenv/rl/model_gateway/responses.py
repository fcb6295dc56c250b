"""OpenAI's responses, translated to chat completions and back. Nothing is kept between two calls."""

from __future__ import annotations

import secrets
import time
from collections.abc import Iterator
from typing import Any

from aenv.errors import Invalid
from aenv.rl.model_gateway.chat import Body, failure
from aenv.rl.model_gateway.events import named
from aenv.rl.model_gateway.parts import called, content, text_of, thinking, thought, tool_call

__all__ = ["Streaming", "answer", "failure", "request"]

_SAME = ("model", "temperature", "top_p", "parallel_tool_calls", "stream", "seed", "user")
_SHOWN = ("instructions", "max_output_tokens", "metadata", "temperature", "top_p")


def request(body: Body) -> Body:
    """A client's request, as chat completions."""
    for name in ("previous_response_id", "conversation", "background"):
        if body.get(name):
            raise Invalid(f"{name!r} needs a server that keeps conversations", hint="send all of it as 'input'")
    found: Body = {name: body[name] for name in _SAME if body.get(name) is not None}
    messages: list[Body] = []
    if body.get("instructions"):
        messages.append({"role": "system", "content": body["instructions"]})
    given = body.get("input")
    shown: list[Body] = []
    """What tools gave beside text, which the user says after all of their results: chat completions has it so."""
    for item in [*([{"role": "user", "content": given}] if isinstance(given, str) else given or ()), {}]:
        if shown and item.get("type") != "function_call_output":
            messages.append({"role": "user", "content": content(shown)})
            shown = []
        if item.get("type") == "function_call_output":
            messages.append(_output(item, shown))
        elif item:
            _add(messages, item)
    found["messages"] = messages
    if body.get("max_output_tokens") is not None:
        found["max_completion_tokens"] = body["max_output_tokens"]
    if body.get("tools"):
        found["tools"] = [_tool(tool) for tool in body["tools"]]
        if (choice := body.get("tool_choice")) is not None:
            if isinstance(choice, dict) and choice.get("type") != "function":
                raise Invalid(f"a tool_choice of type {choice.get('type')!r} cannot be told to this model")
            named_one = isinstance(choice, dict)
            found["tool_choice"] = {"type": "function", "function": {"name": choice["name"]}} if named_one else choice
    if (format := (body.get("text") or {}).get("format")) and format.get("type") == "json_schema":
        schema = {name: value for name, value in format.items() if name != "type"}
        found["response_format"] = {"type": "json_schema", "json_schema": schema}
    elif format and format.get("type") == "json_object":
        found["response_format"] = format
    if effort := (body.get("reasoning") or {}).get("effort"):
        found["reasoning_effort"] = effort
    return found


def _tool(tool: Body) -> Body:
    if tool.get("type") != "function":
        raise Invalid(f"a tool of type {tool.get('type')!r} would be run by the provider, and only an agent's own are")
    return {"type": "function", "function": {name: value for name, value in tool.items() if name != "type"}}


def _output(item: Body, shown: list[Body]) -> Body:
    given = item.get("output")
    texts = [part for part in given if "text" in part] if isinstance(given, list) else given
    shown += [_part(part) for part in given if "text" not in part] if isinstance(given, list) else []
    return {"role": "tool", "tool_call_id": item.get("call_id"), "content": text_of(texts)}


def _add(messages: list[Body], item: Body) -> None:
    """An item of the input. What a model said and called in one answer becomes one message again."""
    kind = item.get("type") or "message"
    if kind == "function_call":
        call = tool_call(item.get("call_id"), item.get("name"), item.get("arguments") or "")
        _last_said(messages).setdefault("tool_calls", []).append(call)
    elif kind == "reasoning":
        if thoughts := "".join(part.get("text") or "" for part in item.get("content") or ()):
            messages.append({"role": "assistant", "content": None, **thinking(thoughts)})
    elif kind == "message" and item.get("role") == "assistant":
        said = item.get("content")
        text = said if isinstance(said, str) else "".join(str(part.get("text") or "") for part in said or ())
        _last_said(messages, unsaid=True)["content"] = text
    elif kind == "message":
        given = item.get("content")
        parts = given if isinstance(given, str) else content([_part(part) for part in given or ()])
        messages.append({"role": item.get("role") or "user", "content": parts})
    else:
        raise Invalid(f"an input item of type {kind!r} cannot be told to this model")


def _last_said(messages: list[Body], *, unsaid: bool = False) -> Body:
    """The answer of the model that an item belongs to; ``unsaid``: one in which it has only thought."""
    last = messages[-1] if messages else {}
    if last.get("role") != "assistant" or (unsaid and (last["content"] is not None or "tool_calls" in last)):
        messages.append({"role": "assistant", "content": None})
    return messages[-1]


def _part(part: Body) -> Body:
    kind = part.get("type")
    if kind in ("input_text", "output_text", "text"):
        return {"type": "text", "text": part.get("text") or ""}
    if kind == "input_image" and part.get("image_url"):
        return {"type": "image_url", "image_url": {"url": part["image_url"]}}
    raise Invalid(f"a content part of type {kind!r} cannot be told to this model")


def answer(completion: Body, asked: Body) -> Body:
    """An answer, as a response."""
    message = completion["choices"][0]["message"]
    output: list[Body] = []
    if thoughts := thought(message):
        output.append(_thought(thoughts))
    if message.get("content"):
        output.append(_said(_id("msg"), message["content"]))
    output += [_called(_id("fc"), *call) for call in map(called, message.get("tool_calls") or ())]
    return _response(_id("resp"), completion, asked) | {"output": output}


def _id(kind: str) -> str:
    return f"{kind}_{secrets.token_hex(16)}"


def _thought(text: str) -> Body:
    part = {"type": "reasoning_text", "text": text}
    return {"type": "reasoning", "id": _id("rs"), "summary": [], "content": [part], "status": "completed"}


def _text(text: str) -> Body:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}


def _said(id: str, text: str) -> Body:
    return {"type": "message", "id": id, "role": "assistant", "status": "completed", "content": [_text(text)]}


def _called(id: str, call_id: str, name: str, written: str) -> Body:
    made = {"type": "function_call", "id": id, "call_id": call_id, "name": name, "arguments": written}
    return made | {"status": "completed"}


def _response(id: str, completion: Body, asked: Body, status: str = "") -> Body:
    cut = completion["choices"][0].get("finish_reason") == "length" if completion.get("choices") else False
    usage = completion.get("usage")
    return {
        "id": id,
        "object": "response",
        "created_at": int(time.time()),
        "status": status or ("incomplete" if cut else "completed"),
        "error": None,
        "incomplete_details": {"reason": "max_output_tokens"} if cut else None,
        "model": completion.get("model") or asked.get("model") or "",
        "output": [],
        "parallel_tool_calls": asked.get("parallel_tool_calls", True),
        "tool_choice": asked.get("tool_choice") or "auto",
        "tools": asked.get("tools") or [],
        **{name: asked.get(name) for name in _SHOWN},
        "usage": None if usage is None else _usage(usage),
    }


def _usage(usage: Body) -> Body:
    read, written = usage.get("prompt_tokens") or 0, usage.get("completion_tokens") or 0
    return {
        "input_tokens": read,
        "input_tokens_details": {"cached_tokens": 0},
        "output_tokens": written,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": read + written,
    }


class Streaming:
    """A stream of chat completions as a stream of responses."""

    def __init__(self, asked: Body) -> None:
        self._asked = asked
        self._id = _id("resp")
        self._number = -1
        self._output: list[Body] = []
        """Items that are done."""
        self._open: Body | None = None
        """The item that is being written."""
        self._call = -1
        """Which call that is."""
        self._parts: list[str] = []

    def feed(self, chunk: Body) -> Iterator[bytes]:
        """What the client is sent for a piece."""
        if self._number < 0:
            for kind in ("created", "in_progress"):
                yield self._event(f"response.{kind}", response=_response(self._id, chunk, self._asked, "in_progress"))
        for choice in chunk.get("choices") or ():
            delta = choice.get("delta") or {}
            if part := thought(delta):
                if self._kind != "reasoning":
                    yield from self._start({**_thought(""), "content": [], "status": "in_progress"})
                self._parts.append(part)
                yield self._inside("response.reasoning_text.delta", content_index=0, delta=part)
            if said := delta.get("content"):
                if self._kind != "message":
                    yield from self._start({**_said(_id("msg"), ""), "content": [], "status": "in_progress"})
                    yield self._inside("response.content_part.added", content_index=0, part=_text(""))
                self._parts.append(said)
                yield self._inside("response.output_text.delta", content_index=0, delta=said, logprobs=[])
            for call in delta.get("tool_calls") or ():
                yield from self._calling(call["index"], call)

    def _calling(self, index: int, call: Body) -> Iterator[bytes]:
        function = call.get("function") or {}
        if self._kind != "function_call" or self._call != index:
            item = _called(_id("fc"), call.get("id") or "", function.get("name") or "", "")
            yield from self._start({**item, "status": "in_progress"})
            self._call = index
        if part := function.get("arguments"):
            self._parts.append(part)
            yield self._inside("response.function_call_arguments.delta", delta=part)

    @property
    def _kind(self) -> str:
        return str(self._open["type"]) if self._open is not None else ""

    def _start(self, item: Body) -> Iterator[bytes]:
        yield from self._stop()
        self._open, self._parts = item, []
        yield self._event("response.output_item.added", output_index=len(self._output), item=item)

    def _stop(self) -> Iterator[bytes]:
        if self._open is None:
            return
        text, item = "".join(self._parts), {**self._open, "status": "completed"}
        if self._kind == "message":
            yield self._inside("response.output_text.done", content_index=0, text=text, logprobs=[])
            yield self._inside("response.content_part.done", content_index=0, part=_text(text))
            item["content"] = [_text(text)]
        elif self._kind == "reasoning":
            yield self._inside("response.reasoning_text.done", content_index=0, text=text)
            item["content"] = [{"type": "reasoning_text", "text": text}]
        else:
            yield self._inside("response.function_call_arguments.done", arguments=text, name=item["name"])
            item["arguments"] = text
        yield self._event("response.output_item.done", output_index=len(self._output), item=item)
        self._output.append(item)
        self._open = None

    def _inside(self, type: str, **fields: Any) -> bytes:
        assert self._open is not None
        return self._event(type, item_id=self._open["id"], output_index=len(self._output), **fields)

    def _event(self, type: str, **fields: Any) -> bytes:
        self._number += 1
        return named({"type": type, "sequence_number": self._number, **fields})

    def end(self, answer: Body) -> bytes:
        """What the client is sent last."""
        closing = list(self._stop())
        made = _response(self._id, answer, self._asked) | {"output": self._output}
        return b"".join((*closing, self._event(f"response.{made['status']}", response=made)))

    def broken(self, message: str) -> bytes:
        """What the client is sent when there will be no more."""
        return self._event("error", code="model_failed", message=message, param=None)
