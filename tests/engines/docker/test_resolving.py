"""From a project to the container of an instance: the image that was built and pushed is the one that runs."""

from __future__ import annotations

import json
import secrets
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import pytest

from aenv import http, project
from aenv.engines import load_engine
from aenv.engines.docker.daemon import Daemon
from aenv.engines.specs import complete
from aenv.errors import Invalid, NotFound
from aenv.models import EnvRef, SandboxSpec
from tests.platform.support import new_home

AENV = (sys.executable, "-m", "aenv")


class Author(NamedTuple):
    """Somebody with a project and a daemon."""

    root: Path
    daemon: Daemon
    base_image: str

    def build(self, *options: str) -> dict[str, Any]:
        command = [*AENV, "build", "-w", str(self.root), "--base-image", self.base_image, "-o", "json", *options]
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=600)
        assert done.returncode == 0, done.stderr
        found: dict[str, Any] = json.loads(done.stdout)
        return found

    def spec(self) -> SandboxSpec:
        found = project.read(self.root)
        return complete(SandboxSpec(env=EnvRef(found.name), startup_timeout=300.0), found)

    async def forget(self, image: str) -> None:
        with suppress(NotFound):
            await self.daemon.ask("DELETE", f"/images/{image}", query={"force": "1"})


@pytest.fixture
async def author(
    daemon: str, base_image: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[Author]:
    name = f"resolving-{secrets.token_hex(4)}"
    project.scaffold(name, tmp_path)
    with new_home() as home:
        monkeypatch.setenv("AENV_HOME", str(home))
        monkeypatch.setenv("AENV_DOCKER_HOST", daemon)
        made = Author(tmp_path / name, await Daemon.find(daemon), base_image)
        try:
            yield made
        finally:
            for artifact in project.read(made.root).value("artifacts"):
                await made.forget(artifact["content"])
            await http.close()


async def test_a_pushed_image_is_got_and_run_by_its_digest(author: Author, registry: str) -> None:
    built = author.build("--registry", registry, "--push")
    spec = author.spec()
    assert spec.image == f"{registry}/{author.root.name}@{built['digest']}"
    await author.forget(built["reference"])
    async with load_engine("docker") as engine:
        async with engine.provision(spec) as sandbox:
            found = await author.daemon.ask(
                "GET", "/containers/json", query={"filters": {"label": [f"aenv.id={sandbox.id}"]}}
            )
            assert [row["ImageID"].removeprefix("sha256:") for row in found] == [built["id"].removeprefix("sha256:")]
    await author.forget(spec.image)


async def test_an_image_without_a_registry_is_the_daemons_own(author: Author) -> None:
    built = author.build()
    spec = author.spec()
    assert spec.image == built["reference"]
    async with load_engine("docker") as engine:
        async with engine.provision(spec) as sandbox:
            assert (await http.request("GET", sandbox.url, "/health")).status == 200
        await author.forget(spec.image)
        with pytest.raises(Invalid, match="'NoName' is not the name of an image"):
            await engine.create("none", msgspec.structs.replace(spec, image="NoName"))
