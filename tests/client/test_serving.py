"""A project served on a port by a process of its own."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from aenv import StartFailed
from aenv.client.serving import run_project
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
    return {child.pid for child in psutil.Process().children()}


def test_the_sandbox_ends_when_its_owner_is_killed() -> None:
    code = (
        "import asyncio, os\n"
        "from pathlib import Path\n"
        "from aenv.client.serving import run_project\n"
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
