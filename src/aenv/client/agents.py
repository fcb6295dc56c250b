"""One of several agents on a shared instance: its own tools, its turn and its reward."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from aenv.client.vendors import openai_tools
from aenv.control import plain_header
from aenv.models import ToolResult

if TYPE_CHECKING:
    from aenv.client.environment import Environment


class Agent:
    """What an instance is to one of its agents. The instance is the ``Environment``'s, which starts and releases it."""

    def __init__(self, env: Environment, name: str) -> None:
        self.name = name
        self._env = env
        self._header = f"AEnv-Agent: {plain_header(name, 'the name of an agent')}\r\n".encode()
        self._openai_names: dict[str, str] = {}

    async def list_tools(self) -> list[dict[str, Any]]:
        """The tools that this agent has, as ``Environment.list_tools`` tells them."""
        return await self._env._listed(self._header)

    async def list_openai_tools(self) -> list[dict[str, Any]]:
        """The same as OpenAI's API takes them; ``call_tool`` understands the names given here."""
        found, self._openai_names = openai_tools(await self._env._tools(self._header))
        return found

    async def call_tool(
        self, name: str, arguments: Mapping[str, Any] | None = None, timeout: float | None = None
    ) -> ToolResult:
        """Call a tool as this agent. When it is another's turn, the tool fails and says whose."""
        return await self._env._call_as(self._header, self._openai_names.get(name, name), arguments, timeout)

    async def call_reward(
        self, arguments: Mapping[str, Any] | None = None, name: str | None = None, timeout: float | None = None
    ) -> Any:
        """Take the reward of this agent, which the author's function finds in ``Context.agent``."""
        return await self._env._reward_of(self._header, arguments, name, timeout)

    async def agent_url(self) -> str:
        """A URL to hand to this agent: it opens the tools of nobody else."""
        return await self._env._agent_url(self.name)
