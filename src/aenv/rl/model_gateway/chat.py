"""OpenAI's chat completions: what is added to a request, what of an answer its client did not ask for, and a stream
put together to the answer that it is.

Every server behind the gateway speaks this; the other dialects are translated to it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import Any

import msgspec

from aenv.errors import Invalid, ModelError
from aenv.rl.completions import ASKED, Chunk, Completion, completion
from aenv.rl.model_gateway.events import DONE, unnamed

Body = dict[str, Any]
_TOKENS = ("token_ids", "prompt_token_ids")
_MOST = ("max_tokens", "max_completion_tokens")
_FIELDS = frozenset(
    (
        *("model", "messages", "stream", "stream_options", "n", "user"),
        *("tools", "tool_choice", "parallel_tool_calls", "response_format", "reasoning_effort"),
        *("temperature", "top_p", "frequency_penalty", "presence_penalty", "logit_bias", "seed", "stop", *_MOST),
        *("logprobs", "top_logprobs", "return_token_ids"),
        *("top_k", "min_p", "repetition_penalty", "min_tokens", "stop_token_ids", "ignore_eos", "bad_words"),
        *("skip_special_tokens", "include_stop_str_in_output"),
    )
)
"""What an agent may ask for: all else that servers know has them reach elsewhere, run what they are given, or serve it
before others."""
_PROVIDERS = frozenset(
    (
        *("store", "metadata", "service_tier", "safety_identifier"),
        *("prompt_cache_key", "prompt_cache_retention", "prediction"),
    )
)
"""What is between a client and OpenAI, and changes no answer. Servers of models ignore it, and are not told."""
_MORE = "the model gave more than the one answer that it was asked for"
_MEDIA = ("image_url", "video_url", "audio_url", "image", "video", "audio")


class Asked:
    """One request as the server gets it, and what its client does not know of."""

    __slots__ = ("_added", "_hidden", "body", "streamed")

    def __init__(
        self, body: Body, *, tokens: bool, most: int | None = None, allowed_fields: Collection[str] = ()
    ) -> None:
        """``tokens``: whether the server is asked for them; ``most``: how many it may write; ``allowed_fields``: what
        an agent may ask for beside what all may."""
        messages = body.get("messages")
        if not isinstance(messages, list) or not all(isinstance(message, dict) for message in messages):
            raise Invalid("'messages' is to be a list of messages")
        if body.get("n") not in (None, 1):
            raise Invalid("one answer a call is recorded, and no more", hint="ask once for each, instead of 'n'")
        _check_media(body)
        body = {name: value for name, value in body.items() if _may(name, value, allowed_fields)}
        self.streamed = bool(body.get("stream"))
        self._added = {name for name in ASKED if not body.get(name)} if tokens else set()
        self.body = {**body, **{name: ASKED[name] for name in self._added}}
        if most is not None:
            given = {name: body[name] for name in _MOST if body.get(name) is not None} or {_MOST[-1]: most}
            self.body |= {name: _least(had, most) for name, had in given.items()}
        self._hidden = [] if body.get("return_token_ids") else list(_TOKENS)
        if not body.get("logprobs"):
            self._hidden.append("logprobs")
        if self.streamed and not (body.get("stream_options") or {}).get("include_usage"):
            self._added.add("usage")
            self.body["stream_options"] = {**(body.get("stream_options") or {}), "include_usage": True}

    @property
    def wants_tokens(self) -> bool:
        """Whether the server is asked for tokens that the client has not asked for."""
        return "return_token_ids" in self._added

    def without_tokens(self) -> Body:
        """The request for a server that refuses to give token ids."""
        return {name: value for name, value in self.body.items() if name != "return_token_ids"}

    def shown(self, answer: Body) -> tuple[Body, bool]:
        """The answer, or a piece of one, as the client asked for it; and whether that is less than all of it."""
        less = [name for name in self._hidden if name in answer]
        for name in less:
            del answer[name]
        for choice in answer.get("choices") or ():
            here = [name for name in self._hidden if name in choice]
            for name in here:
                del choice[name]
            less += here
        return answer, bool(less)

    @property
    def hides_usage(self) -> bool:
        """Whether the client of a stream did not ask for how many tokens it took."""
        return "usage" in self._added


def _least(given: Any, most: int) -> int:
    """A limit that is none, such as -1, is as much as there may be."""
    return min(given, most) if isinstance(given, int) and given > 0 else most


def _may(name: str, value: Any, allowed_fields: Collection[str]) -> bool:
    """Whether a server is told of a field. Raises for what an agent may not have of it."""
    if name in _FIELDS or name in allowed_fields:
        return True
    if value is not None and name not in _PROVIDERS:
        hint = "the gateway's operator can allow it by name (allowed_fields, --allow-field)"
        raise Invalid(f"{name[:100]!r} is for whoever runs the model, and not for an agent", hint=hint)
    return False


def _check_media(body: Body) -> None:
    """Raises for what a server would have to fetch."""
    for message in body["messages"]:
        parts = message.get("content")
        for part in parts if isinstance(parts, list) else ():
            for name in _MEDIA:
                given = part.get(name)
                url = given.get("url") if isinstance(given, dict) else given
                if isinstance(url, str) and not url.startswith("data:"):
                    hint = "send it as 'data:image/png;base64,...'"
                    raise Invalid(f"the model's server fetches nothing: {name!r} is {url[:100]!r}", hint=hint)


class Collected:
    """The answer that the pieces of a stream come to."""

    def __init__(self) -> None:
        self.pieces = 0
        """How many brought something of it."""
        self._head: Body = {}
        self._said: dict[str, list[str]] = {}
        self._calls: dict[int, _Call] = {}
        self._prompt: list[int] | None = None
        self._ids: list[int] | None = []
        """None where a piece has none, so that they are not all."""
        self._logprobs: list[float | None] | None = []
        self.finish_reason: str | None = None

    def add(self, chunk: Body) -> None:
        """A further piece."""
        for name in ("id", "model", "created", "usage", "prompt_token_ids"):
            if chunk.get(name) is not None:
                self._head[name] = chunk[name]
        for choice in chunk.get("choices") or ():
            delta = choice.get("delta") or {}
            self.pieces += bool(delta)
            if choice.get("prompt_token_ids") is not None:
                self._prompt = choice["prompt_token_ids"]
            says = any(value for name, value in delta.items() if name != "role")
            self._ids = _with(self._ids, choice.get("token_ids"), says)
            found = (choice.get("logprobs") or {}).get("content")
            told = None if found is None else [each.get("logprob") for each in found]
            self._logprobs = _with(self._logprobs, told, says)
            self.finish_reason = choice.get("finish_reason") or self.finish_reason
            self._say(delta)

    def _say(self, delta: Body) -> None:
        for name, value in delta.items():
            if name == "tool_calls":
                for part in value or ():
                    self._calls.setdefault(part["index"], _Call()).add(part)
            elif name != "role" and isinstance(value, str):
                self._said.setdefault(name, []).append(value)

    @property
    def answer(self) -> Body:
        """All of it so far, as if it had not been streamed."""
        said = {name: "".join(parts) for name, parts in self._said.items()}
        message: Body = {"role": "assistant", "content": None, **said}
        if self._calls:
            message["tool_calls"] = [call.whole for _, call in sorted(self._calls.items())]
        choice: Body = {"index": 0, "message": message, "finish_reason": self.finish_reason}
        if self._prompt is not None:
            choice["prompt_token_ids"] = self._prompt
        if self._ids:
            choice["token_ids"] = self._ids
        if self._logprobs:
            choice["logprobs"] = {"content": [{"logprob": each} for each in self._logprobs]}
        return {"object": "chat.completion", **self._head, "choices": [choice]}


def _with(all: list[Any] | None, more: list[Any] | None, says: bool) -> list[Any] | None:
    """All so far with those of a further piece. One that says something and has none leaves a hole."""
    if more is not None and all is not None:
        all += more
    return None if more is None and says else all


class _Call:
    """A tool call, as it comes."""

    def __init__(self) -> None:
        self._id = self._name = ""
        self._arguments: list[str] = []

    def add(self, part: Body) -> None:
        function = part.get("function") or {}
        self._id = part.get("id") or self._id
        self._name += function.get("name") or ""
        self._arguments.append(function.get("arguments") or "")

    @property
    def whole(self) -> Body:
        function = {"name": self._name, "arguments": "".join(self._arguments)}
        return {"id": self._id, "type": "function", "function": function}


class Streaming:
    """The stream of a client that speaks this dialect itself."""

    def __init__(self, asked: Asked) -> None:
        self._asked = asked

    def feed(self, chunk: Body) -> Iterator[bytes]:
        """What the client is sent for a piece."""
        usage = self._asked.hides_usage and chunk.pop("usage", None) is not None
        if usage and not chunk.get("choices"):
            return
        yield unnamed(self._asked.shown(chunk)[0])

    def end(self, answer: Body) -> bytes:
        """What the client is sent last."""
        return b"data: %b\n\n" % DONE

    def broken(self, message: str) -> bytes:
        """What the client is sent when there will be no more."""
        return unnamed(failure(502, message))


def request(body: Body) -> Body:
    """A client's request, in this dialect."""
    return body


