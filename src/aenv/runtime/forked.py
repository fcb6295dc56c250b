"""Serving in a process that was forked from one where everything is imported: what is made before, and after."""

from __future__ import annotations

import asyncio
import logging
import signal
import socket
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from aenv import config, project
from aenv.project import Project
from aenv.runtime import loader, seeds, tokens
from aenv.runtime.access import Guard
from aenv.runtime.app import App
from aenv.runtime.context import Instance
from aenv.runtime.forking import Forking, Means, known
from aenv.runtime.hidden import Hidden
from aenv.runtime.loader import Loaded
from aenv.runtime.resting import Resting
from aenv.runtime.server import Server, loop_factory
from aenv.runtime.service import Service
from aenv.runtime.warm import SETTINGS, Driver, Told, Warm


def say_everything_at_once() -> None:
    """What is printed or logged from here on is seen at once, and belongs to the process that did it."""
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    logging.basicConfig(stream=sys.stderr, level=logging.INFO, format="%(levelname)s %(name)s: %(message)s")


class Prepared:
    """A runtime up to the point where it must know which instance it is. Made once, used in each fork."""

    def __init__(
        self,
        found: Project,
        loaded: Loaded | None,
        changes: Mapping[str, str | None],
        new_loop: Callable[[], asyncio.AbstractEventLoop] | None = None,
        *,
        late: Sequence[str] = (),
    ) -> None:
        """``changes`` is what the import did to the environment, which every fork keeps; ``late`` are the variables
        that it went by, for which a warm sandbox comes too late."""
        self._late = late
        self._changes = changes
        self._found = found
        self._loaded = loaded
        self._new_loop = new_loop or loop_factory() or asyncio.new_event_loop
        self._app = self._made(found, loaded or Loaded(()))
        self._parents: list[asyncio.AbstractEventLoop] = []
        """Loops of the processes that this one was forked from while they served."""

    @cached_property
    def loop(self) -> asyncio.AbstractEventLoop:
        """The loop of this process. A fork does not take its parent's."""
        return self._new_loop()

    @staticmethod
    def _made(found: Project, loaded: Loaded) -> App:
        service = Service(found, Instance(), loaded)
        return App(service, Guard(tokens.Gate(None), loopback=True), max_body=config.get("max_body"))

    def serve(
        self,
        listener: socket.socket,
        control: socket.socket,
        told: Callable[[], dict[str, Any]],
        say: Callable[[dict[str, Any]], None],
        means: Means | None = None,
    ) -> None:
        """Serve on a socket that exists already, as the instance that ``told`` describes, until ``control`` ends.

        Without preloading, the author's modules are imported here, with the instance's own variables set. Otherwise all
        that does not depend on them is done before ``told`` is asked, while whoever answers is still looking at us.
        ``means`` are there when the instance may be forked while it lives.
        """
        before = known() if means is not None else {}
        loop = self.loop
        asyncio.set_event_loop(loop)
        driver = Driver(loop)
        own = _own(before, driver, listener, control) if means is not None else {}
        given: dict[str, Any] | None = None
        if self._loaded is None:
            given = told()
            self._take(given)
            if not given.get("warm"):
                say({"phase": "import"})
                self._found = project.read(Path.cwd(), config_required=False)
                seeds.plant(given["seed"])
                self._loaded = loader.load(self._found)
                self._app = self._made(self._found, self._loaded)

        def identify() -> float | None:
            known = given
            if known is None:
                known = told()
                self._take(known)
            self._begin(known)
            if known.get("warm"):
                self._app.warm = Warm(
                    driver,
                    lambda told: self._become(told, known),
                    late=(*self._late, *SETTINGS),
                    preloaded=self._loaded is not None,
                )
            else:
                server.begins = lambda name: say({"phase": name})
            return _rest(server, known, say)

        server = Server(self._found, self._app, listener)
        if means is not None:
            server.watch = Forking(means, driver, self._app, server, own).watch
        self._drive(driver, server, control, say, identify)

    def serve_again(
        self,
        listener: socket.socket,
        control: socket.socket,
        told: Callable[[], dict[str, Any]],
        say: Callable[[dict[str, Any]], None],
        means: Means,
    ) -> None:
        """The same in a fork of an instance that served: with the author's state as it is, as another instance."""
        assert self._loaded is not None
        parents = self._app.service
        # What the loop of its parent has open is closed here, or the parent's: it must never be touched again.
        signal.set_wakeup_fd(-1)
        self._parents = [*self._parents, self.__dict__.pop("loop")]
        before = known()
        loop = self.loop
        asyncio.set_event_loop(loop)
        driver = Driver(loop)
        own = _own(before, driver, listener, control)
        self._app = self._made(self._found, self._loaded)
        service = self._app.service
        service.history, service.hidden = parents.history, parents.hidden

        def identify() -> float | None:
            given = told()
            service.instance = parents.instance._replace(instance_id=given["id"])
            self._app.begin(_guard(given))
            return _rest(server, given, say)

        server = Server(self._found, self._app, listener)
        server.watch = Forking(means, driver, self._app, server, own).watch
        self._drive(driver, server, control, say, identify, again=True)

    def _drive(
        self,
        driver: Driver,
        server: Server,
        control: socket.socket,
        say: Callable[[dict[str, Any]], None],
        identify: Callable[[], float | None],
        *,
        again: bool = False,
    ) -> None:
        """Serve until ``control`` ends, and say how it is."""

        def ready(boot: str) -> None:
            teardown = self._loaded is None or bool(self._loaded.teardowns)  # what is not imported may have one
            say({"ready": True, "teardown": teardown, "boot": boot})

        def health(words: str) -> None:
            hidden = self._app.service.hidden
            say({"unhealthy": words if hidden is None else hidden.text(words)})

        lifeline = control.fileno()
        driver.run(server.serve(ready, lifeline=lifeline, identify=identify, health=health, again=again))

    def _become(self, told: Told, known: dict[str, Any]) -> None:
        """Make a warm sandbox the instance that is described."""
        given = known | {
            "environment_variables": known["environment_variables"] | told.environment_variables,
            "arguments": told.arguments,
            "seed": told.seed,
            "secrets": told.secrets,
        }
        self._take(given)
        if self._loaded is None:
            self._found = project.read(Path.cwd(), config_required=False)
            seeds.plant(told.seed)
            self._loaded = loader.load(self._found)
            self._app.load(self._found, self._loaded)
        self._describe(given)

    def _take(self, given: dict[str, Any]) -> None:
        """Make the instance's variables and arguments those of this process."""
        variables = {**given["environment_variables"], **self._changes}
        config.replace_environment({name: value for name, value in variables.items() if value is not None})
        sys.argv = [self._found.name, *given["arguments"]]
        if "TZ" in variables:
            time.tzset()

    def _begin(self, given: dict[str, Any]) -> None:
        """Begin to live as the instance that is described."""
        self._describe(given)
        self._app.begin(_guard(given))

    def _describe(self, given: dict[str, Any]) -> None:
        """Be the instance that is described."""
        self._app.service.instance = Instance(
            instance_id=given["id"],
            env_name=self._found.name,
            env_version=self._found.version,
            environment_variables=given["environment_variables"],
            arguments=tuple(given["arguments"]),
            datasource=given["datasource"],
            seed=given["seed"],
            working_directory=Path.cwd(),
        )
        seeds.plant(given["seed"])  # whatever was drawn by then: an import that all share draws nothing of it
        if given["secrets"]:
            self._app.service.hidden = Hidden.of(given["secrets"], given["environment_variables"])


def _guard(given: dict[str, Any]) -> Guard:
    """Who may ask the instance that is described."""
    return Guard(tokens.Gate(given["owner_token_sha256"], given["engine_token_sha256"]), loopback=True)


def _rest(server: Server, given: dict[str, Any], say: Callable[[dict[str, Any]], None]) -> float | None:
    """Let it rest where it may, and tell after how many seconds without a call it ends."""
    if after := given.get("suspend"):
        server.resting = Resting(after, lambda idle: say({"idle": idle}))
    idle: float | None = given["idle"]
    return idle


def _own(before: dict[int, str], driver: Driver, *sockets: socket.socket) -> dict[int, str]:
    """The descriptors that are the runtime's: these sockets, and what was not there ``before`` the loop, once that has
    run."""

    async def nothing() -> None:
        """Have the loop make what it has."""

    driver.run(nothing())
    own = {sock.fileno() for sock in sockets}
    return {number: what for number, what in known().items() if number in own or number not in before}
