"""``Context``: what a tool, reward or function may ask about the sandbox and the call it runs in."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from copy import copy
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from aenv import config
from aenv.errors import Unsupported

if TYPE_CHECKING:
    from aenv.runtime.children import Child, Children
    from aenv.runtime.conversations import Conversation, Conversations
    from aenv.runtime.hidden import Hidden, Printing
    from aenv.runtime.second import Second

_LEVELS = (
    (logging.CRITICAL, "critical"),
    (logging.ERROR, "error"),
    (logging.WARNING, "warning"),
    (logging.INFO, "info"),
)


def printable(text: str) -> str:
    """Text that UTF-8 can carry: half of a surrogate pair becomes a question mark."""
    return text if text.isascii() else text.encode("utf-8", "replace").decode()


class Instance(NamedTuple):
    """The sandbox, as the engine described it."""

    instance_id: str = "local"
    env_name: str = ""
    env_version: str = ""
    environment_variables: Mapping[str, str] = {}
    arguments: Sequence[str] = ()
    datasource: str = ""
    seed: int | None = None
    working_directory: Path = Path()


Notify = Callable[[str, dict[str, Any]], None]
"""Send an MCP notification (method, parameters) to whoever made the call. Safe from any thread."""


def silent(method: str, parameters: dict[str, Any]) -> None:
    """The ``Notify`` of a call that nobody listens to."""


class Context:
    """Annotate a parameter with this class and it is filled in; callers never see it.

    >>> @register_tool
    ... def work(steps: int, ctx: Context) -> str:
    ...     for step in range(steps):
    ...         ctx.progress(step + 1, steps)
    ...     return ctx.instance_id
    """

    def __init__(
        self,
        instance: Instance | None = None,
        *,
        name: str = "",
        agent: str = "",
        notify: Notify = silent,
        progress_token: str | int | None = None,
        conversations: Conversations | None = None,
        children: Children | None = None,
        hidden: Hidden | None = None,
    ) -> None:
        self._instance = instance or Instance()
        self._name = name
        self._agent = agent
        self._notify = notify
        self._progress_token = progress_token
        self._conversations = conversations
        self._conversation: Conversation | None = None
        self._children = children
        self._hidden = hidden

    @property
    def instance_id(self) -> str:
        return self._instance.instance_id

    @property
    def agent(self) -> str:
        """Which of several agents calls; empty where there are none, and for the owner."""
        return self._agent

    @property
    def env_name(self) -> str:
        return self._instance.env_name

    @property
    def env_version(self) -> str:
        return self._instance.env_version

    @property
    def environment_variables(self) -> Mapping[str, str]:
        return self._instance.environment_variables

    @property
    def arguments(self) -> Sequence[str]:
        """The instance's arguments; the same as ``sys.argv[1:]``."""
        return self._instance.arguments

    @property
    def datasource(self) -> str:
        return self._instance.datasource

    @property
    def seed(self) -> int | None:
        return self._instance.seed

    @property
    def working_directory(self) -> Path:
        return self._instance.working_directory

    @property
    def conversation(self) -> Conversation:
        """For an agent, the conversation that the message belongs to; for others, the only one that there is."""
        if self._conversation is not None:
            return self._conversation
        return self._all.only()

    @property
    def conversations(self) -> list[Conversation]:
        """What was said to the agents of this project and what they answered, the oldest conversation first."""
        return list(self._all)

    @property
    def _all(self) -> Conversations:
        from aenv.runtime.conversations import Conversations

        return self._conversations or Conversations()

    def within(self, conversation: Conversation) -> Context:
        """The same, for an agent that is asked in that conversation."""
        made = copy(self)
        made._conversation = conversation
        return made

    @property
    def printing(self) -> Printing | None:
        """What hides secrets in an answer that is told in pieces, where there are any."""
        from aenv.runtime.hidden import Printing

        return None if self._hidden is None else Printing(self._hidden)

    async def piece(self, text: str, number: int) -> None:
        """Tell the caller a piece of an agent's answer."""
        self.progress(number, message=text)

    @cached_property
    def second(self) -> Second:
        """The container beside this one, in a dual container: commands and files of the task's own image."""
        from aenv.runtime.second import Second

        if socket := config.get("second"):
            return Second(socket)
        raise Unsupported(
            'this environment has no second container: "podTemplate": "DualContainer" in deployConfig gives it one',
            hint="an instance of it names the image as its datasource",
        )

    def env(self, alias: str) -> Child:
        """The instance that ``deployConfig.dependsOn`` has under this alias. It lives and ends with this one."""
        if self._children is None:
            hint = f'give it one: "dependsOn": {{"{alias}": "name@range"}}'
            raise Unsupported("this environment depends on no other", hint=hint)
        return self._children.child(alias)

    @cached_property
    def logger(self) -> logging.Logger:
        """A logger whose lines go to the sandbox's log and, over MCP, to the client that made the call."""
        # Its own level lets every line through: the client and the sandbox's log each choose what they take.
        logger = logging.Logger(f"aenv.tool.{self._name}", logging.DEBUG)
        logger.parent = logging.getLogger("aenv.tool")
        logger.addHandler(_ToClient(self._notify))
        return logger

    def progress(self, done: float, total: float | None = None, message: str | None = None) -> None:
        """Tell the caller how far the call is. Nothing happens when the caller did not ask."""
        if self._progress_token is None:
            return
        parameters: dict[str, Any] = {"progressToken": self._progress_token, "progress": done}
        if total is not None:
            parameters["total"] = total
        if message is not None:
            parameters["message"] = printable(message)
        self._notify("notifications/progress", parameters)


class _ToClient(logging.Handler):
    def __init__(self, notify: Notify) -> None:
        super().__init__()
        self._send = notify

    def emit(self, record: logging.LogRecord) -> None:
        level = next((name for least, name in _LEVELS if record.levelno >= least), "debug")
        try:
            self._send(
                "notifications/message", {"level": level, "logger": record.name, "data": printable(self.format(record))}
            )
        except Exception:  # a line that cannot be written is no reason for the tool to fail
            self.handleError(record)
