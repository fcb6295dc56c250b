"""Sandboxes that the SDK runs on this machine."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from aenv import Environment, StartFailed
from aenv.client.local import run_project
from tests.support import FIXTURES


async def test_a_project_that_fails_shows_its_traceback(tmp_path: Path) -> None:
    (tmp_path / "broken.py").write_text("print('on the way')\n1/0\n")
    with pytest.raises(StartFailed, match="exit code 1") as caught:
        async with run_project(tmp_path):
            pass
    assert "ZeroDivisionError" in str(caught.value)
    assert "on the way" in str(caught.value)


async def test_a_project_that_never_gets_ready_is_ended(tmp_path: Path) -> None:
    (tmp_path / "stuck.py").write_text("import threading\nthreading.Event().wait()\n")
    before = _children()
    with pytest.raises(StartFailed, match="not ready after 0.5 s"):
        async with run_project(tmp_path, startup_timeout=0.5):
            pass
    assert _children() <= before


def _children() -> set[int]:
    return {child.pid for child in psutil.Process().children(recursive=True)}


async def test_cancelled_while_it_starts_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "config.json").write_text('{"name": "stuck", "version": "1.0.0"}')
    (tmp_path / "src").mkdir()
    (tmp_path / "src" / "stuck.py").write_text("import threading\nthreading.Event().wait()\n")
    monkeypatch.chdir(tmp_path)
    before = _children()
    task = asyncio.create_task(Environment("stuck").initialize())
    while _children() <= before:
        await asyncio.sleep(0.01)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert _children() <= before


async def test_cancelled_while_it_is_released_leaves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(FIXTURES / "lab")
    before = _children()
    env = Environment("lab")
    await env.initialize()
    releasing = asyncio.create_task(env.release())
    await asyncio.sleep(0)
    releasing.cancel()
    with pytest.raises(asyncio.CancelledError):
        await releasing
    assert _children() <= before


def test_the_sandbox_ends_when_its_owner_is_killed() -> None:
    code = (
        "import asyncio, os\n"
        "from pathlib import Path\n"
        "from aenv.client.local import run_project\n"
        "async def main():\n"
        f"    async with run_project(Path({str(FIXTURES / 'lab')!r})) as url:\n"
        "        print(url, flush=True)\n"
        "        await asyncio.sleep(600)\n"
        "asyncio.run(main())\n"
    )
    owner = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert owner.stdout is not None
    assert owner.stdout.readline().startswith("http")
    (sandbox,) = psutil.Process(owner.pid).children()
    os.kill(owner.pid, signal.SIGKILL)
    owner.wait()
    owner.stdout.close()
    gone, alive = psutil.wait_procs([sandbox], timeout=20)
    assert (len(gone), alive) == (1, [])
