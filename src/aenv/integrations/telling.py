"""A toolbox whose agent tells what its model hears and says, which an episode writes into its trajectory.

Frameworks catch exceptions of tools, tell their models of them and go on. So what the platform fails at ends an agent
by ``Over``, which is no ``Exception``, and the end of the block raises the failure itself.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Mapping, Sequence
from concurrent import futures
from types import TracebackType
from typing import Any, TypeVar

from aenv.client.environment import Environment
from aenv.errors import AEnvError, Conflict
from aenv.integrations.toolbox import Toolbox
from aenv.models import ToolResult
from aenv.rl.recording import Episode, Over

R = TypeVar("R")
Message = Mapping[str, Any]
"""As OpenAI's chat completions have it."""


class Telling(Toolbox):
    """What adapters of frameworks are made of. Nothing is written down where the environment is no episode's."""

    def __init__(self, env: Environment) -> None:
        super().__init__(env)
        self._episode = env if isinstance(env, Episode) else None
        self._told: list[Message] = []
        self.conversation: Callable[[], Sequence[Message]] | None = None
        """Where to look for what is not told by ``tell``, since a framework has no hook for it that could wait. What
        is new there is told before each call, and at the end."""

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if self.failure is None and (error is None or isinstance(error, (Exception, Over))):
                await self.catch_up()
        finally:
            ended = None if isinstance(error, Over) else error  # the failure, if there was one, is all there is to say
            await super().__aexit__(kind, ended, trace)

    async def use(self, name: str, arguments: Mapping[str, Any] | str | None, *, id: str = "") -> ToolResult:
        """Call a tool. What the platform fails at ends the agent; ``id`` is what its model called the call."""
        await self.catch_up()
        try:
            return await self.call(name, arguments, id=id)
        except AEnvError as exc:
            raise Over from exc

    def go_on(self) -> None:
        """Ends the agent, by an exception, where its model is not to be asked any more."""
        if self.failure is not None:
            raise Over from self.failure
        if not self.is_open:
            raise Over
        if self._episode is not None:
            self._episode.go_on()

    async def tell(self, *messages: Message, **known: Any) -> None:
        """What comes next in the conversation, with what is ``known`` of how the model came to it."""
        if self._episode is not None:
            for message in messages:
                if message["role"] == "assistant":
                    await self._episode.say(message, **known)
                else:
                    self._episode.hear(message)

    async def catch_up(self) -> None:
        """Tell what is new in the conversation."""
        if self.conversation is None:
            return
        now, known = list(self.conversation()), len(self._told)
        is_longer = now[:known] == self._told  # or else it was summed up, or another was begun
        new = now[known:] if is_longer else [message for message in now if message not in self._told]
        self._told += new
        await self.tell(*new)

    def blocking(self, work: Callable[[], Coroutine[Any, Any, R]]) -> R:
        """Do it from a thread. Where the block has ended meanwhile, the agent in the thread ends, too."""
        try:
            return self.wait_for(work)
        except (Conflict, futures.CancelledError):
            raise Over from None


def assistant(content: str | None, calls: Sequence[tuple[str, str, str]] = ()) -> dict[str, Any]:
    """What a model said: its words, and for each call the id, the name of the tool and its arguments as JSON."""
    message: dict[str, Any] = {"role": "assistant", "content": content or None}
    if calls:
        message["tool_calls"] = [
            {"id": id, "type": "function", "function": {"name": name, "arguments": arguments}}
            for id, name, arguments in calls
        ]
    return message


def answered(id: str, content: str) -> dict[str, Any]:
    """What a model heard of a call."""
    return {"role": "tool", "tool_call_id": id, "content": content}
