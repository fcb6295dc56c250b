"""A model behind OpenAI's chat completions, as the instance's variables name it."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any, NamedTuple

import httpx

from aenv.errors import Invalid, ModelError

TIMEOUT = 45.0
"""Seconds that an answer may take. A caller waits for a minute, unless it says otherwise: it is to hear that the model
failed, and not to leave before."""


class Chat(NamedTuple):
    """Which model to ask, and where."""

    role: str
    model: str
    base_url: str
    key: str
    seed: int | None = None
    timeout: float = TIMEOUT

    @classmethod
    def of(cls, role: str, variables: Mapping[str, str], seed: int | None) -> Chat | None:
        """The model for a role (USER or JUDGE); None when the variables name none."""
        model = variables.get(f"TAU2_{role}_MODEL", "")
        if not model:
            return None
        base_url = variables.get(f"TAU2_{role}_BASE_URL", "")
        if not base_url:
            hint = f"set TAU2_{role}_BASE_URL to the address that ends in /v1"
            raise Invalid(f"TAU2_{role}_MODEL is set, and nothing says where that model is", hint=hint)
        key, timeout = variables.get(f"TAU2_{role}_API_KEY", ""), _seconds(f"TAU2_{role}_TIMEOUT", variables)
        return cls(role.lower(), model, base_url.rstrip("/"), key, seed, timeout)

    def __repr__(self) -> str:
        return f"Chat({self.role}, {self.model})"

    @asynccontextmanager
    async def in_time(self) -> AsyncIterator[None]:
        """The time for an answer: ``ModelError`` when it is over."""
        try:
            async with asyncio.timeout(self.timeout) as limit:
                yield
        except TimeoutError:
            if not limit.expired():
                raise
            raise ModelError(f"the {self.role} model did not answer within {self.timeout:g} s") from None

    async def ask(self, messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None = None) -> dict[str, Any]:
        """The model's next message. ``ModelError`` tells of a failure, without the key or what the server said."""
        body: dict[str, Any] = {"model": self.model, "messages": messages, "temperature": 0.0}
        if tools:
            body["tools"] = tools
        if self.seed is not None:
            body["seed"] = self.seed
        headers = {"Authorization": f"Bearer {self.key}"} if self.key else {}
        try:
            async with self.in_time(), httpx.AsyncClient(timeout=None) as client:  # noqa: S113 - as a whole, not by read
                answer = await client.post(f"{self.base_url}/chat/completions", json=body, headers=headers)
                answer.raise_for_status()
                message = answer.json()["choices"][0]["message"]
        except httpx.HTTPStatusError as exc:
            raise ModelError(f"the {self.role} model answered with HTTP {exc.response.status_code}") from None
        except httpx.HTTPError as exc:
            raise ModelError(f"the {self.role} model did not answer: {type(exc).__name__}") from None
        except (ValueError, KeyError, IndexError, TypeError) as exc:
            raise ModelError(f"the {self.role} model's answer is no completion: {type(exc).__name__}") from None
        if not isinstance(message, dict):
            raise ModelError(f"the {self.role} model's answer is no message")
        return message


def _seconds(name: str, variables: Mapping[str, str]) -> float:
    given = variables.get(name) or TIMEOUT
    try:
        seconds = float(given)
    except ValueError:
        seconds = 0.0
    if not 0 < seconds < math.inf:
        raise Invalid(f"{name} is {given!r}", hint="give it seconds, more than 0")
    return seconds
