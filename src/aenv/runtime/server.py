"""Serving a project: load it, listen, and end in good order."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import socket
import stat
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext, suppress
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

from aenv import config, project
from aenv.errors import AEnvError, Conflict, Invalid, InvalidConfig
from aenv.project import Project
from aenv.runtime import loader, outlet, seeds, tokens
from aenv.runtime.access import Guard, is_loopback
from aenv.runtime.answers import ENDING
from aenv.runtime.app import App
from aenv.runtime.context import Instance
from aenv.runtime.hidden import Hidden
from aenv.runtime.mcp import LEGACY, MODERN
from aenv.runtime.protocol import Connections
from aenv.runtime.resting import Door, Resting
from aenv.runtime.service import Service, Unhealthy
from aenv.runtime.warm import Driver, Told, Warm, import_early, timed
from aenv.runtime.work import move

log = logging.getLogger("aenv.runtime")
RELOAD_EVERY = 0.5


class Served(NamedTuple):
    """A sandbox that is ready."""

    url: str
    tools: list[str]
    rewards: list[str]
    functions: list[str]
    owner_token: str | None
    """The token made for this run; ``None`` when access is open or the engine brought its own."""


def run(
    path: Path,
    *,
    host: str = "127.0.0.1",
    port: int = 8081,
    arguments: Sequence[str] = (),
    reload: bool = False,
    open_access: bool = False,
    unix: str = "",
    work: str = "",
    lifeline: int | None = None,
    on_ready: Callable[[Served], None] | None = None,
) -> None:
    """Serve the project at ``path`` until SIGTERM, SIGINT or SIGHUP.

    On loopback no token is asked for. Elsewhere one is: the engine's, or one made here and handed to ``on_ready``;
    ``open_access`` turns that off. With ``unix``, it listens on a socket of that name instead of a port, where a token
    is asked for, too. With ``work``, a copy of the project in that directory is served. The end of what the descriptor
    ``lifeline`` reads ends the server, too.
    """
    found = project.read(path, config_required=False)
    if found.protocol not in (None, MODERN, *LEGACY):
        known = ", ".join((MODERN, *LEGACY))
        raise InvalidConfig(f"deployConfig.protocol {found.protocol!r} is not spoken here", hint=f"spoken: {known}")
    sock = bind_unix(unix) if unix else bind(host, port)
    shown = f"[{host}]" if ":" in host else host
    url = f"unix:{os.path.abspath(unix)}" if unix else f"http://{shown}:{sock.getsockname()[1]}"
    try:
        if work:
            found = move(found, Path(work))
        if proxy := config.get("proxy"):
            outlet.wait(proxy)
        loopback = not unix and is_loopback(host)
        _run(found, sock, url, arguments, reload, loopback, open_access, lifeline, on_ready)
    finally:
        if unix:
            _unlink(url.removeprefix("unix:"))


def _run(
    found: Project,
    sock: socket.socket,
    url: str,
    arguments: Sequence[str],
    reload: bool,
    loopback: bool,
    open_access: bool,
    lifeline: int | None,
    on_ready: Callable[[Served], None] | None,
) -> None:
    """Load the project, and serve it on that socket."""
    config.default_environment(found.environment_variables)
    sys.argv = [sys.argv[0], *arguments]
    instance = _instance(found, arguments, _seed())
    warm = config.get("warm")
    early = import_early(found) if warm else None
    if early is None:
        seeds.plant(instance.seed)
        loaded = loader.load(found)
        seeds.plant(instance.seed)
    else:
        loaded = early.loaded or loader.Loaded(())
    owner_digest, made = _credentials(open_access or loopback)
    guard = Guard(
        tokens.Gate(owner_digest, config.get("engine_token_sha256")),
        loopback=loopback,
        allowed_hosts=filter(None, config.get("allowed_hosts").split(",")),
    )
    app = App(Service(found, instance, loaded), guard, max_body=config.get("max_body"))
    if secret := config.get("secrets"):
        app.service.hidden = Hidden.of(secret.split(","), instance.environment_variables)
    server = Server(found, app, sock)

    def ready(boot: str) -> None:
        if on_ready is not None:
            on_ready(Served(url, list(loaded.tools), list(loaded.rewards), list(loaded.functions), made))

    with asyncio.Runner(loop_factory=loop_factory()) as runner:
        if early is None:
            runner.run(server.serve(ready, reload=reload, lifeline=lifeline))
            return
        driver = Driver(runner.get_loop())
        is_early = early.loaded is not None
        app.warm = Warm(driver, lambda told: _become(told, found, app, is_early), late=early.late, preloaded=is_early)
        driver.run(server.serve(ready, reload=reload, lifeline=lifeline))


def _instance(found: Project, arguments: Sequence[str], seed: int | None) -> Instance:
    """The sandbox, as the engine described it in variables of this process."""
    return Instance(
        instance_id=config.get("instance_id"),
        env_name=found.name,
        env_version=found.version,
        environment_variables=config.environment(),
        arguments=tuple(arguments),
        datasource=config.get("datasource"),
        seed=seed,
        working_directory=Path.cwd(),
    )


def _become(told: Told, found: Project, app: App, is_early: bool) -> None:
    """Make a warm sandbox the instance that is described. ``is_early``: the project is imported already."""
    config.set_environment(told.environment_variables)
    sys.argv = [sys.argv[0], *told.arguments]
    if "TZ" in told.environment_variables:
        time.tzset()
    app.service.instance = _instance(found, told.arguments, told.seed)
    if told.secrets:
        app.service.hidden = Hidden.of(told.secrets, told.environment_variables)
    if not is_early:
        seeds.plant(told.seed)
        app.load(found, loader.load(found))
    seeds.plant(told.seed)


def loop_factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    try:
        import uvloop
    except ImportError:
        return None
    factory: Callable[[], asyncio.AbstractEventLoop] = uvloop.new_event_loop
    return factory


def bind(host: str, port: int, option: str = "--port") -> socket.socket:
    """A socket at that address, on which nobody listens yet."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    sock = socket.socket(family, socket.SOCK_STREAM)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        sock.bind((host, port))
    except OSError as exc:
        sock.close()
        reason = exc.strerror or str(exc)
        raise Conflict(f"cannot listen on {host}:{port}: {reason}", hint=f"choose another with {option}") from exc
    except OverflowError as exc:
        sock.close()
        raise Invalid(f"{port} is not a port", hint="use 0 to 65535") from exc
    return sock


