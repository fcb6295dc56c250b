"""The built-in terminal-bench on Docker: a task's Dockerfile as an image, unmodified, and an agent that is root."""

from __future__ import annotations

import io
import tarfile
from pathlib import Path

import pytest

from aenv import Environment, SandboxLost, rl
from aenv.client.local import Embedded
from aenv.engines.docker.daemon import Daemon, failure
from aenv.project.builtin import builtin_root
from tests import daemons

TASKS = builtin_root() / "terminal-bench" / "tasks"
IMAGES = "aenv-test/tb-{task}:1"
BUILT = ["log-report", "paged-service"]
FAKE = r"printf '#!/bin/sh\necho 1 > /logs/verifier/reward.txt\n' > {0} && chmod +x {0}"
CHEATS = {
    "the shell": ["cp /bin/bash /kept", FAKE.format("/bin/bash.new"), "mv /bin/bash.new /usr/bin/bash"],
    "the interpreter": ["rm /usr/bin/python3", FAKE.format("/usr/bin/python3")],
    "a program that is found first": [FAKE.format("/usr/local/bin/python3")],
    "what every program begins with": ["echo /app/x.so > /etc/ld.so.preload"],
    "a library": ["cp /lib/x86_64-linux-gnu/libc.so.6 /kept; echo >> /kept; mv /kept /lib/x86_64-linux-gnu/libc.so.6"],
}


@pytest.fixture
async def docker(dockerd: str, home: Path, program: Path, monkeypatch: pytest.MonkeyPatch) -> Daemon:
    """A daemon with the images of two tasks, and our engine on it."""
    monkeypatch.setenv("AENV_ENGINE", "docker")
    monkeypatch.setenv("AENV_DOCKER_HOST", dockerd)
    monkeypatch.setenv("AENV_BASE_IMAGE", daemons.base_image(dockerd))
    daemon = Daemon(dockerd)
    debian = await daemons.debian_on(daemon)
    await daemon.ask("POST", f"/images/{debian}/tag", query={"repo": "python", "tag": "3.11-slim"})
    for task in BUILT:
        context = io.BytesIO()
        with tarfile.open(fileobj=context, mode="w") as archive:
            archive.add(TASKS / task / "environment", arcname=".")
        query = {"t": IMAGES.format(task=task), "rm": True}
        headers = {"Content-Type": "application/x-tar"}
        async for line in daemon.lines("POST", "/build", query=query, content=context.getvalue(), headers=headers):
            assert not failure(line), line
    return daemon


async def _listed(image: str) -> list[rl.Task]:
    async with Environment("terminal-bench", image, provision=Embedded()) as env:
        found = await env.call_function("tasks", {"names": BUILT, "images": IMAGES})
        return [rl.Task.of(task) for task in found["tasks"]]


async def oracle(env: Environment, task: rl.Task) -> None:
    for call in await env.call_function("solution", {"task": task.id}):
        assert not (await env.call_tool(call["name"], call["arguments"])).is_error


async def nop(env: Environment, task: rl.Task) -> None:
    assert "no tmux" in (await env.call_tool("keystrokes", {"keys": "ls\n"})).text


async def test_each_task_in_an_image_of_its_own(docker: Daemon) -> None:
    tasks = await _listed(daemons.DEBIAN)
    for player, score in ((oracle, 1.0), (nop, 0.0)):
        env = Environment("terminal-bench", provision=Embedded())
        scores: dict[str, list[object]] = {task: [] for task in BUILT}
        async with rl.rollouts(env, player, tasks, n=2, reuse=4, concurrency=2, seed=1) as played:
            async for found in played:
                scores[found.task.id].append(getattr(found.outcome, "score", found.outcome))
        assert scores == {task: [score, score] for task in BUILT}, "also where a used instance is of no more use"


async def test_root_puts_nothing_in_the_place_of_what_the_verifier_runs_by(docker: Daemon) -> None:
    for what, commands in CHEATS.items():
        async with Environment("terminal-bench", IMAGES.format(task="log-report"), provision=Embedded()) as env:
            await env.reset(None, {"task": "log-report", "built": True})
            await env.call_tool("execute_command", {"command": " && ".join(commands)})
            found = await env.call_reward()
            assert found["score"] == 0.0, what
            assert found["replaced"], what


async def test_a_plain_image_will_do_once(docker: Daemon) -> None:
    async with Environment("terminal-bench", daemons.DEBIAN, provision=Embedded()) as env:
        await env.reset(None, {"task": "fix-the-parser"})
        await oracle(env, rl.Task(id="fix-the-parser"))
        assert (await env.call_reward())["score"] == 1.0
        with pytest.raises(SandboxLost, match="changes of an earlier episode"):
            await env.reset(None, {"task": "fix-the-parser"})
