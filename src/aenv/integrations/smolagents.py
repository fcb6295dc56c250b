"""An instance's tools for agents of smolagents, and a model that tells an episode what it hears and says."""

from __future__ import annotations

import json
from typing import Any

from smolagents import AUTHORIZED_TYPES, ChatMessage, Model, Tool

from aenv.integrations.telling import Message, Telling, assistant
from aenv.integrations.toolbox import Offered
from aenv.rl.models import seen

ROLES = {"system": "system", "user": "user", "tool-response": "user"}
"""What a model hears; smolagents tells it as the user what a tool answered."""


class SmolagentsTools(Telling):
    """``async with SmolagentsTools(env) as tools``: an agent with ``tools.tools`` and ``tools.model(...)`` is run in a
    thread, by ``asyncio.to_thread(agent.run, ...)``."""

    @property
    def tools(self) -> list[Tool]:
        return [_Tool(self, offered) for offered in self.offered]

    def model(self, model: Model) -> Model:
        """The same, whose answers are told, and which is not asked once the run is over."""
        return _Model(self, model)


class _Tool(Tool):
    skip_forward_signature_validation = True
    output_type = "string"

    def __init__(self, tools: SmolagentsTools, offered: Offered) -> None:
        self.name, self.description = offered.name, offered.description
        required = offered.parameters.get("required", ())
        properties = offered.parameters.get("properties", {})
        self.inputs = {name: _input(schema, name in required) for name, schema in properties.items()}
        self._tools = tools
        super().__init__()

    def forward(self, *given: Any, **arguments: Any) -> str:
        if given:  # a model's program, which may leave out the names
            arguments = dict(zip(self.inputs, given, strict=False)) | arguments
        result = self._tools.blocking(lambda: self._tools.use(self.name, arguments))
        if result.is_error:
            raise ValueError(seen(result))  # which smolagents tells the model
        return seen(result)


class _Model(Model):
    def __init__(self, tools: SmolagentsTools, model: Model) -> None:
        super().__init__(model_id=model.model_id)
        self._tools = tools
        self._model = model
        self._heard = 0

    def generate(self, messages: list[ChatMessage], *args: Any, **options: Any) -> ChatMessage:
        self._tools.blocking(lambda: self._before(messages))
        answer = self._model.generate(messages, *args, **options)
        self._tools.blocking(lambda: self._after(answer))
        return answer

    def parse_tool_calls(self, message: ChatMessage) -> ChatMessage:
        return self._model.parse_tool_calls(message)

    async def _before(self, messages: list[ChatMessage]) -> None:
        heard = [message for message in messages if message.role.value in ROLES]
        await self._tools.tell(*(_message(message) for message in heard[self._heard :]))
        self._heard = len(heard)
        self._tools.go_on()

    async def _after(self, answer: ChatMessage) -> None:
        calls = []
        for call in answer.tool_calls or []:
            given = call.function.arguments
            calls.append((call.id, call.function.name, given if isinstance(given, str) else json.dumps(given)))
        usage = answer.token_usage
        await self._tools.tell(
            assistant(_text(answer), calls),
            model=self.model_id or "",
            prompt_tokens=usage.input_tokens if usage else None,
            completion_tokens=usage.output_tokens if usage else None,
        )


def _input(schema: dict[str, Any], required: bool) -> dict[str, Any]:
    """What smolagents wants to know of an argument. Its check is by type; the instance knows the whole schema."""
    kinds = schema.get("type")
    kinds = kinds if isinstance(kinds, list) else [kinds]
    found = {"description": "", **schema, "type": kinds[0] if len(kinds) == 1 else kinds}
    if not all(kind in AUTHORIZED_TYPES for kind in kinds):
        found = {"description": schema.get("description") or json.dumps(schema), "type": "any"}
    return found if required else {**found, "nullable": True}


def _message(message: ChatMessage) -> Message:
    return {"role": ROLES[message.role.value], "content": _text(message)}


def _text(message: ChatMessage) -> str:
    if isinstance(message.content, list):
        return "\n".join(part["text"] for part in message.content if part.get("type") == "text")
    return message.content or ""