def bind_unix(path: str) -> socket.socket:
    """A socket of that name, on which nobody listens yet. Who may reach it is a matter of its directory."""
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    before = os.umask(0o111)
    try:
        if _is_stale(path):
            os.unlink(path)
        sock.bind(path)
    except OSError as exc:
        sock.close()
        reason = exc.strerror or str(exc)
        hint = "choose another with --socket, in a directory that is there and may be written"
        raise Conflict(f"cannot listen on unix:{path}: {reason}", hint=hint) from exc
    finally:
        os.umask(before)
    return sock


def _is_stale(path: str) -> bool:
    """Whether there is a socket of that name that nobody listens on."""
    try:
        if not stat.S_ISSOCK(os.lstat(path).st_mode):
            return False
    except FileNotFoundError:
        return False
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.setblocking(False)
        try:
            probe.connect(path)
        except ConnectionRefusedError:
            return True
        except BlockingIOError:  # there is one, who is busy
            return False
    return False


def _unlink(path: str) -> None:
    with suppress(OSError):  # who guards the directory may have closed it
        os.unlink(path)


class Listener(NamedTuple):
    """A port that is listened on."""

    sock: socket.socket
    server: asyncio.AbstractServer
    protocols: Callable[[], asyncio.BaseProtocol]

    async def end(self) -> None:
        """Listen no more. Who has just connected is taken in: cut off, they would not know whether they were heard."""
        waiting = []
        with suppress(OSError):
            while True:
                waiting.append(self.sock.accept()[0])
        self.server.close()
        for sock in waiting:
            sock.setblocking(False)
            with suppress(OSError):
                await asyncio.get_running_loop().connect_accepted_socket(self.protocols, sock)


def _credentials(open_access: bool) -> tuple[str | None, str | None]:
    """The digest of the owner's token, and the token itself where it was made here."""
    if given := config.get("owner_token_sha256"):
        return given, None
    if open_access:
        return None, None
    made = tokens.new_owner_token()
    return tokens.digest(made), made


def _seed() -> int | None:
    seed = config.get("seed")
    try:
        return None if seed is None else int(seed)
    except ValueError as exc:
        raise Invalid(f"AENV_SEED must be an integer, found {seed!r}") from exc


