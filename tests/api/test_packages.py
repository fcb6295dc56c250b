"""Projects at hand: fetched once, checked, kept as long as they are used; and the project of a directory."""

from __future__ import annotations

import asyncio
import hashlib
import os
from pathlib import Path

import pytest

from aenv.api.here import ProjectHere
from aenv.api.packages import Packages
from aenv.engines.failing import PaperEngine
from aenv.errors import AEnvError, Invalid, NotFound, StartFailed, Unsupported
from aenv.models import EnvRef, Sandbox, SandboxSpec
from aenv.wire import Env, InstanceRequest
from tests.api.ground import ALICE, Shelf, service, until


def folders(packages: Path) -> set[str]:
    return {path.name for path in packages.iterdir()}


async def test_a_package_is_fetched_once(tmp_path: Path) -> None:
    shelf = Shelf()
    env = shelf.publish(tmp_path, "env")
    packages = Packages(shelf, tmp_path / "packages")
    shelf.gate.clear()
    asking = [asyncio.create_task(packages.place(env, "", ALICE)) for _ in range(5)]
    await until(lambda: shelf.downloads, "the download")
    asking[0].cancel()  # who leaves takes nothing away from the others
    await asyncio.wait(asking[:1])
    shelf.gate.set()
    found = {await task for task in asking[1:]}
    assert len(found) == 1
    [placed] = found
    assert (Path(placed.root) / "src" / "custom_env.py").is_file()
    assert await packages.place(env, "", ALICE) == placed
    assert shelf.downloads == 1
    again = Packages(shelf, tmp_path / "packages")  # after a restart
    assert await again.place(env, "", ALICE) == placed
    assert shelf.downloads == 1
    (Path(placed.root) / "config.json").unlink()
    assert (await packages.place(env, "", ALICE)).stamp != placed.stamp
    assert folders(tmp_path / "packages") == {env.digest}


async def test_what_is_not_what_was_published_is_refused(tmp_path: Path) -> None:
    shelf = Shelf()
    env, other = shelf.publish(tmp_path, "env"), shelf.publish(tmp_path, "other", module="x = 1")
    packages = Packages(shelf, tmp_path / "packages")
    shelf.packages[env.digest] = shelf.packages[other.digest]
    with pytest.raises(StartFailed, match="digest"):
        await packages.place(env, "", ALICE)
    bare = shelf.on_paper("bare")
    with pytest.raises(Invalid, match="no package"):
        await packages.place(bare, "", ALICE)
    junk = b"not an archive"
    odd = shelf.on_paper("odd")
    odd.digest = hashlib.sha256(junk).hexdigest()
    shelf.packages[odd.digest] = junk
    with pytest.raises(AEnvError):
        await packages.place(odd, "", ALICE)
    assert folders(tmp_path / "packages") == set()
    await packages.close()


async def test_what_is_used_is_kept(tmp_path: Path) -> None:
    shelf = Shelf()
    envs = [shelf.publish(tmp_path, f"env{number}") for number in range(3)]
    packages = Packages(shelf, tmp_path / "packages", most=0)
    packages.in_use = lambda: [envs[0].digest]
    for age, env in enumerate(envs):
        placed = await packages.place(env, "", ALICE)
        os.utime(placed.root, (1000 + age, 1000 + age))
    # Room is made before each is unpacked: the second had to go when the third came.
    assert folders(tmp_path / "packages") == {envs[0].digest, envs[2].digest}


async def test_closing_gives_up_what_is_on_its_way(tmp_path: Path) -> None:
    shelf = Shelf()
    env = shelf.publish(tmp_path, "env")
    packages = Packages(shelf, tmp_path / "packages")
    shelf.gate.clear()
    asking = asyncio.create_task(packages.place(env, "", ALICE))
    await until(lambda: shelf.downloads, "the download")
    await packages.close()
    with pytest.raises(StartFailed, match="stops"):
        await asking


async def test_the_project_here(tmp_path: Path) -> None:
    shelf = Shelf()
    shelf.publish(tmp_path, "env", ttl="7m")
    root = tmp_path / "env-1.0.0"
    specs: list[SandboxSpec] = []

    class Looking(PaperEngine):
        async def create(self, id: str, spec: SandboxSpec) -> Sandbox:
            specs.append(spec)
            return await super().create(id, spec)

    here = ProjectHere(root)
    url = f"sqlite:{tmp_path / 'store.db'}"
    async with service(url, Looking(), here, tmp_path) as platform:  # type: ignore[arg-type]
        [made] = await platform.instances.create(ALICE, InstanceRequest(env_name="env@^1.0"), wait=30)
        assert (made.status, made.ttl, made.env.id) == ("Running", "420s", "env@1.0.0")
        (root / "src" / "custom_env.py").write_text("changed = True", encoding="utf-8")
        await platform.instances.create(ALICE, InstanceRequest(env_name="env"), wait=30)
        assert [spec.project for spec in specs] == [str(root)] * 2
        assert specs[0].stamp != specs[1].stamp
        for name in ("other", "env@^2.0"):
            with pytest.raises(NotFound, match=name.replace("^", "\\^")):
                await platform.instances.create(ALICE, InstanceRequest(env_name=name))
    env: Env = await here.resolve(EnvRef("env"), "", ALICE)
    with pytest.raises(Unsupported):
        await here.package(env, "", ALICE)
