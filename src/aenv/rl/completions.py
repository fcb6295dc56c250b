"""An answer of a server that speaks OpenAI's chat completions, and the tokens that some servers give with it."""

from __future__ import annotations

from typing import Any

import msgspec
from msgspec import Struct

from aenv.rl.trajectory import Tokens

ASKED = {"logprobs": True, "return_token_ids": True}
"""What asks a server for token ids and log-probabilities, as vLLM and SGLang take it."""


class Function(Struct, frozen=True):
    name: str = ""
    arguments: str = ""


class ToolCall(Struct):
    id: str = ""
    type: str = "function"
    function: Function = Function()


class CallPiece(Struct):
    index: int | None = None
    id: str | None = None
    function: FunctionPiece | None = None


class FunctionPiece(Struct):
    name: str | None = None
    arguments: str | None = None


class Message(Struct, omit_defaults=True):
    role: str = "assistant"
    content: str | None = None
    tool_calls: list[ToolCall] | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    """What newer servers call the same."""


class Logprob(Struct):
    logprob: float | None = None


class Logprobs(Struct):
    content: list[Logprob] | None = None


class Choice(Struct):
    message: Message
    finish_reason: str | None = None
    logprobs: Logprobs | None = None
    token_ids: list[int] | None = None
    prompt_token_ids: list[int] | None = None
    """Where SGLang gives them."""


class Usage(Struct):
    prompt_tokens: int | None = None
    completion_tokens: int | None = None


class Completion(Struct):
    """One answer."""

    choices: list[Choice]
    model: str = ""
    usage: Usage | None = None
    prompt_token_ids: list[int] | None = None
    """Where vLLM gives them."""

    @property
    def tokens(self) -> Tokens | None:
        """What the first choice is in the model's own tokens, as far as its server tells. Ids or log-probabilities of
        which some are missing are none: they would be taken for those of other tokens."""
        choice = self.choices[0]
        written = None if self.usage is None else self.usage.completion_tokens
        ids, logprobs = choice.token_ids, None
        if ids is not None and written not in (None, len(ids)):
            ids = None
        if choice.logprobs is not None and choice.logprobs.content is not None:
            known = [found.logprob for found in choice.logprobs.content if found.logprob is not None]
            most = written if ids is None else len(ids)
            logprobs = known if len(known) == len(choice.logprobs.content) and most in (None, len(known)) else None
        prompt = choice.prompt_token_ids if self.prompt_token_ids is None else self.prompt_token_ids
        if prompt is None and ids is None and logprobs is None:
            return None
        return Tokens(prompt=prompt, completion=ids, logprobs=logprobs)


class Delta(Struct):
    content: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    tool_calls: list[CallPiece] | None = None


class ChoicePiece(Struct):
    delta: Delta | None = None
    finish_reason: str | None = None
    logprobs: Logprobs | None = None
    token_ids: list[int] | None = None
    prompt_token_ids: list[int] | None = None


class Chunk(Struct):
    """A piece of an answer that comes as a stream."""

    choices: list[ChoicePiece] | None = None
    model: str | None = None
    usage: Usage | None = None
    prompt_token_ids: list[int] | None = None


def completion(answer: Any) -> Completion:
    """An answer, in which what servers write in ways of their own is put right, in its place. ``ValidationError`` where
    it is none."""
    if isinstance(answer, dict):
        if answer.get("model", "") is None:
            answer["model"] = ""
        choices = answer.get("choices")
        for choice in choices if isinstance(choices, list) else ():
            message = choice.get("message") if isinstance(choice, dict) else None
            if isinstance(message, dict):
                _put_right(message)
    return msgspec.convert(answer, Completion, strict=False)


def _put_right(message: dict[str, Any]) -> None:
    if message.get("role", "") is None:
        message["role"] = "assistant"
    content, calls = message.get("content"), message.get("tool_calls")
    if isinstance(content, list) and all(isinstance(part, dict) and "text" in part for part in content):
        message["content"] = "".join(str(part["text"]) for part in content)
    for call in calls if isinstance(calls, list) else ():
        if not isinstance(call, dict):
            continue
        for name, usual in (("id", ""), ("type", "function")):
            if call.get(name, usual) is None:
                call[name] = usual
        function = call.get("function")
        if isinstance(function, dict):
            written = function.get("arguments", "")
            if not isinstance(written, str):
                function["arguments"] = "" if written is None else msgspec.json.encode(written).decode()
