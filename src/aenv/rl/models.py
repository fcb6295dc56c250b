"""An agent that is a model: a small loop around a server that speaks OpenAI's chat completions."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Mapping
from typing import Any

import msgspec

from aenv import config, http
from aenv.control import plain_header
from aenv.errors import AEnvError, Invalid, ModelError, did_you_mean
from aenv.models import NOT_JSON, ToolResult, to_json
from aenv.rl.completions import ASKED, Completion, ToolCall, completion
from aenv.rl.recording import Episode
from aenv.rl.tasks import Task

MOST_ANSWER = 64 * 1024 * 1024
"""Bytes of one answer."""
AGAIN = (408, 409, 429, 500, 502, 503, 504)
"""Statuses after which a model is asked again."""
_PAUSE, _LONGEST_PAUSE = 0.5, 30.0
_drawn = random.SystemRandom().uniform
_SHOWN = 300


class OpenAIAgent:
    """Plays an episode with a model: it is told the instruction, offered the tools, and goes on until it calls none.

    A tool that fails, a tool that does not exist and arguments that are no JSON are told to the model. A server that
    does not answer, or not with what can be used, fails the episode as ``model_failed``.
    """

    def __init__(
        self,
        model: str,
        *,
        base_url: str | None = None,
        api_key: str | None = None,
        parameters: Mapping[str, Any] | None = None,
        system: str = "",
        tokens: bool = False,
        timeout: float = 600.0,
        retries: int = 5,
    ) -> None:
        """``parameters`` are sent along, such as ``temperature``; ``system`` is the prompt where a task has none;
        ``tokens`` asks the server for token ids and log-probabilities, as vLLM gives them."""
        self.name = f"openai:{model}"
        self.model = model
        self.base_url = str(config.get("model_url", base_url)).rstrip("/")
        http.target(self.base_url)
        self._key = str(config.get("model_key", api_key) or "")
        self._headers = b"Content-Type: application/json\r\n"
        if self._key:
            self._headers += f"Authorization: Bearer {plain_header(self._key, 'the key of the model')}\r\n".encode()
        self.parameters = dict(parameters or {})
        if tokens:
            self.parameters = {**ASKED, **self.parameters}
        self.system = system
        self.timeout = timeout
        self.retries = retries

    async def __call__(self, env: Episode, task: Task) -> str:
        """Play one episode; the model's last words."""
        if system := task.system or self.system:
            env.hear({"role": "system", "content": system})
        return await self.answer(env, opening(task, env.observation))

    async def answer(self, env: Episode, message: str) -> str:
        """What the model says in the end to one more message of the user's, after all that it called for it."""
        tools = await env.list_openai_tools()
        env.hear({"role": "user", "content": message})
        while True:
            env.go_on()
            begun = time.monotonic()
            answer = await self._heard(env, tools)
            choice = answer.choices[0]
            said = choice.message
            await env.say(
                msgspec.to_builtins(said) | {"role": "assistant", "content": said.content},
                model=answer.model or self.model,
                finish_reason=choice.finish_reason or "",
                seconds=time.monotonic() - begun,
                prompt_tokens=answer.usage.prompt_tokens if answer.usage else None,
                completion_tokens=answer.usage.completion_tokens if answer.usage else None,
                tokens=answer.tokens,
            )
            if not said.tool_calls:
                return said.content or ""
            for call in said.tool_calls:
                env.hear({"role": "tool", "tool_call_id": call.id, "content": await called(env, call)})

    async def _heard(self, env: Episode, tools: list[dict[str, Any]]) -> Completion:
        """The next answer. Without one there is no episode, whatever a program around this agent catches."""
        try:
            with env.doing("model"):
                return await self._ask(env, tools)
        except ModelError as exc:
            env.fail(exc, "model")
            raise

    async def _ask(self, env: Episode, tools: list[dict[str, Any]]) -> Completion:
        body: dict[str, Any] = {"model": self.model, "messages": env.messages, **self.parameters}
        if tools:
            body["tools"] = tools
        if env.sample_seed is not None:
            body.setdefault("seed", env.sample_seed + len(env.turns))
        try:
            sent = to_json(body)
        except NOT_JSON as exc:
            raise Invalid(f"what the model is to be told cannot be sent: {exc}") from exc
        attempt = 0
        while True:
            try:
                return await self._answer(sent)
            except _Again as exc:
                attempt += 1
                if attempt > self.retries:
                    raise ModelError(exc.message, hint=exc.hint) from exc
            pause = min(_PAUSE * 2 ** (attempt - 1), _LONGEST_PAUSE)
            await asyncio.sleep(pause * _drawn(0.5, 1.0))

    async def _answer(self, body: bytes) -> Completion:
        try:
            async with asyncio.timeout(self.timeout) as limit:
                response = await http.request(
                    *("POST", self.base_url, "/chat/completions"),
                    headers=self._headers,
                    body=body,
                    retries=0,
                    most=MOST_ANSWER,
                )
        except TimeoutError:
            if not limit.expired():
                raise
            raise _Again(f"{self.name} did not answer within {self.timeout:g} s") from None
        except AEnvError as exc:
            raise _Again(f"{self.name} did not answer: {exc.message}", hint="is base_url right?") from exc
        said = response.body[: _SHOWN + len(self._key)].decode(errors="replace")
        if self._key:
            said = said.replace(self._key, "...")
        said = said[:_SHOWN]
        if response.status != 200:
            kind = _Again if response.status in AGAIN else ModelError
            raise kind(f"{self.name} answered with status {response.status}: {said}")
        try:
            answer = completion(msgspec.json.decode(response.body))
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as exc:
            raise ModelError(f"{self.name} answered with no completion ({exc}): {said}") from exc
        if not answer.choices:
            raise ModelError(f"{self.name} answered without a choice: {said}")
        return answer


class _Again(ModelError):
    """May go well when it is asked again."""


def opening(task: Task, observation: Any) -> str:
    """What the model is told first: the instruction, and what it sees, where the environment's reset told."""
    if observation is None or observation == "":
        return task.instruction
    seen = observation if isinstance(observation, str) else to_json(observation).decode()
    return f"{task.instruction}\n\n{seen}".strip()


async def called(env: Episode, call: ToolCall) -> str:
    """Call the tool that a model asked for; what it is told of it."""
    name, text = call.function.name, call.function.arguments
    known = [tool["function"]["name"] for tool in env.tools]
    if name not in known:
        return f"there is no tool {name[:100]!r}; {did_you_mean(name, known)}"
    try:
        arguments = msgspec.json.decode(text, type=dict[str, Any]) if text.strip() else {}
    except (msgspec.MsgspecError, UnicodeError, RecursionError) as exc:
        return f"the arguments of {name} are no JSON object: {exc}"
    return seen(await env.call_tool(name, arguments, id=call.id))


def seen(result: ToolResult) -> str:
    """A result as the model reads it: text, and for what is none, which kind it is."""
    shown = [
        str(block.get("text", "")) if block.get("type") == "text" else f"[{block.get('type')}: {block.get('mimeType')}]"
        for block in result.content
    ]
    return "\n".join(shown)