class Server:
    """One project on one listening socket."""

    def __init__(self, found: Project, app: App, sock: socket.socket) -> None:
        self._project = found
        self._app = app
        self._service = app.service
        self._socket = sock
        self.phases: dict[str, float] = {}
        """Where the time of coming up went, in seconds."""
        self.begins: Callable[[str], None] | None = None
        """Told the name of a phase of coming up, ``setup`` or ``health``, when it begins."""
        self.watch: Callable[[int, asyncio.Event, Callable[[], None]], None] = stop_at_end
        """What hears of the lifeline's end, and of somebody who waits."""
        self.connections = Connections(app)
        self.door = Door(sock, self.connections)
        self.resting: Resting | None = None
        """When it lets nobody in, because nobody comes. Who hears of that sends anything on the lifeline to end it."""

    @cached_property
    def _grace(self) -> float:
        """Looked up when it is needed, which in a sandbox that is killed is never."""
        grace: float = config.get("grace")
        return grace

    async def serve(
        self,
        ready: Callable[[str], None],
        *,
        reload: bool = False,
        lifeline: int | None = None,
        identify: Callable[[], float | None] | None = None,
        health: Callable[[str], None] | None = None,
        again: bool = False,
    ) -> None:
        """Serve until a signal or the end of the lifeline; then calls in flight get the grace time, and the author's
        teardown runs. ``ready`` is told the boot id once callers are let in.

        An engine's sandbox learns which it is from ``identify``, after everything that does not depend on it. It may
        block, and returns the seconds without a call after which to end. Such a sandbox gets no signals, and is ready
        when the author's health check passes. ``health`` is told in words when it does not any more, and with none
        when it does again.

        A warm one is ready when it waits, and the rest comes when it is told what it is. One that serves ``again`` has
        come up before it was forked.
        """
        stop = asyncio.Event()
        connections, door = self.connections, self.door
        await door.open(start_serving=False)
        idle = identify() if identify is not None else config.get("idle") or None
        if identify is None:
            stop_at_signals(stop)
        if lifeline is not None:
            self.watch(lifeline, stop, self._heard)
        warm = self._app.warm
        if warm is not None:
            self.phases = warm.phases
        watching: list[asyncio.Task[None]] = []
        is_up = False
        try:
            if warm is not None:
                await door.let_in()
                ready(self._app.boot)
                if not await warm.told(stop):
                    return
            async with nullcontext() if warm is None else warm.becoming(stop):
                is_up = again or await self._come_up(stop)
                if not is_up:
                    return
                await door.let_in()
                if reload:
                    watching.append(asyncio.create_task(self._reload()))
                if idle is not None:
                    watching.append(asyncio.create_task(_until_idle(self._app, idle, stop)))
                if self._service.loaded.health is not None and (identify is not None or warm is not None):
                    if self.begins is not None:
                        self.begins("health")
                    with timed(self.phases, "health"):
                        await self._healthy(stop)
                    if health is not None:
                        watching.append(asyncio.create_task(self._watch_health(health)))
            if warm is None:
                ready(self._app.boot)
            if self.resting is not None:
                watching.append(asyncio.create_task(self.resting.watch(self._app, connections, door)))
            await stop.wait()
        finally:
            for task in watching:
                task.cancel()
            door.close()
            await self._drain(connections)
            if is_up:
                await self._tear_down()
            if self._app.wrapped is not None:
                await self._app.wrapped.stop()

    def _heard(self) -> None:
        if self.resting is not None:
            self.resting.heard()

    async def _come_up(self, stop: asyncio.Event) -> bool:
        """Wait for the second container, start a server of the author's own, and run their setup; False when it is to
        end before."""
        if (beside := config.get("second")) and not await self._beside(beside, stop):
            return False
        if self._service.loaded.server is not None:
            from aenv.runtime.wrapped import Wrapped

            wrapped = Wrapped(self._service)
            await wrapped.start()
            self._app.wrap(wrapped)
        if not self._service.loaded.setups:
            return True
        if self.begins is not None:
            self.begins("setup")
        with timed(self.phases, "setup"):
            return await self._set_up(stop)

    async def _beside(self, path: str, stop: asyncio.Event) -> bool:
        """Wait until the second container answers; False when a signal came first."""
        from aenv.runtime.second import Second

        arrival, stopped = asyncio.create_task(Second(path).answers()), asyncio.create_task(stop.wait())
        try:
            await asyncio.wait((arrival, stopped), return_when=asyncio.FIRST_COMPLETED)
            if arrival.done():
                arrival.result()
            return arrival.done()
        finally:
            arrival.cancel()
            stopped.cancel()

    async def _set_up(self, stop: asyncio.Event) -> bool:
        """Run the author's setup; False when a signal came first. What was set up is torn down when it fails."""
        setup, stopped = asyncio.create_task(self._service.setup()), asyncio.create_task(stop.wait())
        try:
            await asyncio.wait((setup, stopped), return_when=asyncio.FIRST_COMPLETED)
            if setup.done():
                setup.result()
                return True
            setup.cancel()
        except AEnvError:
            await self._tear_down()
            raise
        finally:
            stopped.cancel()
        await self._tear_down()
        return False

    async def _healthy(self, stop: asyncio.Event) -> None:
        pause = 0.01
        while not stop.is_set():
            try:
                await self._service.health({})
                return
            except Unhealthy as exc:
                log.info("not healthy yet: %s", exc)
            await asyncio.sleep(pause)
            pause = min(pause * 2, 1.0)

    async def _watch_health(self, tell: Callable[[str], None]) -> None:
        said = ""
        while True:
            await asyncio.sleep(config.get("health_interval"))
            try:
                await self._service.health({})
                found = ""
            except Unhealthy as exc:
                found = str(exc)
            if found != said:
                said = found
                log.warning("%s", found or "healthy again")
                tell(found)

    async def _tear_down(self) -> None:
        try:
            async with asyncio.timeout(self._grace):
                await self._service.teardown()
        except TimeoutError:
            log.error("teardown took longer than %g s and was left", self._grace)

    async def _drain(self, connections: Connections) -> None:
        app = self._app
        app.close_streams()
        if app.calls:
            log.info("waiting up to %g s for %d calls in flight", self._grace, len(app.calls))
            await asyncio.wait(set(app.calls), timeout=self._grace)
        for call in list(app.calls):
            call.cancel(ENDING)
        await connections.drain(1.0)

    async def _reload(self) -> None:
        """Load the project again whenever a file of it changes. What fails to load leaves the old one serving."""
        before = _stamp(self._project)
        while True:
            await asyncio.sleep(RELOAD_EVERY)
            now = _stamp(self._project)
            if now == before:
                continue
            before = now
            if self._app.wrapped is not None:
                log.warning("a file changed, but a project's own MCP server is not reloaded: start it again")
                continue
            loader.unload(self._project)
            old = self._service.loaded
            try:
                self._service.loaded = loaded = loader.load(self._project)
                await self._service.setup()
            except AEnvError as exc:
                self._service.loaded = old
                log.error("reload failed, the last good version goes on serving\n%s", exc)
                continue
            if self._service.children is not None:
                self._service.children.renew()
            self._app.mcp.refresh()
            log.warning("reloaded: %d tools", len(loaded.tools))


