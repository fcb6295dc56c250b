"""The built-in swebench on Docker: the same rows in a dual container, whose second one is an image with a user."""

from __future__ import annotations

import io
import json
import tarfile
from collections.abc import Mapping
from pathlib import Path

import pytest

from aenv import Environment, Invalid, rl
from aenv.client.local import Embedded
from aenv.engines.docker.daemon import Daemon, failure
from aenv.engines.process.venvs import interpreter_for
from aenv.project.builtin import builtin_root
from tests import daemons
from tests.daemons import programs
from tests.envs import swe_tasks
from tests.envs.benchmarks import needs

MAIN, SECOND, ROOTS = "aenv-test/swe:1", "aenv-test/swe-testbed:1", "aenv-test/swe-testbed:root"
PACKAGES = ("py.py", "swebench", "dotenv", "tqdm", "unidiff", "pytest", "_pytest", "pluggy", "iniconfig", "packaging")
PLACES = "/testbed /opt/testbed"
pytestmark = [
    needs("swebench"),
    pytest.mark.timeout(600),
    pytest.mark.skipif(not swe_tasks.kept().exists(), reason="no tasks were made of sdists: make components"),
]


async def built(daemon: Daemon, tag: str, dockerfile: str, files: Mapping[str, Path | bytes]) -> None:
    context = io.BytesIO()
    with tarfile.open(fileobj=context, mode="w") as archive:
        for name, content in {**files, "Dockerfile": dockerfile.encode()}.items():
            if isinstance(content, Path):
                archive.add(content, arcname=name)
            else:
                entry = tarfile.TarInfo(name)
                entry.size, entry.mode = len(content), 0o644
                archive.addfile(entry, io.BytesIO(content))
    headers = {"Content-Type": "application/x-tar"}
    query = {"t": tag, "rm": True}
    async for line in daemon.lines("POST", "/build", query=query, content=context.getvalue(), headers=headers):
        assert not failure(line), line


@pytest.fixture
async def project(dockerd: str, home: Path, program: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A project whose image is on a daemon, beside an image to work in."""
    monkeypatch.setenv("AENV_ENGINE", "docker")
    monkeypatch.setenv("AENV_DOCKER_HOST", dockerd)
    base = daemons.base_image(dockerd)
    monkeypatch.setenv("AENV_BASE_IMAGE", base)
    daemon = Daemon(dockerd)
    debian = await daemons.debian_on(daemon)
    target = tmp_path / "swe-docker"
    swe_tasks.project(target)
    with monkeypatch.context() as patch:
        patch.delenv("AENV_HOME")
        python = Path((await interpreter_for(builtin_root() / "swebench", trusted=True)).executable)
    site = next(python.parent.parent.glob("lib/python*/site-packages"))
    found = [path for path in site.iterdir() if path.name.partition("-")[0].replace("python_", "") in PACKAGES]
    packages = {f"packages/{path.name}": path for path in found}
    dockerfile = f"FROM {base}\nCOPY packages /opt/aenv/lib/python3.11/site-packages\nCOPY --chown=1000 project /app\n"
    await built(daemon, MAIN, dockerfile, {**packages, "project": target})
    git = programs.pack("git")
    dockerfile = f"FROM {debian}\nADD git.tar /\nRUN mkdir -p {PLACES} && chown 1000 {PLACES}\n"
    await built(daemon, ROOTS, dockerfile, {"git.tar": git})
    await built(daemon, SECOND, f"FROM {ROOTS}\nUSER 1000\n", {})
    config = json.loads((target / "config.json").read_text())
    config["artifacts"] = [{"id": "", "type": "image", "content": MAIN, "platform": "linux/amd64"}]
    (target / "config.json").write_text(json.dumps(config))
    monkeypatch.chdir(target)
    return target


async def oracle(env: Environment, task: rl.Task) -> None:
    for call in await env.call_function("solution", {"task": task.id}):
        assert not (await env.call_tool(call["name"], call["arguments"])).is_error


async def idle(env: Environment, task: rl.Task) -> None:
    command = "echo nothing > NOTES; echo 'import os; os._exit(0)' > /opt/testbed/lib/pytest/__init__.py"
    await env.call_tool("execute_command", {"command": command})


async def exits_early(env: Environment, task: rl.Task) -> None:
    command = "find . -name '*.py' -not -path '*test*' -exec sed -i '1i import os; os._exit(0)' {} +"
    await env.call_tool("execute_command", {"command": command})


async def test_the_same_rows_in_a_dual_container(project: Path) -> None:
    async with Environment("swe-docker", SECOND, provision=Embedded()) as env:
        tasks = [rl.Task.of(task) for task in (await env.call_function("tasks"))["tasks"]]
        assert len(tasks) >= 10
        for player, played, score in ((oracle, tasks, 1.0), (idle, tasks, 0.0), (exits_early, tasks[:2], 0.0)):
            for task in played:
                await env.reset(None, task.reset)
                await player(env, task)
                found = await env.call_reward()
                assert found["score"] == score, f"{player} {task.id} {found}"
    async with Environment("swe-docker", ROOTS, provision=Embedded()) as env:
        with pytest.raises(Invalid, match="may change its programs"):
            await env.reset(None, tasks[0].reset)
