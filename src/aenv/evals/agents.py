"""Agents by name: the environment's own solution, nobody, a function, a model, or a program."""

from __future__ import annotations

import asyncio
import hashlib
import importlib
import importlib.util
import os
import shlex
import signal
import sys
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryFile
from typing import IO, Any

from aenv import config
from aenv.errors import AgentError, Invalid, NotFound, Unsupported
from aenv.evals.tasksets import parameters
from aenv.models import to_json
from aenv.rl.playing import Agent
from aenv.rl.recording import Episode
from aenv.rl.tasks import Task

NAMES = "oracle, nop, openai:MODEL, module:function, file.py:function or 'cmd: PROGRAM ARGUMENTS'"
SOLUTION = "solution"
"""The owner's function of an environment that tells what solves a task."""
KEPT = 4000
"""Bytes that are kept of what a program printed last."""


def check(name: str) -> None:
    """Raises ``Invalid`` for what is no name of an agent."""
    kind, colon, rest = name.partition(":")
    if kind not in ("cmd", "openai"):  # a function may be in a file whose path has colons
        kind, colon, rest = name.rpartition(":")
    if name not in OWN and not (colon and kind and rest.strip()):
        raise Invalid(f"{name!r} names no agent", hint=f"use {NAMES}")


def agent(name: str, **model: Any) -> Agent:
    """The agent of that name; ``model`` are further arguments of ``OpenAIAgent``."""
    check(name)
    if name in OWN:
        return OWN[name]()
    kind, _, rest = name.partition(":")
    if kind == "openai":
        from aenv.rl.models import OpenAIAgent

        return OpenAIAgent(rest, **model)
    if kind == "cmd":
        return Command(rest)
    place, _, function = name.rpartition(":")
    found = getattr(_module(place), function, None)
    if found is None or not callable(found):
        raise NotFound(f"{place} has no function {function!r}", hint="an agent is an async function of (env, task)")
    made: Agent = found
    return made


def _module(place: str) -> Any:
    if not place.endswith(".py"):
        sys.path.insert(0, os.getcwd())
        try:
            return importlib.import_module(place)
        except ImportError as exc:
            raise NotFound(f"the agent's module {place!r} cannot be imported: {exc}") from exc
    path = Path(place).resolve()
    if not path.is_file():
        raise NotFound(f"there is no file {place}", hint="name the file that the agent is in")
    sys.path.insert(0, str(path.parent))
    taken = path.stem in sys.modules or path.stem in sys.stdlib_module_names
    name = f"aenv_agent_{path.stem}" if taken else path.stem
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


class Nop:
    """Does nothing: what an environment scores by itself."""

    name = "nop"

    async def __call__(self, env: Episode, task: Task) -> None:
        """Leave everything as it is."""


class Oracle:
    """Does what the environment's function ``solution`` tells: whether every task can be passed, and scores so.

    Its answer counts the steps, and names those whose tool failed; these are a part of the solution, or a defect of
    the environment.
    """

    name = "oracle"

    def __init__(self) -> None:
        self._takes: dict[str, frozenset[str]] = {}
        """By environment, what its ``solution`` takes."""

    async def __call__(self, env: Episode, task: Task) -> dict[str, Any]:
        """Make the calls, one after the other."""
        takes = await self._parameters(env)
        steps = await env.call_function(SOLUTION, {key: value for key, value in task.reset.items() if key in takes})
        errors = []
        for number, step in enumerate(_checked(steps)):
            arguments = step.get("arguments") or {}
            if "function" in step:  # what somebody else than the agent does
                await env.call_function(step["function"], arguments)
                continue
            result = await env.call_tool(step["name"], arguments)
            if result.is_error:
                errors.append(f"step {number}, {step['name']}: {result.text[:300]}")
        return {"steps": len(steps), "errors": errors}

    async def _parameters(self, env: Episode) -> frozenset[str]:
        name = str(env.spec.env)
        if name not in self._takes:
            found = parameters(await env.list_functions(), SOLUTION)
            if found is None:
                raise Unsupported(
                    f"{name} has no oracle: it has no function 'solution'",
                    hint="write '@register_function def solution(task: str) -> list', which returns "
                    "[{'name': tool, 'arguments': {...}}, ...]",
                )
            self._takes[name] = frozenset(found)
        return self._takes[name]


