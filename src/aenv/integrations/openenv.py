"""An OpenEnv server as an environment of ours: an author's module calls ``publish("http://...")``.

The other way round needs nothing from here: every instance answers OpenEnv's clients by itself.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

from openenv import GenericEnvClient

from aenv.client.environment import Environment
from aenv.client.sync import wait
from aenv.errors import Conflict, SandboxLost
from aenv.integrations.checking import ENV, TASK, WRITE, CheckFailed, lose
from aenv.integrations.published import register, steps, with_context
from aenv.runtime.context import Context

Where = str | Callable[..., str]


def publish(where: Where) -> None:
    """Register tools ``reset`` and ``step``, the reward ``episode_return``, a reset and the function ``openenv_state``.

    ``where`` is the address of the server, or gives it when an instance starts; where it takes an argument, that is the
    instance's ``Context``. Each instance has a session of its own there.
    """
    game = Game(where)
    action = {"type": "object", "description": "As the server's action schema has it."}
    tools = steps(game, action, "What else the server takes in a reset.")
    register(game, tools, game.episode_return, {"openenv_state": game.state})


class Game:
    """The session of an instance, and how far its episode has come."""

    def __init__(self, where: Where) -> None:
        self._where = where
        self._client: GenericEnvClient | None = None
        self._total = 0.0
        self._steps = 0
        self._is_over = True

    async def start(self, ctx: Context) -> None:
        """Open the session."""
        where = self._where
        if not isinstance(where, str):
            where = with_context(where, ctx)()
        client = GenericEnvClient(base_url=where)
        try:
            await client.connect()
        except ConnectionError as exc:
            raise SandboxLost(f"the OpenEnv server does not answer: {exc}") from exc
        self._client = client

    async def stop(self) -> None:
        """End it."""
        client, self._client = self._client, None
        if client is not None:
            await client.close()

    async def restart(self, seed: int | None = None, options: dict[str, Any] | None = None) -> dict[str, Any]:
        """Begin a new episode, as ``Environment.reset`` wants it."""
        return await self.reset(seed, options)

    async def reset(self, seed: int | None = None, options: dict[str, Any] | None = None) -> dict[str, Any]:
        """Begin a new episode; the first observation."""
        self._is_over = True
        given = {**(options or {}), **({} if seed is None else {"seed": seed})}
        found = await self._asked(lambda client: client.reset(**given))
        self._total, self._steps, self._is_over = float(found.reward or 0.0), 0, bool(found.done)
        return {"observation": found.observation, "info": found.metadata or {}}

    async def step(self, action: dict[str, Any]) -> dict[str, Any]:
        """Take one action: its reward, the observation after it, and whether the episode is over."""
        if self._is_over:
            raise Conflict("there is no episode under way: call reset")
        found = await self._asked(lambda client: client.step(action))
        self._total += float(found.reward or 0.0)
        self._steps += 1
        self._is_over = bool(found.done)
        return {
            "observation": found.observation,
            "reward": found.reward,
            "done": self._is_over,
            "info": found.metadata or {},
        }

    async def episode_return(self) -> dict[str, Any]:
        """The sum of the rewards of the episode so far."""
        return {"score": self._total, "steps": self._steps, "over": self._is_over}

    async def state(self) -> dict[str, Any]:
        """What the server says of the episode."""
        found: dict[str, Any] = await self._asked(lambda client: client.state())
        return found

    async def _asked(self, ask: Callable[[GenericEnvClient], Any]) -> Any:
        """What the server answers. A session that is gone is not opened again: its episode is gone with it."""
        if self._client is None:
            raise SandboxLost("the session with the OpenEnv server is over, and its episode with it")
        try:
            return await ask(self._client)
        except RuntimeError:  # what the server says is wrong: the session goes on
            raise
        except Exception as exc:
            await self.stop()
            raise SandboxLost(f"the OpenEnv server is gone: {exc!r}"[:300]) from exc


@asynccontextmanager
async def playing(env: Environment) -> AsyncIterator[GenericEnvClient]:
    """OpenEnv's own client, connected to an instance wherever that runs."""
    await env.initialize()
    url = (await env.agent_url()).partition("/mcp")[0] + "/openenv"
    token = env.sandbox.token if env.sandbox is not None else None
    async with GenericEnvClient(
        base_url=url, headers={"Authorization": f"Bearer {token}"} if token else None
    ) as client:
        yield client


def check() -> str:
    """Play an episode through OpenEnv's own client, and lose the instance."""
    return wait(_check())


async def _check() -> str:
    async with Environment(ENV) as env, playing(env) as client:
        await client.reset(reward=dict(TASK.reward or {}))
        await client.step({"tool_name": WRITE["name"], "arguments": WRITE["arguments"]})
        found = await client.step({"tool_name": "finish"})
        if (found.reward, found.done) != (1.0, True):
            raise CheckFailed(f"an episode that did its task was scored {found.reward}, not 1")
        await lose(env)
        try:
            told = await client.state()
        except Exception:  # whatever its transport raises
            return "an episode was scored 1, and an instance that is lost is an error of the client's"
    raise CheckFailed(f"the instance was ended, and its client was told {told!r}")
