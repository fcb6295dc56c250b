"""An environment of verifiers as one of ours: an author's module calls ``publish("TASKSET")``.

verifiers plays the episode, with its own setup, tool servers, stops and scoring. Ours are the agent's seat, a harness
that waits for whoever calls the tools, and the model that the seat asks, which answers what was called or said.
"""

from __future__ import annotations

import asyncio
import os
import secrets
import sys
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack
from types import ModuleType
from typing import Any, ClassVar

import verifiers.v1 as vf
from aiohttp import web
from mcp.server.mcpserver import MCPServer
from verifiers.v1.utils.decorators import discover_decorated

from aenv.errors import Invalid, NotFound, Unsupported
from aenv.integrations.published import Offer, register
from aenv.integrations.verifiers.seat import SHELL, SHELL_HOW, SHELL_TAKES, Episode
from aenv.models import ToolResult
from aenv.runtime.context import Context

SAY = "send_message"
_HOW = f"Whatever you say, also your answer, is heard only when you say it with the tool {SAY}."
_SAY = {
    "type": "object",
    "properties": {"message": {"type": "string", "description": "What to say: the whole answer, where it is one."}},
    "required": ["message"],
}


def publish(env: str | Mapping[str, Any] | vf.EnvConfig, *, seat: str = "", shell: bool = False) -> None:
    """Register the tools of an environment of verifiers, the tool ``send_message``, a reset that takes a task, the
    function ``tasks`` and the reward ``verifiers_reward``.

    ``env`` is the id of a taskset, or the configuration of an environment; ``seat`` is which of its agents is played
    here, where it has several. With ``shell``, the agent has a tool ``bash`` where the task's files are.
    """
    table = Table({"taskset": {"id": env}} if isinstance(env, str) else env, seat, shell)
    said = "Say something to whoever set the task, or whoever talks to you."
    tools = [Offer(SAY, table.say, _SAY, said), *table.tools()]
    if shell:
        tools.append(Offer(SHELL, table.run, SHELL_TAKES, SHELL_HOW))
    register(table, tools, table.verifiers_reward, {"tasks": table.tasks})


class Seat(vf.Harness[vf.HarnessConfig]):
    """The program of the agent: whoever calls the tools of the instance."""

    APPENDS_SYSTEM_PROMPT, SUPPORTS_MCP, SUPPORTS_RESUME = True, True, True
    EXECUTES_CODE, NEEDS_CONTAINER = False, False
    table: ClassVar[Table]

    async def launch(
        self,
        ctx: vf.ModelContext,
        trace: vf.Trace,
        runtime: vf.Runtime,
        endpoint: str,
        secret: str,
        mcp_urls: dict[str, str],
        data: vf.TaskData,
    ) -> vf.ProgramResult:
        """Play it until the agent has said something."""
        _, prompt = self.resolve_prompt(data)
        asked: vf.Messages = [vf.UserMessage(content=prompt)] if isinstance(prompt, str) else list(prompt or [])
        return await self.resume(ctx, trace, runtime, endpoint, secret, mcp_urls, data, asked)

    async def resume(
        self,
        ctx: vf.ModelContext,
        trace: vf.Trace,
        runtime: vf.Runtime,
        endpoint: str,
        secret: str,
        mcp_urls: dict[str, str],
        data: vf.TaskData,
        messages: vf.Messages,
        tool_interception_url: str | None = None,
    ) -> vf.ProgramResult:
        """Go on with what somebody has said."""
        episode = self.table.episode
        await episode.play(trace, runtime, endpoint, secret, mcp_urls, data.system_prompt, messages)
        return vf.ProgramResult(exit_code=0, stdout="", stderr="")


