"""An agent that is a model asked in tokens, for trainers whose servers take token ids and give token ids.

What the model wrote is never written anew by a template and tokenized again: the next prompt is the one before, the ids
that came, and the ids of what is new.
"""

from __future__ import annotations

import itertools
import re
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import msgspec

from aenv.errors import AEnvError, Invalid, ModelError
from aenv.rl.completions import Function, ToolCall
from aenv.rl.models import called, opening
from aenv.rl.recording import Episode
from aenv.rl.tasks import Task
from aenv.rl.trajectory import Tokens

_CALL = re.compile(r"<tool_call>\s*(.*?)\s*</tool_call>", re.DOTALL)
_MARK = "AENV-MARK"
"""Stands in a conversation where the model's own words were, to find what a template writes after them."""


class Generated(NamedTuple):
    """What a model wrote."""

    ids: Sequence[int]
    logprobs: Sequence[float] | None = None
    """One for each id."""
    finish_reason: str = "stop"
    """``length`` where it was cut short: what was cut calls no tool."""


Generate = Callable[[list[int]], Awaitable[Generated]]
"""Asks a model to go on from these ids."""


class Tokenizer(Protocol):
    """What is needed of one of Hugging Face's."""

    eos_token: Any

    def apply_chat_template(self, conversation: Any, *, tools: Any = None, **kwargs: Any) -> Any:
        """A conversation as text."""

    def encode(self, text: str, *, add_special_tokens: bool) -> Any:
        """Text as ids."""

    def decode(self, token_ids: Any, *, skip_special_tokens: bool) -> Any:
        """Ids as text."""


def hermes(text: str) -> tuple[str, list[ToolCall]]:
    """The words and the calls of a model that writes ``<tool_call>{"name": ..., "arguments": {...}}</tool_call>``, as
    Qwen's and Hermes' do. A call that is no JSON keeps its place, so that the model is told of it."""
    return _CALL.sub("", text).strip(), list(_calls(text))


def _calls(text: str) -> Iterator[ToolCall]:
    for written in _CALL.findall(text):
        name, arguments = "", written
        try:
            found = msgspec.json.decode(written)
        except (msgspec.MsgspecError, UnicodeError, RecursionError):
            found = None
        if isinstance(found, dict):
            name, arguments = str(found.get("name", "")), msgspec.json.encode(found.get("arguments", {})).decode()
        yield ToolCall(function=Function(name=name, arguments=arguments))


class TokenAgent:
    """Plays an episode with a model: it is told the instruction, offered the tools, and goes on until it calls none.

    Each turn of the trajectory has the ids that the model read and wrote, and ``export(..., "tokens")`` makes one
    sequence of them, in which only what the model wrote is to be trained on.
    """

    def __init__(
        self,
        generate: Generate,
        tokenizer: Tokenizer,
        *,
        parse: Callable[[str], tuple[str, list[ToolCall]]] = hermes,
        system: str = "",
        max_tokens: int | None = None,
        template: Mapping[str, Any] | None = None,
        name: str = "tokens",
    ) -> None:
        """``parse`` finds words and calls in what the model wrote; ``max_tokens`` is the longest sequence, after which
        the episode ends; ``template`` are arguments of the chat template, such as ``enable_thinking``."""
        self.name = name
        self.system = system
        self.max_tokens = max_tokens
        self._generate = generate
        self._tokenizer = tokenizer
        self._parse = parse
        self._template = dict(template or {})

    async def __call__(self, env: Episode, task: Task) -> str:
        """Play one episode; the model's last words."""
        tools = await env.list_openai_tools()
        if system := task.system or self.system:
            env.hear({"role": "system", "content": system})
        env.hear({"role": "user", "content": opening(task, env.observation)})
        ids = self._encoded(self._text(env.messages, tools))
        numbers = itertools.count()
        while True:
            env.go_on()
            begun = time.monotonic()
            tokens, finish_reason = await self._heard(env, ids)
            written = tokens.completion or []
            words, calls = self._parse(self._tokenizer.decode(written, skip_special_tokens=True))
            for call in calls:
                call.id = call.id or f"call_{next(numbers)}"  # none twice in an episode
            is_cut = finish_reason == "length"
            message: dict[str, Any] = {"role": "assistant", "content": words}
            if calls and not is_cut:
                message["tool_calls"] = msgspec.to_builtins(calls)
            await env.say(
                message,
                model=self.name,
                finish_reason=finish_reason,
                seconds=time.monotonic() - begun,
                tokens=tokens,
            )
            if not calls or is_cut:
                return words
            results = [{"role": "tool", "tool_call_id": call.id, "content": await called(env, call)} for call in calls]
            env.hear(*results)
            ids = [*ids, *written, *self._between(written, results, tools)]
            if self.max_tokens is not None and len(ids) >= self.max_tokens:
                return words

    async def _heard(self, env: Episode, ids: list[int]) -> tuple[Tokens, str]:
        """What the model wrote, and why it stopped. Without it there is no episode, whatever a program around it
        catches."""
        try:
            with env.doing("model"):
                found = await self._generate(list(ids))
                written = [int(id) for id in found.ids]
                logprobs = None if found.logprobs is None else [float(logprob) for logprob in found.logprobs]
                if logprobs is not None and len(logprobs) != len(written):
                    raise Invalid(f"{len(written)} ids came with {len(logprobs)} log-probabilities")
                return Tokens(prompt=ids, completion=written, logprobs=logprobs), found.finish_reason
        except Exception as exc:  # whatever a trainer's own code raises
            error = ModelError(exc.message if isinstance(exc, AEnvError) else f"{type(exc).__name__}: {exc}"[:1000])
            env.fail(error, "model")
            raise error from exc

    def _between(self, written: list[int], results: list[dict[str, Any]], tools: list[dict[str, Any]]) -> list[int]:
        """What stands between the model's words and its next: the end of its message, and the results."""
        told = [{"role": "user", "content": "-"}, {"role": "assistant", "content": _MARK}, *results]
        _, mark, after = self._text(told, tools).partition(_MARK)
        if not mark:
            raise Invalid("the chat template does not show what an assistant said", hint="give another tokenizer")
        end = str(self._tokenizer.eos_token or "")
        if end and after.startswith(end) and written[-1:] == self._encoded(end):
            after = after[len(end) :]  # the model wrote it
        return self._encoded(after)

    def _text(self, messages: Sequence[Mapping[str, Any]], tools: list[dict[str, Any]]) -> str:
        shown = [_shown(message) for message in messages]
        return str(
            self._tokenizer.apply_chat_template(
                shown, tools=tools or None, tokenize=False, add_generation_prompt=True, **self._template
            )
        )

    def _encoded(self, text: str) -> list[int]:
        return list(self._tokenizer.encode(text, add_special_tokens=False))


def _shown(message: Mapping[str, Any]) -> dict[str, Any]:
    """A message as chat templates take it."""
    return {key: value for key, value in message.items() if value is not None}