def answer(completion: Body, asked: Body) -> Body:
    """An answer, in this dialect."""
    return completion


def failure(status: int, message: str) -> Body:
    """A failure as clients of OpenAI read it."""
    return {"error": {"message": message, "type": _TYPES.get(status, "api_error"), "param": None, "code": status}}


_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "invalid_request_error",
    429: "insufficient_quota",
}


class Pieces:
    """Reads a stream's pieces, each of whose calls then has a place."""

    def __init__(self) -> None:
        self._ids: list[str] = []
        """Of the calls so far."""
        self._places: dict[int | None, int] = {}
        """Which of them a server means by its own index. None is the last."""

    def read(self, data: bytes) -> Body:
        """A piece, when it is one."""
        try:
            found: Body = msgspec.json.decode(data, type=dict[str, Any])
            if found.get("error") is None:
                msgspec.convert(found, Chunk, strict=False)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as exc:
            raise ModelError(f"the model's stream has an event that is no piece of a completion: {exc}") from exc
        if found.get("error") is not None:
            raise ModelError(f"the model broke off: {str(found['error'])[:300]}")
        for choice in found.get("choices") or ():
            if choice.get("index"):
                raise ModelError(_MORE)
            for part in (choice.get("delta") or {}).get("tool_calls") or ():
                self._place(part)
        return found

    def _place(self, part: Body) -> None:
        """Some servers give no index, or all calls the same: another id is another call."""
        id = part.get("id") or ""
        place = self._places.get(part.get("index"))
        if place is None or (id and self._ids[place] and id != self._ids[place]):
            place = len(self._ids)
            self._ids.append("")
        self._ids[place] = self._ids[place] or id
        self._places[part.get("index")] = self._places[None] = part["index"] = place


def checked(answer: Any, where: str) -> Completion:
    """An answer of a server, when it is one."""
    try:
        found = completion(answer)
    except msgspec.ValidationError as exc:
        raise ModelError(f"{where} answered with no completion: {exc}") from exc
    if not found.choices:
        raise ModelError(f"{where} answered without a choice")
    if len(found.choices) > 1:
        raise ModelError(_MORE)
    return found
