"""What a check works with: an engine, projects to run on it, and sandboxes that are gone when the check is over."""

from __future__ import annotations

import asyncio
import secrets
import subprocess
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Sequence
from contextlib import suppress
from copy import copy
from pathlib import Path
from typing import Any, NamedTuple, TypeVar
from urllib.parse import quote

import msgspec

from aenv import http
from aenv.engines.base import Engine, new_id
from aenv.engines.conformance.projects import NAME, VERSION
from aenv.engines.specs import complete
from aenv.errors import AEnvError, NetworkError, NotFound, Unsupported, from_wire
from aenv.models import EnvRef, ExecResult, Sandbox, SandboxSpec, to_json
from aenv.project import read
from aenv.runtime.tokens import agent_token, digest, new_owner_token

T = TypeVar("T")
RUN, CHECK = "aenv-conformance", "aenv-conformance-check"
"""The labels of every sandbox made here: which run it belongs to, and which check."""
PAUSE = 0.02
SILENCE = 5.0
"""Seconds after which nobody is taken to be there."""
_NOBODY = (404, 502)
"""What a gateway answers for a sandbox that is gone. No sandbox says that of its health."""


class Broken(Exception):
    """A promise that the engine did not keep."""


def require(kept: object, otherwise: str) -> None:
    """Fail the check unless ``kept``; ``otherwise`` says what is so instead."""
    if not kept:
        raise Broken(otherwise)


async def refusal(work: Awaitable[object], *kinds: type[AEnvError]) -> AEnvError:
    """The error of one of these kinds that ``work`` must end with."""
    wanted = " or ".join(kind.__name__ for kind in kinds)
    try:
        await work
    except kinds as exc:
        return exc
    except Unsupported:
        raise  # not a broken promise, where the power is one that an engine may lack
    except AEnvError as exc:
        raise Broken(f"{type(exc).__name__} was raised where {wanted} is due: {exc}") from exc
    raise Broken(f"nothing was raised where {wanted} is due")


async def together(works: Iterable[Coroutine[Any, Any, T]]) -> list[T]:
    """All at once. The first failure is raised when the others, cancelled, have ended too."""
    tasks = [asyncio.create_task(work) for work in works]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


class Box(NamedTuple):
    """A running sandbox, and the token of its owner."""

    sandbox: Sandbox
    token: str

    @property
    def id(self) -> str:
        return self.sandbox.id

    @property
    def agent_token(self) -> str:
        return agent_token(digest(self.token))

    async def status(self, method: str, path: str, token: str | None = None) -> int:
        """The HTTP status of a request with that token, or none."""
        return (await self._request(method, path, token, b"")).status

    async def post(self, path: str, arguments: dict[str, Any]) -> Any:
        """What the owner gets at a route; a failure is raised."""
        response = await self._request("POST", path, self.token, to_json(arguments))
        return _envelope(response)["data"]

    async def tool(self, name: str, /, **arguments: Any) -> Any:
        """What a tool of the project returns."""
        return await self.post(f"/tools/{name}", arguments)

    async def exec(self, command: Sequence[str], *, timeout: float = 60.0) -> ExecResult:
        """Run a command inside, through the runtime."""
        done = await self.post("/exec", {"command": list(command), "timeout": timeout})
        return msgspec.convert(done, ExecResult)

    async def upload(self, path: str, content: bytes) -> None:
        """Write a file inside, through the runtime."""
        _envelope(await self._request("PUT", f"/files?path={quote(path)}", self.token, content))

    async def download(self, path: str) -> bytes:
        """Read a file inside, through the runtime."""
        response = await self._request("GET", f"/files?path={quote(path)}", self.token, b"")
        if response.status != 200:
            _envelope(response)
        return response.body

    async def save(self) -> bytes:
        """Where it is, as its runtime says it."""
        response = await self._request("GET", "/state", self.token, b"")
        if response.status != 200:
            _envelope(response)
        return response.body

    async def load(self, state: bytes) -> None:
        """Be where another one was."""
        _envelope(await self._request("PUT", "/state", self.token, state))

    async def answers(self) -> bool:
        """Whether it answers at its address. A gateway before it answers, too, and says that nobody is there."""
        try:
            async with asyncio.timeout(SILENCE):
                return await self.status("GET", "/health") not in _NOBODY
        except (AEnvError, TimeoutError):
            return False

    async def _request(self, method: str, path: str, token: str | None, body: bytes) -> http.Response:
        headers = b"Content-Type: application/json\r\n"
        if token:
            headers += b"Authorization: Bearer %b\r\n" % token.encode()
        return await http.request(method, self.sandbox.url, path, headers=headers, body=body, retries=0)


def _envelope(response: http.Response) -> dict[str, Any]:
    """The runtime's answer as it is when all is well; a failure is raised."""
    try:
        body = msgspec.json.decode(response.body, type=dict[str, Any])
    except msgspec.DecodeError as exc:
        raise NetworkError(f"the answer (status {response.status}) is not JSON: {exc}") from exc
    if response.status != 200:
        raise from_wire({**body, "message": body.get("error")})
    return body


