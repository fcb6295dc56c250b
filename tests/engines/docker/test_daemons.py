"""The daemons that tests are given: they are real, and the base image on them serves."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from aenv.engines.docker.daemon import Daemon
from tests import daemons
from tests.support import ROOT, until

pytestmark = pytest.mark.xdist_group("docker")


async def test_the_base_image_has_the_runtime(daemon: str, base_image: str) -> None:
    found = await Daemon(daemon).ask("GET", f"/images/{base_image}/json")
    config = found["Config"]
    assert config["Labels"]["aenv.runtime"]
    assert config["Entrypoint"] == ["python", "-m", "aenv.runtime"]
    assert config["Cmd"] == ["/app", "--host", "0.0.0.0"]
    assert config["User"] == "aenv"
    assert "8081/tcp" in config["ExposedPorts"]


async def test_an_image_goes_to_the_registry_and_back(daemon: str, registry: str, base_image: str) -> None:
    asked = Daemon(daemon)
    name = f"{registry}/tests/{os.getpid()}"
    await asked.ask("POST", f"/images/{base_image}/tag", query={"repo": name, "tag": "1"})
    try:
        sent = asked.lines(
            "POST", f"/images/{name}/push", query={"tag": "1"}, headers={"X-Registry-Auth": "e30="}, patience=300.0
        )
        assert not [line async for line in sent if "error" in line]
        await asked.ask("DELETE", f"/images/{name}:1")
        query = {"fromImage": name, "tag": "1"}
        fetched = asked.lines("POST", "/images/create", query=query, patience=300.0)
        assert not [line async for line in fetched if "error" in line]
        assert await asked.ask("GET", f"/images/{name}:1/json")
    finally:
        await asked.ask("DELETE", f"/images/{name}:1", query={"force": "1"})


KILLED = """
import os, sys
from tests import daemons
with daemons.ground(sys.argv[1]) as ground:
    ground.dockerd()
    print((ground.folder / "holder").read_text(), flush=True)
    os.kill(os.getpid(), 9)
"""


async def test_nothing_is_left_of_a_run_that_was_killed(tmp_path: Path) -> None:
    if reason := daemons.missing("dockerd", "containerd", "runc", "iptables"):
        pytest.skip(reason)
    run = f"killed-{os.getpid()}"
    with subprocess.Popen([sys.executable, "-c", KILLED, run], stdout=subprocess.PIPE, text=True, cwd=ROOT) as killed:
        assert killed.stdout is not None
        holder = killed.stdout.readline().strip()
        assert killed.wait(300) == -9
    await until(lambda: not Path(f"/proc/{holder}/root/proc").exists(), "the end of the daemons")
    folder = daemons.PLACE / run
    with daemons.ground(f"next-{os.getpid()}") as after:
        assert not folder.exists()
    assert not after.folder.exists()
    assert str(daemons.PLACE / run) not in Path("/proc/mounts").read_text()