class Table:
    """The environment in an instance, and the episode that is played."""

    def __init__(self, given: Mapping[str, Any] | vf.EnvConfig, seat: str, shell: bool) -> None:
        config = vf.resolve_env_config(given if isinstance(given, vf.EnvConfig) else dict(given))
        agents = {name: value for name, value in config if isinstance(value, vf.AgentConfig)}
        if not seat and len(agents) == 1:
            (seat,) = agents
        if seat not in agents:
            raise Invalid(f"{config.env_id} has the agents {', '.join(agents)}", hint="say with seat= which is played")
        if unled := [name for name, agent in agents.items() if name != seat and not (agent.client and agent.model)]:
            raise Invalid(f"the agent {unled[0]} has no model of its own", hint=f"give {unled[0]} a client and a model")
        module: Any = ModuleType(f"aenv_seat_{secrets.token_hex(4)}")  # verifiers knows plugins by their module
        module.__all__ = ["Played"]
        module.Played = type("Played", (Seat,), {"table": self})
        sys.modules[module.__name__] = module
        played = {"harness": vf.HarnessConfig(id=module.__name__), "runtime": vf.SubprocessConfig(), "client": None}
        played |= {"model": None, "retries": vf.RetryConfig()}  # an agent that has played does not play it again
        self._env = vf.load_environment(config.model_copy(update={seat: agents[seat].model_copy(update=played)}))
        self._kind = type(self._env.taskset).task_type()
        if self._kind.NEEDS_CONTAINER:
            raise Unsupported(f"tasks of {config.taskset.id} need a container each, and a sandbox has none to give")
        self._shell = shell
        self._stack = AsyncExitStack()
        self._model: vf.ModelContext | None = None
        self._episode: Episode | None = None

    @property
    def episode(self) -> Episode:
        """The one under way, or over."""
        if self._episode is None:
            raise Invalid("no task has begun", hint='begin one with Environment.reset(seed, {"task": ...})')
        return self._episode

    def tools(self) -> Iterator[Offer]:
        """Those of the tasks' own tool servers, named as verifiers' harnesses name them."""
        config = self._env.taskset.config
        for toolset in [*self._env.taskset.toolsets(config), *self._kind.toolsets(config.task)]:
            if toolset.config.url:
                raise Unsupported(
                    f"the tools of {type(toolset).__name__} are at {toolset.config.url}, known only there"
                )
            server, prefix = MCPServer("listing"), toolset.server_name
            toolset.register(server)
            for tool in _now(server.list_tools):
                name = f"{prefix}_{tool.name}" if prefix else tool.name
                yield Offer(name, self._calling(name), tool.input_schema, tool.description or "")

    def _calling(self, name: str) -> Callable[..., Any]:
        async def call(**arguments: Any) -> ToolResult:
            return await self.episode.call(name, arguments)

        return call

    async def start(self, ctx: Context) -> None:
        """Serve the model that the seat asks, and what all episodes share."""
        own = (sys.prefix, sys.base_prefix)
        paths = [path for path in sys.path if path and not path.startswith(own)]
        os.environ["PYTHONPATH"] = os.pathsep.join(paths)  # tool servers import the project's modules, too
        path = f"/{secrets.token_urlsafe()}"  # no other program here knows it
        app = web.Application()
        app.router.add_post(f"{path}/chat/completions", self._answer)
        runner = web.AppRunner(app, access_log=None)
        await runner.setup()
        self._stack.push_async_callback(runner.cleanup)
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        url = f"http://127.0.0.1:{runner.addresses[0][1]}{path}"
        client = vf.EvalClientConfig(base_url=url, api_key_var="AENV_NO_KEY")
        self._model = vf.ModelContext(model="agent", client=client, sampling=vf.SamplingConfig())
        await self._stack.enter_async_context(self._env.serving())

    async def stop(self) -> None:
        """End what is played, and what is served."""
        if self._episode is not None:
            await self._episode.cancel()
        await self._stack.aclose()

    async def _answer(self, request: web.Request) -> web.Response:
        return web.json_response(self.episode.answer)

    async def tasks(self, limit: int | None = None) -> dict[str, Any]:
        """The tasks, or the first so many.

        Args:
            limit: How many.
        """
        if limit is None and not self._env.taskset.bounded:
            raise Invalid("there is no end of tasks", hint="say how many with limit")
        found = self._env.taskset if limit is None else self._env.taskset.take(limit)
        source = {"name": self._env.config.env_id}
        return {"tasks": [self._told(task) for task in found], "source": source}

    def _told(self, task: vf.Task) -> dict[str, Any]:
        data = task.data
        told = {"id": _id(data), "reset": {"task": _id(data)}, "system": _HOW}
        if not self._is_alone:
            return told | {"instruction": "Do what the observation asks of you."}
        if data.system_prompt:
            told["system"] = f"{data.system_prompt}\n\n{_HOW}"
        is_text = isinstance(data.prompt, str)
        return told | {"instruction": data.prompt if is_text else "Go on with the conversation of the observation."}

    @property
    def _is_alone(self) -> bool:
        """Whether the agent is asked for what the task says, and nothing else."""
        return type(self._env) is vf.SingleAgentEnv

    async def restart(self, task: str, seed: int | None = None) -> dict[str, Any] | None:
        """Begin a task: what the agent is shown beside its instruction.

        Args:
            task: Its id.
            seed: It changes nothing.
        """
        if self._episode is not None:
            await self._episode.cancel()
            self._episode = None
        assert self._model is not None
        found = next((one for one in self._env.taskset if _id(one.data) == task), None)
        if found is None:
            raise NotFound(f"there is no task {task[:100]!r}", hint="the function 'tasks' tells them")
        if found.data.image is not None:
            raise Unsupported(f"task {task} wants the image {found.data.image}, and a sandbox has no container to give")
        if discover_decorated(found, "intercept"):
            raise Unsupported(f"task {task} rewrites what its agent is told, and agents here are told by their tools")
        self._episode = Episode(self._env.run_episode(found, self._model), shell=self._shell)
        seen = await self._episode.opening()
        return None if self._is_alone and isinstance(found.data.prompt, str) else seen

    async def say(self, message: str) -> dict[str, Any]:
        """Say something: what is answered, and whether the conversation is over."""
        return await self.episode.say(message)

    async def run(self, command: str) -> ToolResult:
        """Run a command where the task's files are."""
        return await self.episode.call(SHELL, {"command": command})

    async def verifiers_reward(self, answer: str | None = None) -> dict[str, Any]:
        """What verifiers scores the episode, which ends with that.

        Args:
            answer: The agent's last words, for one that has not said them with a tool.
        """
        return await self.episode.score(answer)


def _id(data: vf.TaskData) -> str:
    return data.id or data.name or f"task-{data.idx}"


def _now(asked: Callable[[], Any]) -> Any:
    """What a coroutine gives, also where a loop runs."""
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(lambda: asyncio.run(asked())).result()
