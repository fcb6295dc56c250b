"""deploy/compose, started as a whole on a real Docker: a platform in containers whose sandboxes are containers beside
it, and which has no power over anything else."""

from __future__ import annotations

import asyncio
import json
import os
import secrets
import subprocess
import sys
from collections.abc import Awaitable, Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

import pytest

from aenv import http
from aenv.engines.docker import containers
from aenv.engines.docker.containers import ENGINE, KIND, SANDBOX
from aenv.engines.docker.daemon import Daemon
from aenv.errors import NotFound
from tests.daemons.stack import PATIENCE, Stack, stack

pytestmark = pytest.mark.xdist_group("docker-compose")

T = TypeVar("T")
EPISODE = """
import asyncio
import sys
from aenv import Environment

async def main() -> None:
    async with Environment(sys.argv[1]) as env:
        answer = await env.call_tool("echo", {"content": "from a container"})
        print(answer.structured["result"])

asyncio.run(main())
"""
LOOK = """
import asyncio
import json
import os
import sys
from aenv.engines.docker.daemon import Daemon
from aenv.errors import AEnvError

async def main() -> None:
    assert os.getuid() == 1000 and not os.path.exists("/var/run/docker.sock")
    daemon = Daemon("unix:///run/guard/docker.sock")
    for method, path, body in json.loads(sys.argv[1]):
        try:
            await daemon.ask(method, path, body=body)
            print("done")
        except AEnvError as exc:
            print(type(exc).__name__)

asyncio.run(main())
"""


class User:
    """Somebody at the host that the stack runs on."""

    def __init__(self, served: Stack, folder: Path) -> None:
        self.served, self.folder = served, folder
        self.name = f"compose-{secrets.token_hex(4)}"

    def aenv(self, *words: str) -> str:
        return self._run(sys.executable, "-m", "aenv", *words)

    def episode(self) -> str:
        return self._run(sys.executable, "-c", EPISODE, f"{self.name}@1.0.0").strip()

    def instances(self) -> dict[str, str]:
        """Their states, by id."""
        found = json.loads(self.aenv("instance", "list", "-o", "json"))["items"]
        return {one["id"]: one["status"] for one in found}

    def _run(self, *command: str) -> str:
        kept = {name: value for name, value in os.environ.items() if not name.startswith("AENV_")}
        told = {"AENV_HOME": str(self.folder / "home"), "AENV_SYSTEM_URL": self.served.url}
        done = subprocess.run(
            command,
            env={**kept, **told, "AENV_API_KEY": self.served.token},
            cwd=self.folder,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=PATIENCE,
            check=False,
        )
        assert done.returncode == 0, f"{command} ended with {done.returncode}:\n{done.stdout}\n{done.stderr}"
        return done.stdout


def ask(address: str, work: Callable[[Daemon], Awaitable[T]]) -> T:
    """What the daemon answers to those who may do everything."""

    async def asked() -> T:
        try:
            return await work(Daemon(address))
        finally:
            await http.close()

    return asyncio.run(asked())


def there(address: str, *labels: str) -> set[str]:
    """Containers, volumes and networks with one of these labels."""

    async def look(daemon: Daemon) -> set[str]:
        found = set()
        for label in labels:
            query = {"all": "1", "filters": {"label": [label]}}
            found |= {row["Names"][0].lstrip("/") for row in await daemon.ask("GET", "/containers/json", query=query)}
            found |= {row["Name"] for row in (await daemon.ask("GET", "/volumes", query=query))["Volumes"] or ()}
            found |= {row["Name"] for row in await daemon.ask("GET", "/networks", query=query)}
        return found

    return ask(address, look)


