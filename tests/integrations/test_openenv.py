"""OpenEnv itself, in a virtual environment of its own: its validator and its clients in our instances, and a server of
its own as an environment of ours."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.peers.support import interpreter
from tests.runtime.wire import send
from tests.support import ROOT, Sandbox, sandbox

pytestmark = pytest.mark.peer
KEYPAD = ROOT / "examples" / "06-keypad"
SCRIPT = ROOT / "tests" / "peers" / "scripts" / "openenv_script.py"
PATIENCE = 180
PUBLISHED = """
from aenv.integrations.openenv import publish

publish(lambda ctx: ctx.environment_variables["OPENENV_URL"])
"""


@pytest.fixture(scope="module")
def python() -> Path:
    return Path(interpreter("openenv"))


@pytest.fixture(scope="module")
def keypad(python: Path) -> Iterator[Sandbox]:
    with sandbox(KEYPAD) as running:
        yield running


async def ran(*line: str | Path, folder: Path | None = None, code: int = 0) -> str:
    """What a program prints."""
    process = await asyncio.create_subprocess_exec(
        *map(str, line),
        cwd=folder,
        env={**os.environ, **({"AENV_HOME": str(folder.parent / "home")} if folder else {})},
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    printed, complained = await asyncio.wait_for(process.communicate(), PATIENCE)
    assert process.returncode == code, printed.decode() + complained.decode()
    return printed.decode()


async def test_its_validator_passes(python: Path, keypad: Sandbox) -> None:
    report = json.loads(await ran(python.with_name("openenv"), "validate", "--url", f"{keypad.url}/openenv", "--json"))
    assert report["passed"]
    assert (report["mode"], report["standard_profile"]) == ("simulation", "openenv-http/1.x")
    assert (report["summary"]["passed_count"], report["summary"]["total_count"]) == (6, 6)


async def test_its_clients_play(python: Path, keypad: Sandbox) -> None:
    found = json.loads(await ran(python, SCRIPT, "api", f"{keypad.url}/openenv"))
    assert found["pressed"] == "You pressed 3."
    assert "make another instance" in found["second"]
    assert "CAPACITY_REACHED" in found["second"]
    assert "VALIDATION_ERROR" in found["refused"]
    assert found["state"] == {"episode_id": "first", "step_count": 1}
    assert found["ended"] == [1.0, True]
    assert found["again"] == "The display shows 2."
    assert found["tools"] == ["press", "finish"]
    assert found["called"] == ["You pressed 3.", 1.0, 2]


async def test_a_lost_instance_is_an_error_and_no_reward(python: Path) -> None:
    with sandbox(KEYPAD) as running:
        found = json.loads(await ran(python, SCRIPT, "lost", f"{running.url}/openenv", str(running.process.pid)))
    assert found["rewards"] == [None]
    assert found["raised"]


async def test_the_example_does_what_it_says(python: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(KEYPAD, tmp_path / "keypad"))
    said = (await ran(python, "play_openenv.py", folder=folder)).splitlines()
    assert said[0] == "tools: press finish"
    assert said[-1] == "reward: 1.0 done: True"


async def test_the_check_of_its_installation(python: Path, tmp_path: Path) -> None:
    folder = tmp_path / "somewhere"
    folder.mkdir()
    found = json.loads(await ran(python, "-m", "aenv", "train-check", "openenv", "-o", "json", folder=folder))
    assert [(row["check"], row["status"]) for row in found["checks"]] == [
        ("package", "ok"),
        ("adapter", "ok"),
        ("episode", "ok"),
    ]


@pytest.fixture
def server(python: Path) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """A server of OpenEnv's own."""
    process = subprocess.Popen([python, SCRIPT, "server"], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    try:
        yield process, process.stdout.readline().strip()
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


def test_a_server_of_its_own_is_an_environment(
    python: Path, server: tuple[subprocess.Popen[str], str], tmp_path: Path
) -> None:
    process, url = server
    (tmp_path / "src").mkdir()
    (tmp_path / "src" / "custom_env.py").write_text(PUBLISHED)
    with sandbox(tmp_path, python=str(python), variables={"OPENENV_URL": url}) as running:
        port = running.port
        assert send(port, "POST", "/reset", {"seed": 17, "arguments": {}}).data["observation"]["said"] == "guess"
        wrong = send(port, "POST", "/tools/step", {"action": {"number": 1}}).data
        assert (wrong["observation"]["said"], wrong["reward"], wrong["done"]) == ("wrong", -0.25, False)
        bad = send(port, "POST", "/tools/step", {"action": {"number": -1}})
        assert (bad.status, bad.json["code"]) == (500, "author_failed")
        right = send(port, "POST", "/tools/step", {"action": {"number": 7}}).data
        assert (right["reward"], right["done"]) == (1.0, True)
        assert send(port, "POST", "/task/reward", {}).data == {"score": 0.75, "steps": 2, "over": True}
        assert send(port, "POST", "/tools/step", {"action": {"number": 7}}).status == 500
        assert send(port, "POST", "/functions/openenv_state", {}).data["step_count"] == 3
        back = send(port, "POST", "/openenv/step", {"action": {"tool_name": "reset", "arguments": {"seed": 3}}})
        assert back.json["done"] is False
        assert send(port, "POST", "/openenv/step", {"action": {"action": {"number": 3}}}).json["reward"] == 1.0
        send(port, "POST", "/reset", {"seed": 17, "arguments": {}})
        process.kill()
        process.wait()
        for path, body in (("/tools/step", {"action": {"number": 7}}), ("/tools/step", {"action": {"number": 7}})):
            lost = send(port, "POST", path, body)
            assert lost.json["code"] == "sandbox_lost"
