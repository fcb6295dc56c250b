"""The second container as an episode has it: at the beginning of a task, with nothing left of another, and still the
system that it was when the agent is cut off."""

from __future__ import annotations

import asyncio
import hashlib
import posixpath
import time
from collections.abc import Mapping
from typing import Any

from aenv.errors import AEnvError, Conflict, Forbidden, Invalid, NotFound, SandboxLost
from aenv.runtime.second import Second
from terminal_bench.files import mode_of, put
from terminal_bench.library import CACHE, PATH, Library
from terminal_bench.recipes import Copy, Recipe, Run
from terminal_bench.tasks import HarborTask

_BUILD = 600.0
_SHOWN = 2000
_PROBE = f"""
test -w / && echo root
for place in /usr /lib /etc {PATH.replace(":", " ")}; do test -w $place && echo system; done
for name in bash tmux; do command -v $name > /dev/null && echo $name; done
true
"""
_KEPT = "usr|bin|sbin|lib|lib32|lib64|libx32|etc|proc|dev|sys|shared"
"""Mounts of the root that is this machine's programs; nobody in it can change them."""
_WIPE = f"""
cd /
for name in .[!.]* ..?* *; do
    case "$name" in {_KEPT}) continue ;; esac
    if [ -e "$name" ] || [ -L "$name" ]; then
        [ -L "$name" ] || chmod -R u+rwX -- "$name" 2> /dev/null
        rm -rf -- "$name" || exit 1
    fi
done
for place in /shared /dev/shm; do
    chmod -R u+rwX "$place" 2> /dev/null
    find "$place" -mindepth 1 -delete || exit 1
done
ipcrm -a > /dev/null 2>&1
mkdir -p root tmp home opt run srv mnt var/log var/tmp && chmod 1777 tmp var/tmp
"""
_PROGRAMS = (
    *("sh", "bash", "env", "cat", "ls", "mkdir", "chmod", "rm", "cp", "mv", "ln", "echo", "printf", "grep"),
    *("sed", "awk", "tee", "find", "head", "tail", "sort", "test", "id", "kill", "tar", "curl", "apt-get"),
    *("python3", "python", "pytest", "pip", "uv", "uvx", "tr", "sha256sum", "ldconfig", "ldconfig.real"),
)
"""What verifiers are made of."""
_MAPPED = (
    "cat /proc/self/maps; bash -c 'cat /proc/$$/maps' 2> /dev/null; "
    "python3 -c 'print(open(\"/proc/self/maps\").read())' 2> /dev/null; "
    "for name in sh find sha256sum rm; do LD_TRACE_LOADED_OBJECTS=1 $name 2> /dev/null < /dev/null; done; true"
)
"""Prints the libraries that programs begin with, among other words."""
_LINKED = ("/etc/ld.so.preload", "/etc/ld-musl-x86_64.path", "/etc/ld-musl-aarch64.path")
"""Name what every program begins with, and where those of musl look for libraries."""


