"""A platform's API service for tests: over a real store, behind a real socket, with environments from a shelf."""

from __future__ import annotations

import asyncio
import json
import shutil
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import quote

import msgspec
import pytest

from aenv import http, project
from aenv.api import pools, quotas
from aenv.api.instances import Instances
from aenv.api.packages import Packages
from aenv.api.peers import Peers
from aenv.api.routes import routes
from aenv.auth.callers import Caller, Scope
from aenv.auth.keys import platform_key
from aenv.auth.secrets import Secrets
from aenv.auth.tokens import Tokens, local_token
from aenv.engines.base import Engine
from aenv.engines.failing import PaperEngine
from aenv.engines.process.engine import ProcessEngine
from aenv.errors import AEnvError, NetworkError, NotFound, from_wire
from aenv.models import EnvRef, Sandbox, SandboxSpec
from aenv.project.archive import digest, pack
from aenv.project.unpacked import Placed
from aenv.project.versions import newest
from aenv.runtime.access import Hosts
from aenv.runtime.protocol import Connections
from aenv.store import Change, Page, Record, Store, open_store
from aenv.web.app import App
from aenv.wire import Env, Instance, TokenRequest, timestamp

ADMIN = Caller("admin", frozenset(Scope))
ALICE = Caller("alice", frozenset((Scope.READ, Scope.RUN)))
BOB = Caller("bob", frozenset((Scope.READ, Scope.RUN)))

MODULE = """
import os
import sys
from pathlib import Path

from aenv import Context, register_reset, register_tool

print("imported", flush=True)


@register_tool
def echo(text: str) -> str:
    return text


@register_tool
def variable(name: str) -> str | None:
    return os.environ.get(name)


@register_tool
def say(text: str) -> None:
    print(text, flush=True)


@register_tool
def about(context: Context) -> dict[str, object]:
    return {"id": context.instance_id, "arguments": sys.argv[1:], "seed": context.seed, "data": context.datasource}


@register_tool
def die() -> None:
    os._exit(3)


@register_reset
def reset(seed: int | None = None) -> dict[str, int | None]:
    return {"seed": seed}
"""


class Shelf:
    """A source of environments that were put there."""

    def __init__(self) -> None:
        self.envs: dict[str, Env] = {}
        self.packages: dict[str, bytes] = {}
        self.downloads = 0
        self.gate = asyncio.Event()
        """Packages come when it is set."""
        self.gate.set()

    def publish(self, folder: Path, name: str, *, version: str = "1.0.0", module: str = MODULE, **deploy: Any) -> Env:
        """Make a project, and put it on the shelf."""
        root = folder / f"{name}-{version}"
        (root / "src").mkdir(parents=True)
        (root / "src" / "custom_env.py").write_text(module, encoding="utf-8")
        config = {"name": name, "version": version, "deployConfig": deploy}
        (root / "config.json").write_text(json.dumps(config), encoding="utf-8")
        data = pack(project.read(root))
        now = timestamp(time.time())
        env = Env(
            id=f"{name}@{version}",
            name=name,
            version=version,
            deploy_config=deploy,
            created_at=now,
            updated_at=now,
            digest=digest(data).removeprefix("sha256:"),
            readme="long",
        )
        self.envs[env.id] = env
        self.packages[env.digest] = data
        return env

    def on_paper(self, name: str, **deploy: Any) -> Env:
        """An environment that no engine will look into."""
        now = timestamp(time.time())
        env = Env(id=f"{name}@1.0.0", name=name, version="1.0.0", deploy_config=deploy, created_at=now, updated_at=now)
        self.envs[env.id] = env
        return env

    async def resolve(self, ref: EnvRef, call_token: str, caller: Caller) -> Env:
        version = newest([env.version for env in self.envs.values() if env.name == ref.name], ref)
        if version is None:
            raise NotFound(f"there is no environment {str(ref)!r}")
        return self.envs[f"{ref.name}@{version}"]

    async def package(self, env: Env, call_token: str, caller: Caller) -> AsyncIterator[bytes]:
        async def pieces() -> AsyncIterator[bytes]:
            self.downloads += 1
            await self.gate.wait()
            data = self.packages[env.digest]
            for start in range(0, len(data), 100):
                yield data[start : start + 100]

        return pieces()


