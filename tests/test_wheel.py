"""The built wheel in an empty virtual environment: the first program of a newcomer, and an ordinary user's machine."""

from __future__ import annotations

import json
import os
import platform
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support import ROOT

NOBODY = 65534
SCRIPT = """\
import asyncio
from aenv import Environment

async def main():
    async with Environment("mini-terminal") as env:
        await env.call_tool("execute_command", {"command": "cd /tmp && echo hello > greeting"})
        result = await env.call_tool("execute_command", {"command": "cat greeting; pwd"})
        print(result.structured["output"][0], end="", flush=True)
        input()

asyncio.run(main())
"""
LOOKING = """\
import asyncio
from aenv import Environment

async def main():
    async with Environment("mini-terminal") as env:
        command = "find / -path '*aenv/envs' -not -path '/proc/*' 2>/dev/null; find / -path '*/aenv/envs/*' 2>/dev/null"
        result = await env.call_tool("execute_command", {"command": command})
        print(result.structured["output"][0], end="")

asyncio.run(main())
"""
CONFORMANCE = """\
import asyncio, json, tempfile
from aenv.engines import conformance, load_engine

async def main():
    async with load_engine("process", state="conformance") as engine:
        with tempfile.TemporaryDirectory() as task:
            another = lambda: load_engine("process", state="conformance")
            results = await conformance.run(engine, another=another, second=task)
        declared = [row.name for row in conformance.CHECKS if {row.name, row.needs} & set(engine.cannot)]
        print(json.dumps({"cannot": declared, "results": results}))
        await engine.end()

asyncio.run(main())
"""
pytestmark = pytest.mark.xdist_group("wheel")


class Installed:
    """The wheel, installed where every user of this machine may read it."""

    def __init__(self, directory: Path, python: Path) -> None:
        self.directory = directory
        self.python = python

    def start(self, script: str, home: Path, user: int | None = None) -> subprocess.Popen[str]:
        home.mkdir(mode=0o700, exist_ok=True)
        if user is not None:
            os.chown(home, user, user)
        environment = {"PATH": os.defpath, "HOME": str(home), "AENV_HOME": str(home / ".aenv")}
        return subprocess.Popen(
            [self.python, "-c", script],
            cwd=home,
            env=environment,
            user=user,
            group=user,
            extra_groups=[] if user is not None else None,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )


@pytest.fixture(scope="module")
def installed() -> Iterator[Installed]:
    directory = Path(tempfile.mkdtemp(prefix="aenv-wheel-", dir="/var/tmp"))
    directory.chmod(0o755)
    try:
        base = _readable_python()
        if base is None:
            pytest.skip("no Python 3.11 with venv that an ordinary user may run (on Debian: apt install python3-venv)")
        _run(base, "-m", "venv", directory / "venv")
        python = directory / "venv" / "bin" / "python"
        pip = (python, "-m", "pip", "--disable-pip-version-check", "--quiet")
        _run(*pip, "install", _wheel(python, directory))
        yield Installed(directory, python)
    finally:
        shutil.rmtree(directory, ignore_errors=True)


def _wheel(python: Path, directory: Path, **variables: str) -> Path:
    """The wheel of this package."""
    command = [
        python,
        "-m",
        "pip",
        "--disable-pip-version-check",
        "--quiet",
        "wheel",
        "--no-deps",
        "-w",
        directory,
        ROOT,
    ]
    environment = {**os.environ, **variables}
    made = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    if made.returncode and "No matching distribution" in made.stderr:
        pytest.skip("the package index cannot be reached")
    assert made.returncode == 0, made.stderr
    [wheel] = directory.glob("*.whl")
    return wheel


def _run(*command: str | Path) -> None:
    subprocess.run([str(part) for part in command], check=True, capture_output=True, text=True)


def _readable_python() -> str | None:
    probe = "import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 11))"
    for python in (sys.executable, "/usr/bin/python3"):
        real = os.path.realpath(python)
        if os.path.exists(real):
            user = NOBODY if os.geteuid() == 0 else None
            try:
                done = subprocess.run([real, "-c", probe], user=user, cwd="/", capture_output=True, check=False)
            except PermissionError:
                continue
            if done.returncode == 0:
                return real
    return None