class Box:
    """One second container, from one episode to the next."""

    def __init__(self, second: Second) -> None:
        self.second = second
        self.workdir: str | None = None
        self.variables: dict[str, str] = {}
        self._found: set[str] | None = None
        """What there is, as it was before any agent."""
        self._used = False
        self._before: dict[str, str] = {}
        """Digests of the programs that a verifier runs by, where an agent could replace them."""
        self._library: Library | None = None
        """What these are made of, in the same case."""

    async def shell(self) -> str:
        return "bash" if "bash" in await self._probed() else "sh"

    async def has_tmux(self) -> bool:
        return "tmux" in await self._probed()

    async def begin(self, task: HarborTask, given: Mapping[str, str], *, built: bool) -> None:
        """Put it at the beginning of the task. ``built``: it is the task's own image."""
        await self._fresh(task.id)
        self.variables = task.variables(given, "environment")
        if built:
            self.workdir = task.environment.get("workdir")
            if task.image and not (task.directory / "environment" / "Dockerfile").exists():
                place = self.workdir or (await self.second.exec("pwd")).stdout.strip()
                await put(self.second, task.directory / "environment", place)
        else:
            await self.follow(task.id, task.recipe(), task.environment.get("workdir"))
        await self._make("/logs/agent", "/logs/verifier", "/logs/artifacts")
        if check := task.environment.get("healthcheck"):
            await self._healthy(task, check)
        if "system" in await self._probed():
            self._library = Library(self.second)
            await self._library.look()
            self._before = await self._digests([*await self._guarded(), *self._library.files])

    async def again(self, task: HarborTask) -> None:
        """An environment for the verifier alone."""
        await self._fresh(task.id)
        await self.follow(task.id, task.verifier_recipe(), task.environment.get("workdir"))
        await self._make("/logs/verifier", "/logs/artifacts")

    def use(self) -> None:
        """From now on, something of an agent's may be in it."""
        self._used = True

    async def end_all(self) -> None:
        """End every process in it."""
        await self.second.exec(["/bin/sh", "-c", "kill -9 -1 2> /dev/null; true"], env={"PATH": PATH})

    async def replaced(self) -> list[str]:
        """Programs that a verifier runs by, and that are not what they were. Nothing in the container is run for it:
        the agent of the second container reads the files, and no command can change that."""
        now = await self._digests(self._before)
        return sorted(path for path, digest in self._before.items() if now[path] != digest)

    async def bent(self, *, packages: bool) -> list[str]:
        """The same for what they are made of, once it is known that they themselves are what they were, and nothing
        of the agent's runs. ``packages``: those of others for Python are to be what they were, too."""
        library = self._library
        if library is None:
            return []
        try:
            stale = await library.put_back()
        except (Conflict, Invalid, Forbidden):  # there is something else in its place
            return [CACHE]
        found = await library.found(packages=packages)
        if found.replaced:
            return found.replaced
        await library.remove(found.loose)
        if stale:
            await library.renew()
        return []

    async def _probed(self) -> set[str]:
        if self._found is None:
            self._found = set((await self.second.exec(_PROBE, env={"PATH": PATH})).stdout.split())
        return self._found

    async def _fresh(self, name: str) -> None:
        found = await self._probed()
        if not self._used:
            self._used = True  # by what the task does to it
            return
        if "system" in found or "root" not in found:
            raise SandboxLost(  # for a run, a reason to go on in another instance
                f"this instance cannot begin {name}: its second container has changes of an earlier episode",
                hint="create another instance: only on the process engine can one play several tasks",
            )
        await self.end_all()
        done = await self.second.exec(["/bin/sh", "-c", _WIPE], env={"PATH": PATH})
        if done.returncode:
            raise AEnvError(f"what an earlier episode left cannot be removed: {done.stderr[-_SHOWN:]}")

    async def follow(self, name: str, recipe: Recipe, workdir: str | None = None) -> None:
        """Make what the Dockerfile of a task says, in the system that is there."""
        if "root" not in await self._probed():
            raise Invalid(
                f"task {name} is made in the second container, whose user may not write there",
                hint="name an image whose user is root as the datasource, or images of the tasks: tasks(images=...)",
            )
        self.workdir = workdir or recipe.workdir
        self.variables = recipe.variables | self.variables
        for step in recipe.steps:
            try:
                if isinstance(step, Run):
                    await self._run(name, step)
                elif isinstance(step, Copy):
                    mode = mode_of(step.source) if step.mode is None else step.mode
                    await self.second.write(step.target, step.source.read_bytes(), mode=mode)
                else:
                    await self._make(step)
            except Forbidden as exc:
                raise Invalid(f"task {name} needs an image of its own: {exc.message}") from exc
        await self._make(self.workdir)

    async def _run(self, name: str, step: Run) -> None:
        variables = {"PATH": PATH, **step.variables}
        done = await self.second.exec(step.command, cwd=step.workdir, env=variables, timeout=_BUILD)
        if done.returncode:
            said = (done.stdout + done.stderr)[-_SHOWN:].strip()
            raise Invalid(
                f"task {name} needs an image of its own: line {step.line} of its Dockerfile failed here: {said}",
                hint="build the image, and name it: tasks(images=...)",
            )

    async def _make(self, *places: str) -> None:
        done = await self.second.exec(["mkdir", "-p", *places])
        if done.returncode:
            raise Invalid(f"the second container has no place for {', '.join(places)}: {done.stderr.strip()}")

    async def _healthy(self, task: HarborTask, check: Mapping[str, Any]) -> None:
        grace = time.monotonic() + float(check.get("start_period_sec", 0))
        left = int(check.get("retries", 3))
        while True:
            within = float(check.get("timeout_sec", 30))
            done = await self.second.exec(check["command"], cwd=self.workdir, env=self.variables, timeout=within)
            if done.returncode == 0:
                return
            early = time.monotonic() < grace
            left -= not early
            if left <= 0:
                raise AEnvError(f"task {task.id} is not healthy: {(done.stdout + done.stderr)[-_SHOWN:].strip()}")
            await asyncio.sleep(float(check.get("start_interval_sec" if early else "interval_sec", 5)))

    async def _guarded(self) -> list[str]:
        """The programs wherever they could be found, and the libraries that they begin with."""
        programs = [posixpath.join(folder, name) for folder in PATH.split(":") for name in _PROGRAMS]
        said = await self.second.exec(_MAPPED, env={"PATH": PATH})
        mapped = sorted({word for word in said.stdout.split() if word.startswith("/")})
        return [*_LINKED, *programs, *mapped]

    async def _digests(self, paths: Mapping[str, str] | list[str]) -> dict[str, str]:
        return {path: await self._digest(path) for path in paths}

    async def _digest(self, path: str) -> str:
        try:
            return hashlib.sha256(await self.second.read(path)).hexdigest()
        except (NotFound, Conflict, Invalid, Forbidden) as exc:
            return exc.code