class PaperShelf(Shelf):
    """A shelf whose environments need no files: for engines that make sandboxes on paper."""

    async def place(self, env: Env) -> Placed:
        return Placed("/nonexistent", "")


class FragileStore(Store):
    """A store that takes no changes while it is ``full``, and does nothing while it is ``down``."""

    def __init__(self, inner: Store) -> None:
        self.inner = inner
        self.full = False
        self.down = False

    async def get(self, kind: str, key: str) -> Record | None:
        self._check()
        return await self.inner.get(kind, key)

    async def find(self, kind: str, tags: Any = None, **options: Any) -> Page:
        self._check()
        return await self.inner.find(kind, tags, **options)

    async def change(self, *changes: Change) -> list[int]:
        self._check()
        if self.full:
            raise AEnvError("the disk is full")
        return await self.inner.change(*changes)

    def scan(self, kind: str) -> AsyncIterator[Record]:
        self._check()
        return self.inner.scan(kind)

    async def counts(self, kind: str) -> dict[str, dict[str, float]]:
        self._check()
        return await self.inner.counts(kind)

    async def kinds(self) -> list[str]:
        return await self.inner.kinds()

    async def close(self) -> None:
        await self.inner.close()

    def _check(self) -> None:
        if self.down:
            raise NetworkError("the store is down")


class StuckEngine(PaperEngine):
    """The end of what is in ``stuck`` takes for ever."""

    name = "stuck"

    def __init__(self) -> None:
        super().__init__()
        self.stuck: set[str] = set()

    async def delete(self, id: str) -> None:
        if id in self.stuck:
            await asyncio.Event().wait()
        await super().delete(id)


class GatedEngine(PaperEngine):
    """What is created waits at a gate; cancelled there, it leaves nothing."""

    name = "gated"

    def __init__(self) -> None:
        super().__init__()
        self.gate = asyncio.Event()
        self.asked: list[str] = []
        self.most = 0
        self._at_once = 0

    async def create(self, id: str, spec: SandboxSpec) -> Sandbox:
        self.asked.append(id)
        self._at_once += 1
        self.most = max(self.most, self._at_once)
        try:
            await self.gate.wait()
        finally:
            self._at_once -= 1
        return await super().create(id, spec)


class Answer(NamedTuple):
    status: int
    headers: dict[bytes, bytes]
    body: bytes

    @property
    def json(self) -> dict[str, Any]:
        return msgspec.json.decode(self.body, type=dict[str, Any])

    @property
    def data(self) -> Any:
        assert self.status == 200, self.body
        return self.json["data"]

    @property
    def instance(self) -> Instance:
        return msgspec.convert(self.data, Instance)


class Api:
    """A client with one token."""

    def __init__(self, url: str, token: str) -> None:
        self.url = url
        self.token = token

    async def ask(
        self,
        method: str,
        path: str,
        body: Any = None,
        headers: Mapping[str, str] | None = None,
        query: Mapping[str, str] | None = None,
    ) -> Answer:
        lines = {"Authorization": f"Bearer {self.token}", "Content-Type": "application/json", **(headers or {})}
        if query:
            path += "?" + "&".join(f"{name}={quote(value)}" for name, value in query.items())
        data = body if isinstance(body, bytes) else b"" if body is None else msgspec.json.encode(body)
        async with asyncio.timeout(60):
            return Answer(
                *await http.request(
                    method,
                    self.url,
                    path,
                    headers="".join(f"{name}: {value}\r\n" for name, value in lines.items()).encode(),
                    body=data,
                    retries=0,
                )
            )

    async def create(self, env: str, *, wait: int = 30, key: str | None = None, **request: Any) -> Answer:
        headers = {"Prefer": f"wait={wait}"} if wait else {}
        if key is not None:
            headers["Idempotency-Key"] = key
        return await self.ask("POST", "/env-instance", {"envName": env, **request}, headers)


