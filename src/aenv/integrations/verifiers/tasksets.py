"""Environments of ours for verifiers: a module with a subclass of ``AenvTaskset``, and ``AenvEnv``, is a taskset."""

from __future__ import annotations

import asyncio
import secrets
import socket
import sys
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from types import ModuleType
from typing import Any

import msgspec
import uvicorn
import verifiers.v1 as vf
from mcp import Client, types
from mcp.server.lowlevel import Server
from verifiers.v1.mcp import SharedToolServer

from aenv.client.environment import Environment
from aenv.errors import AEnvError, Invalid, did_you_mean
from aenv.integrations.checking import ENV, TASK, WRITE, CheckFailed, judge, lose_episode
from aenv.rl.driven import RULES, Driven
from aenv.rl.models import opening
from aenv.rl.rules import Rules
from aenv.rl.tasks import Task


class AenvData(vf.TaskData):
    """A task as verifiers sends and keeps it."""

    task: dict[str, Any]
    """The fields of ours."""


class AenvTask(vf.Task[AenvData]):
    """A task of ours. All its rollouts begin alike."""

    driven: Driven | None = None
    """The episode, while it is played."""

    @property
    def key(self) -> str:
        """What its prompt is shows only after the reset, so that is no part of it."""
        return Task.of(self.data.task).id

    @vf.stop  # type: ignore[untyped-decorator, unused-ignore]
    def is_over(self, trace: vf.Trace) -> bool:
        """Whether no more can be done: its instance is lost, or its time is over."""
        driven = self.driven
        return driven is not None and (driven.trajectory is not None or driven.episode.broken is not None)


class AenvTaskset(vf.Taskset[AenvTask, vf.TasksetConfig]):
    """Tasks of an environment of ours. A subclass says which."""

    env: str | Environment = ""
    """What is played in."""
    tasks: Sequence[Task | str | Mapping[str, Any]] = ("",)
    """Instructions, or the fields of tasks."""
    rules: Rules = RULES

    def load(self) -> Iterator[AenvTask]:
        """Its tasks, as verifiers takes them."""
        for given in self.tasks:
            task = Task.of(given)
            fields = msgspec.to_builtins(task)
            data = AenvData(id=task.id, prompt=task.instruction, system_prompt=task.system or None, task=fields)
            yield AenvTask(data, self.config.task)


class AenvEnvConfig(vf.EnvConfig):
    """The agent is a model that calls the tools, and its program runs on this machine."""

    agent: vf.AgentConfig = vf.AgentConfig(harness={"id": "null"}, runtime=vf.SubprocessConfig())


class AenvEnv(vf.Env[AenvEnvConfig]):
    """Plays a rollout in an instance of its own, whose tools any harness of verifiers calls over MCP.

    An episode whose instance is lost goes on in another. Where that cannot be, it is an ``EnvError``, on the trace and
    on verifiers' episode, and there is no reward.
    """

    def __init__(self, config: AenvEnvConfig) -> None:
        super().__init__(config)
        if config.agent.retries.max_retries or config.agent.retries.rules:
            raise Invalid("an agent cannot try again in an episode of its", hint="set retries of env, not of env.agent")
        if not self._runs_local():
            raise Invalid("the tools are served on this machine only", hint="set env.agent.runtime.type to subprocess")

    def driven(self, task: AenvTask) -> Driven:
        """The episode of a rollout."""
        played: AenvTaskset = self.taskset
        sample = secrets.randbits(31)  # no rollout of a group goes on as another does
        return Driven(played.env, task.data.task, rules=played.rules, group=task.key, sample=sample)

    async def run(self, task: AenvTask, agents: vf.Agents) -> None:
        """Play it, and score it where neither platform nor agent failed."""
        driven = self.driven(task)
        try:
            seen = await driven.begin()
            playing = task.with_data(prompt=opening(driven.task, seen))
            playing.driven = driven
            async with _served(driven) as url:
                tools = {"": SharedToolServer(url, local=True, external=True)}
                trace = await agents.agent.run(playing, tools=tools)
            if trace.ok:
                trajectory = await driven.end(trace.last_reply)
                if failed := trajectory.failure:
                    error = vf.EnvError(f"{failed.kind}: {failed.reason}")
                    trace.record_error(error)
                    raise error
                trace.record_reward("reward", trajectory.reward)
        finally:
            await driven.abandon()