def _checked(steps: Any) -> Sequence[Mapping[str, Any]]:
    if isinstance(steps, list) and all(isinstance(step, dict) and step.keys() & {"name", "function"} for step in steps):
        return steps
    raise Invalid(
        f"the function 'solution' returned {str(steps)[:200]}",
        hint="return a list of {'name': tool, 'arguments': {...}}, or {'function': name, 'arguments': {...}}",
    )


class Command:
    """A program that plays one episode over MCP, and is ended with all that it started when its episode is.

    It is told by variables: ``AENV_AGENT_URL``, the MCP endpoint with the tools; ``AENV_TASK_ID``, which tells tasks
    apart and nothing more, since the id itself may tell of the solution; ``AENV_TASK_INSTRUCTION``,
    ``AENV_TASK_SYSTEM``, ``AENV_TASK_OBSERVATION`` (what the reset returned, as text or JSON) and ``AENV_TASK_SEED``.
    Behind a model gateway, ``OPENAI_BASE_URL``, ``OPENAI_API_KEY`` and their like are those of its episode. What it
    calls is not in the trajectory; what it printed last is its answer.
    """

    def __init__(self, line: str) -> None:
        try:
            self.arguments = shlex.split(line)
        except ValueError as exc:
            raise Invalid(f"{line!r} is no command: {exc}") from exc
        if not self.arguments:
            raise Invalid("there is no command", hint=f"use {NAMES}")
        self.name = f"cmd:{shlex.join(self.arguments)}"

    async def __call__(self, env: Episode, task: Task) -> str:
        """Start the program, and wait for its end."""
        variables = {
            "AENV_AGENT_URL": await env.agent_url(),
            "AENV_TASK_ID": hashlib.sha256(task.id.encode()).hexdigest()[:16],
            "AENV_TASK_INSTRUCTION": task.instruction,
            "AENV_TASK_SYSTEM": task.system,
            "AENV_TASK_OBSERVATION": _text(env.observation),
            "AENV_TASK_SEED": "" if env.sample_seed is None else str(env.sample_seed),
        }
        hidden: Iterable[str] = ()
        if env.models is not None:
            variables |= env.models.variables
            hidden = env.models.hidden
        with TemporaryFile() as printed:
            code = await self._run(config.agent_environment(variables, hidden), printed)
            printed.seek(max(0, printed.seek(0, os.SEEK_END) - KEPT))
            said = printed.read().decode(errors="replace").strip()
        if code:
            how = f"exit code {code}" if code > 0 else f"signal {-code}"
            raise AgentError(f"{self.arguments[0]} ended with {how}: {said[-1000:] or 'it printed nothing'}")
        return said

    async def _run(self, environment: Mapping[str, str], printed: IO[bytes]) -> int:
        """Its exit code. It prints to a file: the end of a pipe comes only when all that it started has ended."""
        try:
            process = await asyncio.create_subprocess_exec(
                *self.arguments,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=printed,
                stderr=printed,
                env=environment,
                start_new_session=True,
            )
        except OSError as exc:
            raise AgentError(f"{self.arguments[0]} cannot be started: {exc.strerror or exc}") from exc
        try:
            return await process.wait()
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)


def _text(observation: Any) -> str:
    if observation is None or isinstance(observation, str):
        return observation or ""
    return to_json(observation).decode()


OWN: Mapping[str, type[Nop | Oracle]] = {"oracle": Oracle, "nop": Nop}
"""Agents that need nothing but their name."""