def stop_at_signals(stop: asyncio.Event) -> None:
    """Set ``stop`` when this process is asked to end. When it is asked again it ends at once."""
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        if signal.getsignal(number) is not signal.SIG_IGN:  # as nohup sets it for the last
            asyncio.get_running_loop().add_signal_handler(number, _asked_to_stop, stop)


def stop_at_end(lifeline: int, stop: asyncio.Event, heard: Callable[[], None] = lambda: None) -> None:
    """Set ``stop`` when what the descriptor reads has ended. ``heard`` is called when something comes on it."""
    loop = asyncio.get_running_loop()
    loop.add_reader(lifeline, _until_end, loop, lifeline, stop, heard)


def _asked_to_stop(stop: asyncio.Event) -> None:
    if stop.is_set():  # asked again: whatever it is that does not end is left behind
        os._exit(1)
    stop.set()


def _until_end(loop: asyncio.AbstractEventLoop, lifeline: int, stop: asyncio.Event, heard: Callable[[], None]) -> None:
    try:
        ended = not os.read(lifeline, 4096)
    except ConnectionResetError:  # it ended with something unread
        ended = True
    if ended:
        loop.remove_reader(lifeline)
        stop.set()
    else:
        heard()


async def _until_idle(app: App, limit: float, stop: asyncio.Event) -> None:
    # No call wakes this, which is what makes calls cheap.
    while (left := limit - app.idle_seconds) > 0:  # noqa: ASYNC110
        await asyncio.sleep(left)
    log.warning("ending: no call for %g s", limit)
    stop.set()


def _stamp(found: Project) -> dict[Path, int]:
    stamps = {}
    for path in loader.source_files(found.source):
        try:
            stamps[path] = path.stat().st_mtime_ns
        except FileNotFoundError:
            continue
    return stamps