class Lab:
    """What the checks of one run share."""

    def __init__(
        self,
        engine: Engine,
        projects: Path,
        another: Callable[[], Engine] | None,
        limit: float,
        second: str = "",
    ) -> None:
        self.engine = engine
        self.cannot = dict(engine.cannot)
        self.projects = projects
        self.another = another
        self.limit = limit
        """Seconds a check may take."""
        self.second = second
        """The image of second containers, or their directory; empty when none was given."""
        self.id = secrets.token_hex(6)
        self.slowest = 0.0
        """Seconds that the slowest start took so far."""
        self._pair: asyncio.Task[tuple[Box, Box]] | None = None
        self._bench = Bench(self, "pair")

    async def pair(self) -> tuple[Box, Box]:
        """Two sandboxes for all the checks that only look. They differ in everything that an owner can choose."""
        if self._pair is None:
            self._pair = asyncio.create_task(self._make_pair())
        return await asyncio.shield(self._pair)

    async def _make_pair(self) -> tuple[Box, Box]:
        data = self.projects / "data"
        data.mkdir()
        (data / "table.txt").write_text("1,2,3\n", encoding="utf-8")
        first = await self._bench.start(
            environment_variables={"PROBE_VALUE": "first", "PROBE_BOTH": "instance", "PROBE_FIRST": "first"},
            arguments=["--side", "first", "a b"],
            seed=7,
            datasource="" if "datasource" in self.cannot else str(data),
            owner="ada",
            labels={"side": "first", "colour": "red"},
            ttl=3600.0,
        )
        second = await self._bench.start(
            environment_variables={"PROBE_VALUE": "second"},
            owner="bob",
            labels={"side": "second", "colour": "red"},
            ttl=1800.0,
        )
        return first, second

    async def close(self) -> None:
        """End the pair. Safe to call twice."""
        if self._pair is not None:
            self._pair.cancel()
            await asyncio.gather(self._pair, return_exceptions=True)
        await self._bench.clean()


class Bench:
    """One check's own view of the engine."""

    def __init__(self, lab: Lab, name: str) -> None:
        self.lab = lab
        self.engine = lab.engine
        self.labels = {RUN: lab.id, CHECK: name}
        self.waiting = ""
        """What it waits for, to say so when that never comes."""
        self.trouble = ""
        self._ids: set[str] = set()

    def spec(self, project: str = "probe", **fields: Any) -> SandboxSpec:
        """A spec of one of our projects, with this check's labels, completed as whoever resolves an env does."""
        labels = {**fields.pop("labels", {}), **self.labels}
        given = {"ttl": 600.0, "startup_timeout": self.lab.limit, **fields}
        path = self.lab.projects / project
        spec = SandboxSpec(env=EnvRef(NAME, VERSION), project=str(path), labels=labels, **given)
        return complete(spec, read(path)) if path.is_dir() else spec

    def another(self) -> Callable[[], Engine]:
        """What makes another engine of the same kind."""
        if self.lab.another is None:
            raise Unsupported("no way to make another engine of its kind was given")
        return self.lab.another

    def through(self, engine: Engine) -> Bench:
        """This check, with another engine."""
        bench = copy(self)
        bench.engine = engine
        return bench

    def id(self) -> str:
        """An id that is deleted when the check is over."""
        made = new_id(NAME)
        self._ids.add(made)
        return made

    async def start(self, project: str = "probe", **fields: Any) -> Box:
        """A sandbox that is RUNNING."""
        token = new_owner_token()
        spec = self.spec(project, owner_token_sha256=digest(token), **fields)
        loop = asyncio.get_running_loop()
        begun = loop.time()
        sandbox = await self.up(self.id(), spec)
        self.lab.slowest = max(self.lab.slowest, loop.time() - begun)
        return Box(sandbox, token)

    async def start_for_a_moment(self, ttl: float = 2.0) -> tuple[Box, float]:
        """A sandbox that is RUNNING and has little time left, and its ttl: as short as it can be started with."""
        loop = asyncio.get_running_loop()
        begun = loop.time()
        try:
            box = await self.start(ttl=ttl)
            if loop.time() - begun < ttl - 1:
                return box, ttl
        except AEnvError:
            if loop.time() - begun < ttl - 1:
                raise
        return await self.start_for_a_moment(2 * ttl)

    async def up(self, id: str, spec: SandboxSpec) -> Sandbox:
        """Create under that id, and wait until it is RUNNING."""
        self.waiting = "a sandbox to be RUNNING"
        await self.engine.create(id, spec)
        return await self.engine.wait(id, self.lab.limit)

    async def eventually(self, what: str, look: Callable[[], Awaitable[T | None]]) -> T:
        """The first true answer of ``look``. The check's own limit ends the waiting."""
        self.waiting = what
        while True:
            if found := await look():
                return found
            await asyncio.sleep(PAUSE)

    async def alive(self) -> list[Sandbox]:
        """What this check made and has not ended."""
        return [sandbox for sandbox in await self._mine() if not sandbox.state.over]

    async def gone(self, id: str) -> bool:
        """Whether a sandbox is unknown or over."""
        try:
            return (await self.engine.get(id)).state.over
        except NotFound:
            return True

    async def clean(self) -> None:
        """End all that this check made. What goes wrong is kept in ``trouble``."""
        try:
            async with asyncio.timeout(self.lab.limit):
                await together(self.engine.delete(id) for id in self._ids)
                await together(self.engine.delete(sandbox.id) for sandbox in await self._mine())
        except Exception as exc:
            self.trouble = repr(exc)

    async def _mine(self) -> list[Sandbox]:
        found = await self.engine.find(self.labels)
        # An engine that ignores labels must not make us touch what is not ours.
        return [sandbox for sandbox in found if self.labels.items() <= sandbox.labels.items()]


def running_here(marker: str) -> bool:
    """Whether a process of this machine has ``marker`` in its command line."""
    if not Path("/proc/self").exists():
        listed = subprocess.run(["ps", "-axww", "-o", "args="], capture_output=True, text=True, check=True)
        return marker in listed.stdout
    for file in Path("/proc").glob("[0-9]*/cmdline"):
        with suppress(OSError):  # it has ended meanwhile
            if marker.encode() in file.read_bytes():
                return True
    return False