@pytest.fixture(scope="module")
def user(dockerd: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[User]:
    """Somebody who has pushed a project to a stack that runs, and who ends his instances before he ends that."""
    with stack(dockerd) as served:
        found = User(served, tmp_path_factory.mktemp("compose"))
        labels = [f"com.docker.compose.project={served.project}"]
        keeper = ""
        try:
            served.up()
            found.aenv("init", found.name)
            found.aenv("push", found.name)
            keeper = f"aenv-project-{json.loads(found.aenv('get', found.name, '-o', 'json'))['digest'][:32]}"
            labels.append(f"{ENGINE}={served.engine}")
            assert there(dockerd, labels[0])
            yield found
            for id in found.instances():
                found.aenv("instance", "delete", id, "--yes")
            served.down()
            assert there(dockerd, *labels) == set()
        finally:
            forget(dockerd, keeper)


def forget(address: str, *names: str) -> None:
    """Remove containers: somebody's, and what keeps the project for its next sandbox."""

    async def remove(daemon: Daemon) -> None:
        for name in filter(None, names):
            with suppress(NotFound):
                await daemon.ask("DELETE", f"/containers/{name}", query={"force": "1", "v": "1"})

    ask(address, remove)


def container(address: str, name: str) -> str:
    """The daemon's own id of a container; empty when there is none."""

    async def look(daemon: Daemon) -> str:
        with suppress(NotFound):
            return str((await daemon.ask("GET", f"/containers/{name}/json"))["Id"])
        return ""

    return ask(address, look)


def test_an_instance_lives_on_while_the_platform_is_replaced(user: User) -> None:
    address = user.served.address
    asked = ("instance", "create", f"{user.name}@1.0.0", "--keep-alive", "--ttl", "1h", "-o", "json")
    made = json.loads(user.aenv(*asked))
    name = containers.name(user.served.engine, made["id"])
    before = container(address, name)
    assert before

    for change in (("restart", "platform"), ("up", "-d", "--force-recreate", "--no-deps", "platform")):
        user.served.compose(*change)
        user.served.ready()
        assert user.instances() == {made["id"]: "Running"}
        assert user.episode() == "from a container"
    assert container(address, name) == before

    user.aenv("instance", "delete", made["id"], "--yes")
    assert not container(address, name)
    assert user.instances() == {}


def test_the_platform_has_no_power_over_the_host(user: User) -> None:
    """What a server that was taken over could try, from inside of its container."""
    other = f"{user.served.project}-other"
    variables = user.served.variables
    made = {"Image": variables["REDIS_IMAGE"], "Cmd": ["redis-server"], "HostConfig": {"NetworkMode": "none"}}
    mine = {"Image": variables["AENV_BASE_IMAGE"], "Labels": {KIND: SANDBOX}}
    limits = {"CapDrop": ["ALL"], "SecurityOpt": ["no-new-privileges"], "NetworkMode": "none"}
    tried: list[tuple[str, str, Any, str]] = [
        ("POST", "/containers/create", {**mine, "HostConfig": {**limits, "Privileged": True}}, "Forbidden"),
        ("POST", "/containers/create", {**mine, "HostConfig": {**limits, "Binds": ["/:/host"]}}, "Forbidden"),
        ("POST", "/containers/create", made, "Forbidden"),
        ("GET", f"/containers/{other}/json", None, "NotFound"),
        ("POST", f"/containers/{other}/start", None, "NotFound"),
        ("POST", f"/containers/{other}/exec", {"Cmd": ["redis-cli"]}, "NotFound"),
        ("DELETE", f"/containers/{other}", None, "NotFound"),
        ("DELETE", f"/volumes/{user.served.project}_records", None, "NotFound"),
        ("POST", "/build", None, "Forbidden"),
        ("GET", "/containers/json", None, "done"),
    ]

    async def make(daemon: Daemon) -> None:
        await daemon.ask("POST", "/containers/create", query={"name": other}, body=made)

    ask(user.served.address, make)
    try:
        asked = json.dumps([row[:3] for row in tried])
        said = user.served.compose("exec", "-T", "platform", "python", "-c", LOOK, asked)
        assert said.split() == [row[3] for row in tried]
    finally:
        forget(user.served.address, other)
