"""``ModelGateway``: listening, episodes, and agents that play behind it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Collection, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from types import TracebackType
from typing import Any, Self

from aenv.cleanup import finish
from aenv.errors import Invalid, RateLimited
from aenv.rl.model_gateway.app import App
from aenv.rl.model_gateway.episodes import Episodes, Limits, ModelEpisode, Record
from aenv.rl.model_gateway.recording import tell
from aenv.rl.model_gateway.upstreams import Upstream, Upstreams
from aenv.rl.playing import Agent, agent_name
from aenv.rl.recording import Episode, Over
from aenv.rl.tasks import Task
from aenv.runtime.access import Hosts, is_loopback
from aenv.runtime.protocol import App as Asgi
from aenv.runtime.protocol import Connections
from aenv.runtime.server import bind

TIMEOUT = 600.0
_BACKLOG = 1024
_END = 1.0


class ModelGateway:
    """A proxy between agents and the servers of a model. It records what passes, and keeps the provider's key.

    Used as ``async with ModelGateway(["http://gpu-1:8000/v1"]) as gateway``.
    """

    def __init__(
        self,
        upstreams: Sequence[str | Upstream],
        *,
        host: str = "127.0.0.1",
        port: int = 0,
        tokens: bool = True,
        timeout: float = TIMEOUT,
        retries: int = 5,
        allowed_fields: Collection[str] = (),
        allowed_hosts: Sequence[str] = (),
        owner: Asgi | None = None,
    ) -> None:
        """``tokens`` asks the servers for token ids and log-probabilities; ``timeout`` is for an answer, or between
        two pieces of one; ``retries`` is how often a call is asked again before anything of it has been answered.
        ``allowed_fields`` are those of the servers' own that agents may send, such as ``chat_template_kwargs``."""
        if owner is None and not is_loopback(host):
            raise Invalid(
                f"a gateway on {host} is for more than this machine, and needs an owner's token",
                hint="'aenv serve models' takes it from AENV_MODELS_TOKEN",
            )
        self.upstreams = Upstreams(upstreams, timeout=timeout, retries=retries, allowed_fields=allowed_fields)
        self.host, self.port = host, port
        self.episodes = Episodes()
        guard = Hosts(loopback=is_loopback(host), allowed_hosts=[*allowed_hosts, host])
        self._app = App(self.episodes, self.upstreams, guard, tokens=tokens, owner=owner)
        self._stack = AsyncExitStack()
        self.url = ""
        """Where it is, once it listens."""

    async def __aenter__(self) -> Self:
        async with AsyncExitStack() as stack:
            sock = stack.enter_context(bind(self.host, self.port))
            self.port = sock.getsockname()[1]
            self.url = f"http://{f'[{self.host}]' if ':' in self.host else self.host}:{self.port}"
            connections = Connections(self._app)
            server = await asyncio.get_running_loop().create_server(connections, sock=sock, backlog=_BACKLOG)
            stack.push_async_callback(connections.drain, _END)
            stack.callback(server.close)
            self._stack = stack.pop_all()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await finish(self._stack.aclose())

    def begin(self, limits: Limits) -> ModelEpisode:
        """An episode, which goes on until ``episodes.end``."""
        hidden = tuple(upstream.key_variable for upstream in self.upstreams.all if upstream.key_variable)
        episode = ModelEpisode(self.url, limits, hidden)
        self.episodes.add(episode)
        return episode

    @asynccontextmanager
    async def episode(self, **limits: Any) -> AsyncIterator[ModelEpisode]:
        """An episode for the length of a block, with a key of its own; ``limits`` are those of ``Limits``."""
        episode = self.begin(Limits(**limits))
        try:
            yield episode
        finally:
            await finish(self.episodes.end(episode))

    def agent(self, agent: Agent, **limits: Any) -> Agent:
        """The same agent, behind this gateway: it finds its model by ``env.models``, or by the variables of its
        program, and what its model says is in the trajectory."""
        return _Behind(self, agent, Limits(**limits))


class _Behind:
    """An agent behind a gateway."""

    def __init__(self, gateway: ModelGateway, agent: Agent, limits: Limits) -> None:
        self.name = agent_name(agent)
        self._gateway = gateway
        self._agent = agent
        self._limits = limits

    async def __call__(self, env: Episode, task: Task) -> Any:
        models = self._gateway.begin(self._limits)
        models.heard = partial(_heard, env, models)
        models.around = partial(env.doing, "model")
        models.serial |= env.turns_left is not None
        env.models = models
        now = asyncio.get_running_loop().time
        answer = None
        try:
            async with asyncio.timeout(None) as end:
                # Many agents ask again for minutes, whatever they are told, before they give up by themselves.
                models.insisted = lambda: end.reschedule(now())
                answer = await self._agent(env, task)
        except Exception:
            if models.failure is None and not models.is_spent:
                raise
        finally:
            models.insisted = None
            try:
                await finish(self._gateway.episodes.end(models))
            finally:
                models.heard = None
                if (failure := models.failure or models.trouble) is not None:  # also where its time was over meanwhile
                    env.fail(failure, "model")
        if failure is not None:
            raise failure
        if models.is_spent:
            raise Over
        return answer


async def _heard(env: Episode, models: ModelEpisode, record: Record) -> None:
    try:
        models.kept += await tell(env, record)
    except Over:
        models.close("the episode is over")
        raise RateLimited("the episode is over") from None
    if env.turns_left == 0:  # what it says now may be done, and nothing more may be asked
        models.close("the episode's turns are used up")
