"""The built-in environments are there when a hub starts for the first time."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from aenv.engines.plain import PlainEngine
from aenv.errors import Forbidden, StartFailed
from aenv.hub.builtin import publish
from aenv.hub.service import Hub
from aenv.project.builtin import builtin_names, builtin_root, needs_packages
from aenv.store import Store, open_store
from aenv.store.blobs import Blobs, open_blobs
from aenv.wire import Status
from tests.hub.lab import ANN, Stage, content, push, request


def at(root: Path, version: str) -> None:
    """A folder with one built-in environment of that version."""
    folder = root / "tiny"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps({"name": "tiny", "version": version}))


async def test_a_new_hub_has_them(tmp_path: Path) -> None:
    async with await open_store(f"sqlite:{tmp_path / 'store.db'}") as store, PlainEngine() as engine:
        blobs = await open_blobs(f"file:{tmp_path / 'blobs'}")
        async with Hub(store, blobs, engine) as hub:
            found, total = await hub.list(ANN, owner="aenv")
            ours = {name for name in builtin_names() if not needs_packages(builtin_root() / name)}
            assert {env.name for env in found} == ours
            assert total == len(ours)
            assert {env.status for env in found} == {Status.RELEASED}
            terminal = await hub.get(ANN, "mini-terminal")
            assert {"execute_command", "read_file"} <= {tool.name for tool in terminal.tools}
            assert terminal.rewards[0].input_schema["required"] == ["checks"]
            assert len(await content(hub, ANN, "mini-terminal")) == terminal.size
            with pytest.raises(Forbidden):
                await hub.create(ANN, request("mini-terminal", "9.0.0"))
            assert await publish(hub) == []


async def test_a_newer_package_brings_its_new_versions(hub: Hub, tmp_path: Path) -> None:
    at(tmp_path / "envs", "1.0.0")
    assert await publish(hub, tmp_path / "envs") == ["tiny@1.0.0"]
    assert await publish(hub, tmp_path / "envs") == []
    first = await hub.get(ANN, "tiny")
    at(tmp_path / "envs", "1.0.1")
    assert await publish(hub, tmp_path / "envs") == ["tiny@1.0.1"]
    assert (await hub.get(ANN, "tiny")).version == "1.0.1"
    assert await hub.get(ANN, "tiny", "1.0.0") == first
    assert (await hub.policy(ANN, "tiny")).owner == "aenv"


async def test_benchmarks_are_left_to_who_wants_them(hub: Hub, tmp_path: Path) -> None:
    """Their packages would be installed at every first start of a hub."""
    at(tmp_path / "envs", "1.0.0")
    requirements = tmp_path / "envs" / "tiny" / "requirements.txt"
    requirements.write_text("# what it needs\nlarge-benchmark==1.0\n")
    assert await publish(hub, tmp_path / "envs") == []
    requirements.write_text("# nothing\n\n")
    assert await publish(hub, tmp_path / "envs") == ["tiny@1.0.0"]


async def test_one_that_cannot_be_published_stops_nobody(
    hub: Hub, engine: Stage, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    root = tmp_path / "envs"
    at(root, "1.0.0")
    (root / "broken").mkdir()
    (root / "broken" / "config.json").write_text("{")
    shutil.copytree(builtin_root() / "mini-terminal", root / "mini-terminal")
    await push(hub, ANN, "mini-terminal", "0.1.0")
    engine.answers["start"] = StartFailed("not today")
    assert await publish(hub, root) == []
    assert "tiny is not published: tiny@1.0.0 cannot be read: not today" in caplog.text
    assert "mini-terminal is not published: mini-terminal belongs to ann" in caplog.text
    assert "broken is not published" in caplog.text
    del engine.answers["start"]
    assert await publish(hub, root) == ["tiny@1.0.0"]  # what failed is tried again
    assert await publish(hub, tmp_path / "nothing") == []


async def test_two_hubs_that_start_at_the_same_time(store: Store, blobs: Blobs, engine: Stage, tmp_path: Path) -> None:
    import asyncio

    at(tmp_path / "envs", "1.0.0")
    async with (
        Hub(store, blobs, engine, builtins=False) as one,
        Hub(store, blobs, engine, builtins=False) as other,
    ):
        await asyncio.gather(publish(one, tmp_path / "envs"), publish(other, tmp_path / "envs"))
        await publish(one, tmp_path / "envs")
        assert (await other.get(ANN, "tiny")).status == Status.RELEASED
