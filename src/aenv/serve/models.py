"""``aenv serve models``: a model gateway as a process."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from aenv import config
from aenv.auth.tokens import check_given, local_token
from aenv.errors import Invalid
from aenv.rl.model_gateway.gateway import ModelGateway
from aenv.rl.model_gateway.routes import owned
from aenv.rl.model_gateway.upstreams import Upstream
from aenv.runtime.access import Hosts, is_loopback
from aenv.runtime.server import loop_factory, stop_at_signals


def upstreams(urls: Sequence[str], key_variables: Sequence[str], model: str = "") -> list[Upstream]:
    """The servers; one variable is for all of them, several are one for each."""
    if len(key_variables) > 1 and len(key_variables) != len(urls):
        raise Invalid("name one variable with a key for all servers, or one for each", hint="--upstream-key VARIABLE")
    named = list(key_variables) or [""]
    each = named * len(urls) if len(named) == 1 else named
    return [Upstream(url, key_variable=variable, model=model) for url, variable in zip(urls, each, strict=True)]


def owner_token(host: str) -> str:
    """What owners show: that of the setting; on the loopback, else that of this machine's user."""
    if given := config.get("models_token"):
        return check_given("AENV_MODELS_TOKEN", given)
    if is_loopback(host):
        return local_token(config.home())
    raise Invalid(
        f"a gateway on {host} is for more than this machine, and needs an owner's token",
        hint="set AENV_MODELS_TOKEN",
    )


def serve(
    servers: Sequence[Upstream],
    host: str,
    port: int,
    *,
    tokens: bool,
    allowed_fields: Sequence[str],
    ready: Callable[[str], None],
) -> None:
    """Serve until this process is asked to end; ``ready`` is told the gateway's URL."""
    with asyncio.Runner(loop_factory=loop_factory()) as runner:
        runner.run(_serve(servers, host, port, tokens, allowed_fields, ready))


async def _serve(
    servers: Sequence[Upstream],
    host: str,
    port: int,
    tokens: bool,
    allowed_fields: Sequence[str],
    ready: Callable[[str], None],
) -> None:
    stop = asyncio.Event()
    stop_at_signals(stop)
    allowed = [name for name in config.get("allowed_hosts").split(",") if name]
    desk, app = owned(owner_token(host), Hosts(loopback=is_loopback(host), allowed_hosts=[*allowed, host]))
    gateway = ModelGateway(
        servers,
        host=host,
        port=port,
        tokens=tokens,
        allowed_fields=allowed_fields,
        allowed_hosts=allowed,
        owner=app,
    )
    async with gateway as desk.gateway:
        ready(gateway.url)
        await stop.wait()
