"""``SyncEnvironment``: the blocking face of ``Environment``, derived from it method by method.

The work happens on one background event loop of the process, so it also serves inside a running loop or a notebook.
"""

from __future__ import annotations

import asyncio
import atexit
import functools
import os
import threading
from collections.abc import AsyncGenerator, Callable, Coroutine, Iterator
from concurrent.futures import Future
from contextlib import suppress
from types import TracebackType
from typing import Any, Concatenate, ParamSpec, Self, TypeVar

from aenv.client.agents import Agent
from aenv.client.environment import Environment
from aenv.client.lineage import Forked
from aenv.models import ToolResult

P = ParamSpec("P")
R = TypeVar("R")
ENDING = 20.0
"""Seconds that a call which was broken off gets to clean up after itself, before its caller goes on."""

_loops: dict[int, asyncio.AbstractEventLoop] = {}
_starting = threading.Lock()


def _loop() -> asyncio.AbstractEventLoop:
    """The background loop of this process; a forked child gets its own."""
    with _starting:
        found = _loops.get(os.getpid())
        if found is None:
            found = _loops[os.getpid()] = asyncio.new_event_loop()
            threading.Thread(target=found.run_forever, name="aenv-sync", daemon=True).start()
            atexit.register(_leave, found)
        return found


def _leave(loop: asyncio.AbstractEventLoop) -> None:
    """The program ends: so does what still goes on in the background, while it can."""
    if _loops.get(os.getpid()) is loop:
        with suppress(TimeoutError):
            asyncio.run_coroutine_threadsafe(_end(list(asyncio.all_tasks(loop))), loop).result(ENDING)


def start(work: Coroutine[Any, Any, R]) -> Future[R]:
    """Let it go on, on the background loop."""
    return asyncio.run_coroutine_threadsafe(work, _loop())


def wait(work: Coroutine[Any, Any, R]) -> R:
    """What comes of it, on the background loop."""
    loop = _loop()
    if asyncio._get_running_loop() is loop:
        work.close()
        raise RuntimeError("what blocks cannot be called on the loop that it waits for: use Environment there")
    tasks: list[asyncio.Task[Any]] = []

    async def noted() -> R:
        if task := asyncio.current_task():
            tasks.append(task)
        return await work

    try:
        return asyncio.run_coroutine_threadsafe(noted(), loop).result()
    except BaseException:
        # Ctrl-C in the caller ends the call, too, also when it came before there was a future to wait for. The
        # program may end right after it.
        if not (tasks and tasks[0].done()):
            with suppress(TimeoutError):
                asyncio.run_coroutine_threadsafe(_end(tasks), loop).result(ENDING)
        raise


async def _end(tasks: list[asyncio.Task[Any]]) -> None:
    """Break off what was begun; what was handed to the loop before this has been noted by now."""
    for task in tasks:
        task.cancel()
    if tasks:
        await asyncio.wait(tasks)


def _blocking(
    method: Callable[Concatenate[Environment, P], Coroutine[Any, Any, R]],
) -> Callable[Concatenate[SyncEnvironment, P], R]:
    @functools.wraps(method)
    def call(self: SyncEnvironment, /, *args: P.args, **kwargs: P.kwargs) -> R:
        return wait(method(self.environment, *args, **kwargs))

    return call


def _iterating(
    method: Callable[Concatenate[Environment, P], AsyncGenerator[R, None]],
) -> Callable[Concatenate[SyncEnvironment, P], Iterator[R]]:
    @functools.wraps(method)
    def call(self: SyncEnvironment, /, *args: P.args, **kwargs: P.kwargs) -> Iterator[R]:
        found = method(self.environment, *args, **kwargs)
        try:
            while True:
                try:
                    value = wait(found.__anext__())
                except StopAsyncIteration:
                    return
                yield value
        finally:
            # Not waited for: an iterator that is thrown away may end on any thread, the loop's own among them.
            asyncio.run_coroutine_threadsafe(found.aclose(), _loop())

    return call


class SyncAgent:
    """``Agent`` with methods that block."""

    def __init__(self, agent: Agent) -> None:
        self.agent = agent

    @functools.wraps(Agent.list_tools)
    def list_tools(self) -> list[dict[str, Any]]:
        return wait(self.agent.list_tools())

    @functools.wraps(Agent.list_openai_tools)
    def list_openai_tools(self) -> list[dict[str, Any]]:
        return wait(self.agent.list_openai_tools())

    @functools.wraps(Agent.call_tool)
    def call_tool(self, *args: Any, **kwargs: Any) -> ToolResult:
        return wait(self.agent.call_tool(*args, **kwargs))

    @functools.wraps(Agent.call_reward)
    def call_reward(self, *args: Any, **kwargs: Any) -> Any:
        return wait(self.agent.call_reward(*args, **kwargs))

    @functools.wraps(Agent.agent_url)
    def agent_url(self) -> str:
        return wait(self.agent.agent_url())


class SyncEnvironment:
    """``Environment`` with methods that block. Takes the same arguments."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.environment = Environment(*args, **kwargs)

    @classmethod
    def of(cls, environment: Environment) -> SyncEnvironment:
        """The blocking face of an environment that is there."""
        found = cls.__new__(cls)
        found.environment = environment
        return found

    initialize = _blocking(Environment.initialize)
    release = _blocking(Environment.release)
    destroy = release
    list_tools = _blocking(Environment.list_tools)
    list_openai_tools = _blocking(Environment.list_openai_tools)
    call_tool = _blocking(Environment.call_tool)
    call_reward = _blocking(Environment.call_reward)
    call_function = _blocking(Environment.call_function)
    list_functions = _blocking(Environment.list_functions)
    check_health = _blocking(Environment.check_health)
    get_env_info = _blocking(Environment.get_env_info)
    package = _blocking(Environment.package)
    wait_for_ready = _blocking(Environment.wait_for_ready)
    reset = _blocking(Environment.reset)
    agent_url = _blocking(Environment.agent_url)
    exec = _blocking(Environment.exec)
    upload = _blocking(Environment.upload)
    download = _blocking(Environment.download)
    history = _blocking(Environment.history)
    reseed = _blocking(Environment.reseed)
    checkpoint = _blocking(Environment.checkpoint)
    restore = _blocking(Environment.restore)
    extend = _blocking(Environment.extend)
    expose = _blocking(Environment.expose)
    logs = _iterating(Environment.logs)

    def agent(self, name: str) -> SyncAgent:
        """One of several agents on this instance, with tools, a turn and a reward of its own."""
        return SyncAgent(self.environment.agent(name))

    @functools.wraps(Environment.fork)
    def fork(self, n: int = 1, *, same_random: bool = False) -> list[SyncEnvironment]:
        return [SyncEnvironment.of(one) for one in wait(self.environment.fork(n, same_random=same_random))]

    @property
    def forked(self) -> Forked | None:
        """How it was forked; None when it was not."""
        return self.environment.forked

    @property
    def instance_id(self) -> str | None:
        """What the sandbox is called; None while there is none."""
        return self.environment.instance_id

    def __enter__(self) -> Self:
        try:
            self.initialize()
        except BaseException:
            self.release()  # it may have been ready when Ctrl-C came
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()