class Platform(NamedTuple):
    url: str
    instances: Instances
    secrets: Secrets
    tokens: Tokens
    store: Store
    home: Path

    async def api(self, owner: str, *scopes: Scope) -> Api:
        """A client of that owner."""
        request = TokenRequest(owner=owner, scopes=[scope.value for scope in scopes or (Scope.READ, Scope.RUN)])
        return Api(self.url, (await self.tokens.create(ADMIN, request)).token)


def short_home() -> Path:
    """A home with a short path, since sockets are below it, which sandboxes may enter."""
    path = Path(tempfile.mkdtemp(prefix="aeapi-", dir="/tmp"))
    path.chmod(0o755)
    return path


@asynccontextmanager
async def on_processes(publish: Callable[[Shelf, Path], None]) -> AsyncIterator[Platform]:
    """A service on the process engine, in a home of its own, with the environments that are published there."""
    home, shelf = short_home(), Shelf()
    publish(shelf, home)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("AENV_HOME", str(home))
        engine = ProcessEngine(state="platform")
        try:
            async with service(f"sqlite:{home / 'store.db'}", engine, shelf, home) as running:
                yield running
        finally:
            await engine.end()
    shutil.rmtree(home, ignore_errors=True)


@asynccontextmanager
async def service(
    url: str | Store, engine: Engine, shelf: Shelf, home: Path, *, name: str = "server", **options: Any
) -> AsyncIterator[Platform]:
    """An API service until the block ends. Its engine is the caller's to close."""
    async with AsyncExitStack() as stack:
        store = await stack.enter_async_context(await open_store(url)) if isinstance(url, str) else url
        tokens, secrets = Tokens(store, local=local_token(home)), Secrets(store)
        instances = Instances(
            store,
            engine,
            Packages(shelf, home / "packages"),
            secrets,
            await platform_key(store),
            data_url="http://127.0.0.1:1",
            name=name,
            **{"peers": Peers(store, name, folder=home / "servers"), **options},
        )
        stack.push_async_callback(instances.close)
        await instances.start()
        table = [*routes(instances), *quotas.routes(instances.quotas), *pools.routes(instances.pools)]
        app = App(table, title="API", authenticate=tokens.authenticate, guard=Hosts(loopback=True))
        connections = Connections(app)
        server = await asyncio.get_running_loop().create_server(connections, "127.0.0.1", 0)

        async def end() -> None:
            server.close()
            await app.close(0.2)
            await connections.drain(0.2)

        stack.push_async_callback(end)
        port = server.sockets[0].getsockname()[1]
        yield Platform(f"http://127.0.0.1:{port}", instances, secrets, tokens, store, home)


async def until(holds: Callable[[], Any], what: str, patience: float = 30.0) -> Any:
    """Wait for something that comes by itself; what it is then. ``holds`` may be async."""
    deadline = time.monotonic() + patience
    while True:
        found = holds()
        if asyncio.iscoroutine(found):
            found = await found
        if found:
            return found
        assert time.monotonic() < deadline, f"{what} did not come within {patience:g} s"
        await asyncio.sleep(0.01)


async def call(instance: Instance, tool: str, **arguments: Any) -> Any:
    """Call a tool of an instance through its socket."""
    body = msgspec.json.encode(arguments)
    headers = f"Authorization: Bearer {instance.agent_token}\r\nContent-Type: application/json\r\n".encode()
    async with asyncio.timeout(60):
        answer = await http.request("POST", instance.socket, f"/tools/{tool}", headers=headers, body=body)
    found = msgspec.json.decode(answer.body, type=dict[str, Any])
    if not found["success"]:
        raise from_wire({**found, "message": found["error"]})
    return found["data"]
