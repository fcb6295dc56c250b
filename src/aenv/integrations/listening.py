"""A toolbox of a framework that shows all that a model is given, each time before it is asked."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

from aenv.client.environment import Environment
from aenv.integrations.telling import Telling
from aenv.rl.recording import Episode


class Listening(Telling):
    """What is said in a run of a framework's, written down where the environment is an episode's."""

    def __init__(self, env: Environment) -> None:
        super().__init__(env)
        self._heard: list[tuple[Any, Any]] = []
        self._asked = 0.0

    def hear(self, conversation: Sequence[Mapping[str, Any]]) -> None:
        """A model is about to be asked. What is new of what it is given, in OpenAI's form, is written down.

        Ends the run where no model is to be asked any more: nothing that the platform failed at reaches one.
        """
        self.go_on()
        if isinstance(self.env, Episode):
            marks = [_mark(message) for message in conversation]
            known = len(self._heard) if marks[: len(self._heard)] == self._heard else 0  # 0: it begins anew
            self.env.hear(*conversation[known:])
            self._heard = marks
            self._asked = time.monotonic()

    async def say(self, *messages: Mapping[str, Any], **known: Any) -> None:
        """What the model answered, with what is ``known`` of how it came to that."""
        if isinstance(self.env, Episode):
            for message in messages:
                await self.env.say(message, seconds=time.monotonic() - self._asked, **known)
                self._heard.append(_mark(message))


def _mark(message: Mapping[str, Any]) -> tuple[Any, Any]:
    """What tells a message from another. A framework may repeat in other words what a model said."""
    role = message["role"]
    return role, None if role == "assistant" else message.get("content")
