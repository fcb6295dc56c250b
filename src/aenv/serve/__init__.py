"""The platform as a process: hub, API service, gateway or controller over one store, from their options to their end.

What was acknowledged is in the store before it is answered. Sandboxes as processes and as containers live on when the
server ends, and are found again by the next one on the same store.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import os
import socket
import tempfile
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlsplit

from aenv import config, project, tracing
from aenv.api import pools, quotas, top, usage_routes
from aenv.api import routes as api_routes
from aenv.api.directory import InstanceDirectory
from aenv.api.gateway import Gateway
from aenv.api.here import ProjectHere
from aenv.api.instances import Instances
from aenv.api.metering import Meter
from aenv.api.observed import Observed
from aenv.api.packages import Packages, Source
from aenv.api.peers import Peers
from aenv.api.services import routes as service_routes
from aenv.api.services.directory import ServiceDirectory
from aenv.api.services.owners import Services
from aenv.api.top import Loads
from aenv.api.watchers import Watchers
from aenv.auth.audit import Audit
from aenv.auth.callers import Caller, Scope
from aenv.auth.keys import platform_key
from aenv.auth.secrets import Secrets
from aenv.auth.tokens import GIVEN, Tokens, check_given, digest, local_token
from aenv.cleanup import finish
from aenv.control import control_url
from aenv.controller import routes as controller_routes
from aenv.controller.directory import EngineDirectory
from aenv.controller.service import Controller
from aenv.engines import engine_class, load_engine
from aenv.engines.base import Engine
from aenv.errors import AEnvError, Conflict, NetworkError
from aenv.hub import routes as hub_routes
from aenv.hub.service import Hub
from aenv.runtime.access import Hosts, is_loopback
from aenv.runtime.protocol import Connections
from aenv.runtime.server import Listener, bind, loop_factory, stop_at_end, stop_at_signals
from aenv.serve.hubs import HubElsewhere, HubHere
from aenv.serve.naming import own_name, shared_name, url_of
from aenv.serve.options import TITLES, check
from aenv.serve.options import Options as Options
from aenv.store import Store, open_store
from aenv.store.blobs import open_blobs
from aenv.web import accounts, logs
from aenv.web.app import App
from aenv.web.metrics import Metrics
from aenv.web.routes import Route

log = logging.getLogger("aenv.serve")

STATE = "platform"
"""What engines call the sandboxes that live on."""
_STORE = 15.0
"""Seconds in which a store that does not answer yet must."""
_ENGINE = 60.0
"""Seconds in which an engine must show that it works."""
_SLOW, _PAUSE = 1.0, 0.5
_BACKLOG = 4096


class Running(NamedTuple):
    """A platform that is ready."""

    control_url: str
    data_url: str
    """Empty where there is no data plane: a hub has none."""
    token_file: Path | None
    """Where programs of this user find their token; None beyond the loopback."""
    first_token: str | None
    """The first admin's token, on the one occasion that it is shown."""


def serve(options: Options, ready: Callable[[Running], None]) -> None:
    """Serve until this process is asked to end, or the lifeline does; ``ready`` is told once all is there.

    Then calls in flight get the time of the setting ``grace``. Asked a second time, the process ends at once.
    """
    with asyncio.Runner(loop_factory=loop_factory()) as runner:
        runner.run(_serve(options, ready))


async def _serve(options: Options, ready: Callable[[Running], None]) -> None:
    stop = asyncio.Event()
    stop_at_signals(stop)
    if options.lifeline is not None:
        stop_at_end(options.lifeline, stop)
    asked = asyncio.create_task(stop.wait())
    async with AsyncExitStack() as stack:
        starting = asyncio.create_task(stack.enter_async_context(running(options)))
        try:
            await asyncio.wait((starting, asked), return_when=asyncio.FIRST_COMPLETED)
            if not starting.done():
                return
            ready(starting.result())
            await asked
            log.info("ending; instances live on" if options.project is None else "ending, with all instances")
        finally:
            asked.cancel()
            starting.cancel()
            await asyncio.wait((starting,))


@asynccontextmanager
async def running(options: Options) -> AsyncIterator[Running]:
    """A platform for the length of a block."""
    check(options)
    async with AsyncExitStack() as stack:
        control = stack.enter_context(bind(options.host, options.port))
        data = None
        if options.what != "hub":
            data = stack.enter_context(bind(options.host, options.data_port, "--data-port"))
        yield await _Platform(options, stack).start(control, data)