def _finished(process: subprocess.Popen[str]) -> str:
    out, err = process.communicate("\n", timeout=60)
    assert process.returncode == 0, err
    return out


def test_ten_lines_work_right_after_installation(installed: Installed) -> None:
    assert _finished(installed.start(SCRIPT, installed.directory / "one")) == "hello\n/tmp\n"


@pytest.mark.parametrize("user", [None, NOBODY])
def test_no_sandbox_sees_the_built_in_environments_and_their_answers(installed: Installed, user: int | None) -> None:
    if user is not None and os.geteuid() != 0:
        pytest.skip("only root can become another user")
    looking = installed.start(LOOKING, installed.directory / f"looking-{user}", user)
    seen = _finished(looking).split()
    assert "/runtime/aenv/envs" in seen
    assert [path for path in seen if not path.endswith("aenv/envs")] == []


def test_they_work_after_a_first_run_was_killed(installed: Installed) -> None:
    home = installed.directory / "two"
    first = installed.start(SCRIPT, home)
    assert first.stdout is not None
    assert first.stdout.readline() == "hello\n"
    first.send_signal(signal.SIGKILL)
    first.communicate()
    assert _finished(installed.start(SCRIPT, home)) == "hello\n/tmp\n"
    _until_empty(home / ".aenv" / "run")


def test_two_at_once_do_not_end_each_other(installed: Installed) -> None:
    home = installed.directory / "three"
    both = [installed.start(SCRIPT, home) for _ in range(2)]
    for process in both:
        assert process.stdout is not None
        assert [process.stdout.readline(), process.stdout.readline()] == ["hello\n", "/tmp\n"]
    assert [_finished(process) for process in both] == ["", ""]
    _until_empty(home / ".aenv" / "run")


@pytest.mark.skipif(shutil.which("gcc") is None, reason="no C compiler (on Debian: apt install gcc libc6-dev)")
def test_it_has_the_agent_for_this_kind_of_machine(installed: Installed) -> None:
    [wheel] = installed.directory.glob("*.whl")
    machine = platform.machine()
    assert wheel.name.endswith(f"-py3-none-manylinux2014_{machine}.musllinux_1_1_{machine}.whl")
    program = _finished(installed.start("from aenv import agent; print(agent.binary())", installed.directory / "four"))
    assert Path(program.strip()).is_relative_to(installed.directory / "venv")
    done = subprocess.run([program.strip()], capture_output=True, text=True, check=False)
    assert done.stderr == "usage: aenv-agent SOCKET [until-eof]\n"


def test_without_a_compiler_it_is_for_every_kind(installed: Installed, tmp_path: Path) -> None:
    (tmp_path / "nothing").mkdir()
    wheel = _wheel(installed.python, tmp_path, PATH=str(tmp_path / "nothing"))
    assert wheel.name.endswith("-py3-none-any.whl")
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
    assert "aenv/agent/agent.c" in names
    assert {"aenv/chart/Chart.yaml", "aenv/chart/values.yaml", "aenv/chart/templates/api.yaml"} <= set(names)
    assert not [name for name in names if name.startswith("aenv/agent/bin/")]


def _until_empty(directory: Path) -> None:
    deadline = time.monotonic() + 30
    while left := [path for path in directory.iterdir() if path.is_dir()]:
        assert time.monotonic() < deadline, f"left behind: {left}"
        time.sleep(0.05)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_an_ordinary_user_has_all_but_what_is_declared(installed: Installed) -> None:
    process = installed.start(CONFORMANCE, installed.directory / "ordinary", user=NOBODY)
    out, err = process.communicate(timeout=300)
    assert process.returncode == 0, err
    found = json.loads(out)
    failed = [row for row in found["results"] if row[1] == "fail"]
    assert failed == []
    skipped = {row[0] for row in found["results"] if row[1] == "skip"}
    assert skipped == set(found["cannot"])
    assert sum(row[1] == "pass" for row in found["results"]) >= 40
