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
LIBRARY, PACKAGES = "/usr/lib/python3.11", "/usr/local/lib/python3.11/dist-packages"
FAKE = r"printf '#!/bin/sh\necho 1 > /logs/verifier/reward.txt\n' > {0} && chmod +x {0}"
COPY = "mkdir -p $(dirname {0}) && cp /lib/x86_64-linux-gnu/libz.so.1 {0} && echo >> {0}"
"""A library that was changed; the name that programs know it by is in it, whatever the file is called."""
NAMED = "echo /mine > /etc/ld.so.conf.d/0.conf"
CHEATS = {
    "the shell": ["cp /bin/bash /kept", FAKE.format("/bin/bash.new"), "mv /bin/bash.new /usr/bin/bash"],
    "the interpreter": ["rm /usr/bin/python3", FAKE.format("/usr/bin/python3")],
    "a program that is found first": [FAKE.format("/usr/local/bin/python3")],
    "what every program begins with": ["echo /app/x.so > /etc/ld.so.preload"],
    "a library": ["cp /lib/x86_64-linux-gnu/libc.so.6 /kept; echo >> /kept; mv /kept /lib/x86_64-linux-gnu/libc.so.6"],
    "a module of Python": [f"echo 'load = lambda file: {{}}' >> {LIBRARY}/json/__init__.py"],
    "what Python begins with": [f"rm -f {LIBRARY}/sitecustomize.py", f"echo 'x = 1' > {LIBRARY}/sitecustomize.py"],
    "a path of Python's": ["mkdir -p /usr/local/lib/python3.11/dist-packages", f"echo 'import x' > {PACKAGES}/x.pth"],
    "a library of a module": [
        "cd /lib/x86_64-linux-gnu; echo >> $(readlink -f $(ls libcrypto.so* libz.so* | head -1))"
    ],
    "a directory of libraries": [COPY.format("/mine/libz.so.1"), NAMED, "ldconfig"],
    "a directory for whoever installs something": [COPY.format("/mine/libz.so.1"), NAMED],
    "a library in a file of another name": [COPY.format("/usr/local/lib/libmine.so"), "echo >> /etc/ld.so.cache"],
    "a variant of a library": [COPY.format("/usr/local/lib/glibc-hwcaps/x86-64-v2/libmine.so")],
    "no place for the cache": ["rm /etc/ld.so.cache", "mkdir /etc/ld.so.cache"],
}
CACHED = f"""
cp {LIBRARY}/json/__init__.py /kept && echo 'raise SystemExit(print("bent"))' > {LIBRARY}/json/__init__.py &&
cd {LIBRARY}/json &&
python3 -I -c 'import py_compile as p; p.compile("__init__.py", invalidation_mode=p.PycInvalidationMode(3))'
cat /kept > {LIBRARY}/json/__init__.py && python3 -I -c 'import json'
"""
"""The source is as it was, and is not what Python reads."""
NEW = f"""
mkdir -p {PACKAGES}/mine && touch {PACKAGES}/mine/__init__.py && cp /bin/true /usr/bin/mine &&
mkdir /mine && sed s/libz.so.1/libx.so.1/g /lib/x86_64-linux-gnu/libz.so.1 > /mine/libx.so.1 &&
echo /mine >> /etc/ld.so.conf && echo /usr/lib > /etc/ld.so.conf.d/0.conf && ldconfig
"""


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
    through = {}
    for what, commands in CHEATS.items():
        async with Environment("terminal-bench", IMAGES.format(task="log-report"), provision=Embedded()) as env:
            await env.reset(None, {"task": "log-report", "built": True})
            await env.call_tool("execute_command", {"command": " && ".join(commands)})
            found = await env.call_reward()
            if found["score"] != 0.0 or not found.get("replaced"):
                through[what] = found
    assert through == {}


async def test_caches_of_python_and_what_is_new_in_a_system_are_no_matter(docker: Daemon) -> None:
    for player, score in ((oracle, 1.0), (nop, 0.0)):
        async with Environment("terminal-bench", IMAGES.format(task="log-report"), provision=Embedded()) as env:
            await env.reset(None, {"task": "log-report", "built": True})
            await player(env, rl.Task(id="log-report"))
            assert (await env.call_tool("execute_command", {"command": NEW})).structured["returncode"] == 0
            bent = await env.call_tool("execute_command", {"command": CACHED})
            assert "bent" in bent.text, "so the trick is one"
            found = await env.call_reward()
            assert found["score"] == score, found
            assert "replaced" not in found
            loaded = "python3 -c 'import ctypes; ctypes.CDLL(\"libx.so.1\")'"
            assert (await env.call_function("run_command", {"command": loaded}))["returncode"] == 0


async def test_a_plain_image_will_do_once(docker: Daemon) -> None:
    async with Environment("terminal-bench", daemons.DEBIAN, provision=Embedded()) as env:
        await env.reset(None, {"task": "fix-the-parser"})
        await oracle(env, rl.Task(id="fix-the-parser"))
        assert (await env.call_reward())["score"] == 1.0
        with pytest.raises(SandboxLost, match="changes of an earlier episode"):
            await env.reset(None, {"task": "fix-the-parser"})
