"""``aenv run`` and ``aenv test`` of a project that depends on others: these are there, too, and end with it."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.runtime.wire import send
from tests.support import FIXTURES

PATIENCE = 60


@pytest.fixture
def projects(tmp_path: Path) -> Path:
    return Path(
        shutil.copytree(FIXTURES / "composed", tmp_path / "projects", ignore=shutil.ignore_patterns("__pycache__"))
    )


@contextmanager
def running(root: Path, *more: str) -> Iterator[tuple[subprocess.Popen[str], dict[str, Any]]]:
    """The command, and what it says when it is ready."""
    line = (sys.executable, "-m", "aenv", "run", "--quiet", "--no-control", "--port", "0", "-o", "json", *more)
    env = {**os.environ, "AENV_HOME": str(root.parent / "home")}
    with subprocess.Popen(
        line, cwd=root, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        try:
            told = "".join(iter(process.stdout.readline, "}\n")) + "}"
            yield process, json.loads(told)
        finally:
            process.terminate()
            process.wait(PATIENCE)


def test_it_runs_with_them_and_they_end_with_it(projects: Path) -> None:
    with running(projects / "top", "--reload") as (process, told):
        port = int(told["url"].rpartition(":")[2])

        def added() -> Any:
            return send(port, "POST", "/tools/mid_low_add", {"number": 1})

        assert send(port, "POST", "/tools/add", {"number": 2}).data == [4, 2]
        assert added().data["content"][0]["text"] == "5"
        with open(projects / "top" / "src" / "whole.py", "a") as source:
            source.write("\n\n@register_tool\ndef new() -> str:\n    return 'new'\n")
        until = time.monotonic() + PATIENCE
        while send(port, "POST", "/tools/new", {}).status != 200 or added().status != 200:
            assert time.monotonic() < until
        began = psutil.Process(process.pid).children(recursive=True)
        assert len(began) >= 4
        process.send_signal(signal.SIGINT)
        assert process.wait(PATIENCE) == 0
        assert psutil.wait_procs(began, PATIENCE)[1] == []


def test_where_one_cannot_be_had_it_ends_and_says_why(projects: Path) -> None:
    shutil.rmtree(projects / "side")
    line = (sys.executable, "-m", "aenv", "run", "--quiet", "--no-control", "--port", "0")
    env = {**os.environ, "AENV_HOME": str(projects / "home")}
    done = subprocess.run(
        line, cwd=projects / "top", env=env, capture_output=True, text=True, timeout=PATIENCE, check=False
    )
    assert done.returncode == 1
    assert "top@1.0.0 needs side: " in done.stderr
    assert "Traceback" not in done.stderr


def test_the_tests_of_a_project_have_them(projects: Path) -> None:
    code = "from aenv import Environment as E; e = E.sync('top'); print(e.call_tool('add', {'number': 1}).text)"
    config = json.loads((projects / "top" / "config.json").read_text())
    config["testConfig"] = {"script": f'{sys.executable} -c "{code}"'}
    (projects / "top" / "config.json").write_text(json.dumps(config))
    line = (sys.executable, "-m", "aenv", "test")
    env = {**os.environ, "AENV_HOME": str(projects / "home")}
    done = subprocess.run(
        line, cwd=projects / "top", env=env, capture_output=True, text=True, timeout=PATIENCE, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "[2,1]" in done.stdout