class _Platform:
    """What is put together for a platform. Whatever needs an end gets it from the stack, the newest first."""

    def __init__(self, options: Options, stack: AsyncExitStack) -> None:
        self._options = options
        self._stack = stack
        self._loopback = is_loopback(options.host)
        self._home = config.home()
        self._folder = self._home / ("controller" if options.what == "controller" else STATE)
        self._grace: float = config.get("grace")
        self._drain: float = config.get("drain")
        self._metrics, self._tracer = Metrics(), tracing.configured()
        self._peers: Peers | None = None

    async def start(self, control: socket.socket, data: socket.socket | None) -> Running:
        """Open the store, put the services over it, and listen."""
        store = await self._open_store()
        local = local_token(self._home) if self._loopback else None
        tokens, secrets, audit = Tokens(store, local=local, given=self._given()), Secrets(store), Audit(store)
        self._stack.push_async_callback(_finish, audit.close)
        routes = accounts.routes(tokens, secrets, audit)
        if self._tracer is not None:
            self._stack.push_async_callback(asyncio.to_thread, self._tracer.flush)
        data_url = ""
        if data is not None:
            data_url = self._options.data_url or url_of(self._options.host, data)
        more: list[Route]
        gateway: Gateway | None
        if self._options.what == "controller":
            more, gateway = await self._controller(await platform_key(store), data_url)
        else:
            more, gateway = await self._platform(store, tokens, secrets, local, control, data, data_url)
        routes += more
        app = App(
            routes,
            title=TITLES[self._options.what],
            authenticate=tokens.authenticate,
            guard=Hosts(loopback=self._loopback, allowed_hosts=self._names()),
            audit=audit.note,
            metrics=self._metrics,
            tracer=self._tracer,
        )
        await self._listen(app, control, gateway, data)
        first = None if self._loopback else await tokens.first(config.get("first_token"))
        token_file = self._home / "token" if self._loopback else None
        return Running(url_of(self._options.host, control), data_url, token_file, first)

    def _given(self) -> dict[str, Caller]:
        """Tokens of the settings, by digest. Nobody's own things are open to them: such owners there are none."""
        found: dict[str, Caller] = {}
        if token := config.get("metrics_token"):
            reader = Caller("(metrics)", frozenset({Scope.READ}), GIVEN)
            found[digest(check_given("AENV_METRICS_TOKEN", token))] = reader
        # A user's file has the key to a hub elsewhere, which is to open nothing here.
        if self._options.what in ("hub", "all") and (token := config.variable("hub_key")):
            reader = Caller("(api)", frozenset({Scope.FETCH}), GIVEN)
            found[digest(check_given("AENV_HUB_KEY", token))] = reader
        return found

    # Parts

    async def _platform(
        self,
        store: Store,
        tokens: Tokens,
        secrets: Secrets,
        local: str | None,
        control: socket.socket,
        data: socket.socket | None,
        data_url: str,
    ) -> tuple[list[Route], Gateway | None]:
        """The routes of hub and API service, as far as they are served here, and the gateway."""
        routes: list[Route] = []
        source: Source
        if self._options.what != "api":
            hub = await self._hub(store)
            routes += hub_routes.routes(hub)
            source = HubHere(hub)
        elif self._options.project is not None:
            await asyncio.to_thread(project.read, self._options.project, config_required=False)  # or it says why not
            source = ProjectHere(self._options.project)
        else:
            hub_url = control_url(self._options.hub_url)
            # This user's token is for servers of this machine, and nobody else is shown it.
            own = local if is_loopback(urlsplit(hub_url).hostname or "") else None
            source = HubElsewhere(hub_url, config.get("hub_key") or own)
        gateway = None
        if data is not None:
            host = self._options.host
            key = await platform_key(store)
            self._peers = Peers(
                *(store, self._name(key)),
                control_url=url_of(host, control),
                data_url=url_of(host, data),
                folder=self._folder / "servers",
            )
            instances = await self._instances(store, source, secrets, data_url, self._peers)
            observed = Observed(self._metrics, instances.lives, store, lines=logs.lines(), tracer=self._tracer)
            self._stack.push_async_callback(_finish, observed.close)
            await observed.start()
            meter = Meter(store, instances.lives)
            self._stack.push_async_callback(_finish, meter.close)
            meter.start()
            services = await self._services(store, instances, secrets, data_url)
            observed.observe_services(lambda: services.keepers.looked_after)
            loads = Loads(instances.lives)
            told = Watchers(observed, meter, loads)
            gateway = self._gateway(instances, services, tokens, key, data, told)
            routes += api_routes.routes(instances)
            routes += quotas.routes(instances.quotas)
            routes += pools.routes(instances.pools)
            routes += service_routes.routes(services)
            routes += usage_routes.routes(meter.ledger, instances.lives.clock)
            routes += top.routes(loads)
        return routes, gateway

    async def _controller(self, key: bytes, data_url: str) -> tuple[list[Route], Gateway]:
        """The routes of a controller, and the gateway to its sandboxes."""
        options = self._options
        controller = Controller(
            await self._engine(state=self._state(key), key=key),
            self._folder / "projects",
            data_url=data_url,
            carry=options.carry,
            datasources=[Path(path) for path in options.datasources],
        )
        self._stack.push_async_callback(_finish, controller.close)
        directory = EngineDirectory(controller.engine)
        gateway = Gateway(directory, key=key, open=True, loopback=self._loopback, allowed_hosts=self._names())
        controller.listeners += [directory.forget, gateway.ended]
        return controller_routes.routes(controller), gateway

    def _name(self, key: bytes) -> str:
        """What this server is called: by itself, or with all that reach the same sandboxes."""
        if self._options.name:
            return self._options.name
        if self._options.project is None and engine_class(self._options.engine).shared:
            return shared_name(self._options.engine, key)
        return own_name(self._options.store, self._home)

    async def _open_store(self) -> Store:
        url = self._options.store
        if not url and self._options.project is not None:
            folder = tempfile.TemporaryDirectory(prefix="aenv-run-", ignore_cleanup_errors=True)
            url = f"sqlite:{self._stack.enter_context(folder)}/platform.db"
        loop = asyncio.get_running_loop()
        deadline = loop.time() + _STORE
        saying = loop.call_later(_SLOW, log.warning, "waiting for the store, which does not answer yet")
        try:
            while True:
                try:
                    return await self._stack.enter_async_context(await open_store(url or self._own_store))
                except NetworkError:
                    if loop.time() > deadline:
                        raise
                await asyncio.sleep(_PAUSE)
        finally:
            saying.cancel()

    @property
    def _own_store(self) -> str:
        return f"sqlite:{self._folder / self._folder.name}.db"

    async def _hub(self, store: Store) -> Hub:
        blobs = await open_blobs(self._options.blobs or f"file:{self._folder / 'blobs'}")
        await self._stack.enter_async_context(blobs)
        # What is pushed is run apart from instances, and by nobody when this process is gone.
        engine = await self._engine(state="", known=self._options.what == "all")
        return await self._stack.enter_async_context(Hub(store, blobs, engine, folder=self._folder / "pushed"))

    async def _instances(
        self, store: Store, source: Source, secrets: Secrets, data_url: str, peers: Peers
    ) -> Instances:
        options, key = self._options, await platform_key(store)
        engine = await self._engine(state=self._state(key), key=key)
        instances = Instances(
            store,
            engine,
            Packages(source, self._folder / "packages"),
            secrets,
            key,
            data_url=data_url,
            name=peers.me.name,
            peers=peers,
            # Who runs a project here may read what is here.
            datasources=[Path(path) for path in options.datasources or (["/"] if options.project else [])],
        )
        self._stack.push_async_callback(_finish, instances.close)
        await instances.start()
        return instances

    async def _engine(self, *, state: str, key: bytes = b"", known: bool = False) -> Engine:
        """The engine, once it has shown that it works here; ``known`` leaves that to another one of its kind. ``key``
        is what those who share its sandboxes have in common."""
        name = self._options.engine
        chosen: dict[str, Any] = {}
        kind = name.partition("=")[0]
        if kind == "docker":
            chosen = {"state": state}
        elif kind == "kubernetes":
            chosen = {"state": state, "key": hashlib.sha256(b"engine" + key).digest() if key else None}
        elif kind == "process":
            isolation, place = config.lookup("isolation")
            chosen = {"state": state, "isolation": "strict" if place == "default" and not self._loopback else isolation}
        elif kind == "plain" and not self._loopback:
            log.warning("the engine 'plain' isolates nothing: whoever may run an instance has this machine")
        try:
            async with asyncio.timeout(_ENGINE):
                engine = await self._stack.enter_async_context(load_engine(name, **chosen))
                if not known:
                    await engine.find()
        except TimeoutError:
            raise AEnvError(f"the engine {name!r} does not answer", hint="'aenv doctor' looks into it") from None
        return engine

    def _state(self, key: bytes) -> str:
        """Under which name sandboxes live on: the same for those who share a store, and for nobody else."""
        if self._options.project is not None:
            return ""
        base = self._folder.name
        if self._options.engine.partition("=")[0] in ("docker", "kubernetes"):
            # It may be that of others too, whose stores have the same names.
            return f"{base}-{hashlib.sha256(b'state' + key).hexdigest()[:12]}"
        scheme, _, path = (self._options.store or self._own_store).partition(":")
        if scheme == "sqlite":
            place = os.path.abspath(os.path.expanduser(path.removeprefix("//")))
            if f"{scheme}:{place}" == self._own_store:
                return base
        else:
            place = path.rpartition("@")[2].strip("/")  # whoever is its user there
        return f"{base}-{hashlib.sha256(place.encode()).hexdigest()[:12]}"

    async def _services(self, store: Store, instances: Instances, secrets: Secrets, data_url: str) -> Services:
        key = await platform_key(store)
        services = Services(store, instances.lives, instances.packages, secrets, key, data_url=data_url)
        self._stack.push_async_callback(_finish, services.close)
        await services.start()
        return services

    def _gateway(
        self,
        instances: Instances,
        services: Services,
        tokens: Tokens,
        key: bytes,
        data: socket.socket,
        watcher: Watchers,
    ) -> Gateway:
        gateway = Gateway(
            InstanceDirectory(instances, tokens.authenticate),
            key=key,
            services=ServiceDirectory(services.keepers),
            legacy=self._options.legacy > 0,
            url=self._options.data_url,
            loopback=self._loopback,
            allowed_hosts=self._names(),
            ports_domain=self._options.ports_domain or "localhost",
            watcher=watcher,
            tracer=self._tracer,
        )
        front = urlsplit(self._options.data_url)
        gateway.port = front.port or (443 if front.scheme == "https" else 80) if front.scheme else data.getsockname()[1]
        instances.exposed_url = gateway.exposed_url
        instances.lives.listeners.append(lambda record: gateway.ended(record.id))
        return gateway

    def _names(self) -> list[str]:
        """The names by which it may be called."""
        given = [*config.get("allowed_hosts").split(","), urlsplit(self._options.data_url).hostname or ""]
        return [name for name in (*given, self._options.host) if name]

    async def _listen(
        self, app: App, control: socket.socket, gateway: Gateway | None, data: socket.socket | None
    ) -> None:
        loop = asyncio.get_running_loop()
        connections = Connections(app)
        listeners: list[Listener] = []

        async def end() -> None:
            app.draining = True
            if gateway is not None:
                gateway.router.draining = True
            if self._peers is not None:
                await self._peers.drain()
            await asyncio.sleep(self._drain)
            for listener in listeners:
                await listener.end()
            closing = [app.close(self._grace)]
            if gateway is not None:
                closing.append(gateway.close(self._grace))
            await asyncio.gather(*closing)
            await connections.drain(1.0)

        self._stack.push_async_callback(_finish, end)
        for sock in (control, data):
            try:
                if sock is not None:
                    sock.listen(_BACKLOG)
            except OSError as exc:  # somebody who began when we did was faster
                where, why = url_of(self._options.host, sock or control), exc.strerror or exc
                raise Conflict(f"cannot listen at {where}: {why}", hint="choose other ports") from exc
        server = await loop.create_server(connections, sock=control, backlog=_BACKLOG)
        listeners.append(Listener(control, server, connections))
        if gateway is not None and data is not None:
            server = await loop.create_server(gateway, sock=data, backlog=_BACKLOG)
            listeners.append(Listener(data, server, gateway))


async def _finish(close: Callable[[], Coroutine[Any, Any, None]]) -> None:
    await finish(close())