def check() -> str:
    """Play an episode with a harness that needs no model, and lose its instance on the way."""
    episodes: list[Driven] = []
    seen: list[str] = []

    class Checked(AenvTaskset):
        env = ENV
        tasks = (TASK,)

    class CheckedEnv(AenvEnv):
        def driven(self, task: AenvTask) -> Driven:
            episodes.append(super().driven(task))
            return episodes[-1]

    class Scripted(vf.Harness[vf.HarnessConfig]):
        SUPPORTS_MCP, NEEDS_CONTAINER, EXECUTES_CODE = True, False, False

        async def launch(self, *given: Any, **more: Any) -> vf.ProgramResult:
            (driven,) = episodes
            (url,) = given[5].values()
            async with Client(url) as client:
                for go_on in (True, False):
                    await client.call_tool(**WRITE)
                    assert driven.episode.sandbox is not None
                    seen.append(driven.episode.sandbox.id)
                    if go_on:
                        await lose_episode(driven)
            return vf.ProgramResult(exit_code=0, stdout="", stderr="")

    module: Any = ModuleType("aenv_check")  # verifiers knows plugins by the module that has them
    module.__all__ = ["Checked", "CheckedEnv", "Scripted"]
    module.Checked, module.CheckedEnv, module.Scripted = Checked, CheckedEnv, Scripted
    sys.modules[module.__name__] = module
    try:
        ended = asyncio.run(_played(module.__name__))
    finally:
        del sys.modules[module.__name__]
    if not ended.ok:
        errors = [error.message for one in (ended, *ended.traces) for error in one.errors]
        raise CheckFailed(f"the episode failed: {errors}")
    return judge(ended.traces[0].reward, *seen)


async def _played(name: str) -> vf.Episode:
    agent = {"harness": {"id": name}, "runtime": {"type": "subprocess"}}
    env = vf.load_environment(AenvEnvConfig(taskset={"id": name}, agent=agent))
    client = vf.EvalClientConfig(base_url="http://127.0.0.1:9", api_key_var="AENV_NO_KEY")  # nobody asks it
    model = vf.ModelContext(model="none", client=client, sampling=vf.SamplingConfig())
    async with env.serving():
        (task,) = env.taskset
        return await env.run_episode(task, model)


class _Uvicorn(uvicorn.Server):
    """One of several at a time: signals are whose program it is."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


@asynccontextmanager
async def _served(driven: Driven) -> AsyncIterator[str]:
    """Serve the tools of an episode over MCP; where. What the platform fails at is told, and ``end`` tells it, too."""
    offered = [tool["function"] for tool in await driven.list_openai_tools()]
    names = [tool["name"] for tool in offered]

    async def listed(context: Any, asked: Any) -> types.ListToolsResult:
        tools = [{**tool, "inputSchema": tool["parameters"]} for tool in offered]
        return types.ListToolsResult.model_validate({"tools": tools})

    async def called(context: Any, asked: types.CallToolRequestParams) -> types.CallToolResult:
        if asked.name not in names:
            return _failed(f"there is no tool {asked.name[:100]!r}; {did_you_mean(asked.name, names)}")
        try:
            found = await driven.call_tool(asked.name, asked.arguments)
        except AEnvError as exc:
            return _failed(str(exc))
        answer = {"content": found.content, "isError": found.is_error, "structuredContent": found.structured}
        return types.CallToolResult.model_validate(answer)

    path = f"/{secrets.token_urlsafe()}/mcp"  # no other program of this machine knows it
    served = Server("aenv", on_list_tools=listed, on_call_tool=called)
    app = served.streamable_http_app(streamable_http_path=path, json_response=True, stateless_http=True)
    server = _Uvicorn(uvicorn.Config(app, log_level="critical", timeout_graceful_shutdown=1))
    with socket.create_server(("127.0.0.1", 0)) as listening:
        serving = asyncio.create_task(server.serve([listening]))
        try:
            yield f"http://127.0.0.1:{listening.getsockname()[1]}{path}"
        finally:
            server.should_exit = True
            await serving


def _failed(why: str) -> types.CallToolResult:
    return types.CallToolResult.model_validate({"content": [{"type": "text", "text": why}], "isError": True})
