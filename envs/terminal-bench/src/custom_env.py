"""Tasks of a terminal, as Harbor writes them: a terminal in the task's own container, and the task's own verifier."""

import asyncio
import math
import shlex
from collections.abc import Coroutine
from typing import Any, Literal, TypeVar

from terminal_bench import pane
from terminal_bench import tasks as tasksets
from terminal_bench.box import Box
from terminal_bench.files import put
from terminal_bench.tasks import HarborTask
from terminal_bench.verifier import verify

from aenv import (
    Context,
    Invalid,
    ToolError,
    register_function,
    register_reset,
    register_reward,
    register_tool,
)

SHOWN = 30_000
"""Characters of each stream of a command that an agent gets to see."""
T = TypeVar("T")


class Episode:
    """The one that is played in this process."""

    def __init__(self) -> None:
        self.task: HarborTask | None = None
        self.keep = False
        self.packages = True
        self._box: Box | None = None
        self.is_open = False
        """Whether an agent may play."""
        self.turn = asyncio.Lock()
        """Of whoever begins one, or judges it."""
        self._calls: set[asyncio.Task[Any]] = set()

    def box(self, ctx: Context) -> Box:
        if self._box is None:
            self._box = Box(ctx.second)
        return self._box

    def begin(self, task: HarborTask, *, keep: bool, packages: bool) -> None:
        self.task, self.keep, self.packages, self.is_open = task, keep, packages, True

    async def close(self) -> None:
        """Cut the agent off: what it asked for is ended, and it can ask for nothing more."""
        self.is_open = False
        for call in self._calls:
            call.cancel()
        if self._calls:
            await asyncio.wait(self._calls)

    async def play(self, box: Box, doing: Coroutine[Any, Any, T]) -> T:
        """A call of the agent's."""
        if not self.is_open:
            doing.close()
            why = "the episode is over" if self.task else "no task was begun"
            raise ToolError(f"{why}: a reset begins one")
        box.use()
        call = asyncio.create_task(doing)
        self._calls.add(call)
        try:
            return await call
        except asyncio.CancelledError:
            if self.is_open:
                raise
            raise ToolError("the episode is over") from None
        finally:
            call.cancel()
            self._calls.discard(call)


episode = Episode()


@register_tool
async def execute_command(command: str, timeout: float = 60, ctx: Context | None = None) -> dict[str, Any]:
    """Run a command in the task's directory, in a shell of its own.

    The answer holds returncode, stdout and stderr; timed_out, when it was ended since its time was over; and truncated,
    when the middle of a long output is left out. Standard input is empty. Directory and variables do not last: use
    keystrokes for a shell that stays. To leave a program running, end the command with & and send its output to a file.

    Args:
        command: One or more lines, as for bash.
        timeout: Seconds after which the command is ended.
    """
    if not (timeout > 0 and math.isfinite(timeout)):
        raise ToolError(f"timeout must be a number of seconds over 0, found {timeout:g}")
    box = episode.box(_known(ctx))

    async def run() -> dict[str, Any]:
        line = [await box.shell(), "-c", command]
        done = await box.second.exec(line, cwd=box.workdir, env=box.variables, timeout=timeout)
        stdout, stderr = _shown(done.stdout), _shown(done.stderr)
        return {
            "returncode": done.returncode,
            "stdout": stdout,
            "stderr": stderr,
            "timed_out": done.timed_out,
            "truncated": done.truncated or stdout != done.stdout or stderr != done.stderr,
        }

    return await episode.play(box, run())


@register_tool
async def keystrokes(keys: str | list[str], wait: float = 1.0, ctx: Context | None = None) -> str:
    """Type into the terminal, wait, and see its screen. The terminal stays as it is from one call to the next.

    Text is typed as it is, and a newline in it is the Enter key. A key is named as tmux does: Enter, Tab, Escape, Up,
    C-c, C-d. A list mixes both: ["vim notes.txt", "Enter"].

    Args:
        keys: What is typed.
        wait: Seconds between the last key and the look at the screen, at most 60.
    """
    if not 0 <= wait <= 60:
        raise ToolError(f"wait must be between 0 and 60 seconds, found {wait:g}")
    box = episode.box(_known(ctx))

    async def type_and_look() -> str:
        await pane.press(box, [keys] if isinstance(keys, str) else keys)
        await asyncio.sleep(wait)
        return await pane.screen(box)

    return await episode.play(box, type_and_look())


@register_tool(annotations={"readOnlyHint": True})
async def capture_pane(history: int = 0, ctx: Context | None = None) -> str:
    """See the screen of the terminal.

    Args:
        history: So many lines above the screen, too.
    """
    box = episode.box(_known(ctx))
    return await episode.play(box, pane.screen(box, history))


@register_reset
async def begin(
    task: str,
    built: bool = False,
    processes: Literal["ended", "kept"] = "ended",
    packages: Literal["compared", "free"] = "compared",
    seed: int | None = None,
    ctx: Context | None = None,
) -> None:
    """Begin a task: its environment as its author made it, and nothing of an earlier one.

    Args:
        task: Which one.
        built: The second container is the task's own image.
        processes: What becomes of the agent's processes before the verifier runs.
        packages: Whether an agent that is root may change Python's packages.
    """
    context = _known(ctx)
    found = tasksets.find(task)
    if wrong := found.wrong(built=built):
        raise Invalid(f"task {task} cannot be played here: {wrong}")
    async with episode.turn:
        await episode.close()
        episode.task = None  # until there is another
        await episode.box(context).begin(found, context.environment_variables, built=built)
        episode.begin(found, keep=processes == "kept", packages=packages == "compared")


@register_reward
async def score(ctx: Context | None = None) -> dict[str, Any]:
    """What the task's own verifier says. It ends the episode: the agent is cut off before the tests are brought in."""
    context = _known(ctx)
    async with episode.turn:
        if episode.task is None:
            raise Invalid("there is nothing to score: no task was begun")
        await episode.close()
        given = context.environment_variables
        box, task = episode.box(context), episode.task
        return await verify(box, task, given, keep=episode.keep, packages=episode.packages)


@register_function
def tasks(
    names: list[str] | None = None,
    images: str = "",
    processes: Literal["ended", "kept"] = "ended",
    packages: Literal["compared", "free"] = "compared",
) -> dict[str, Any]:
    """The tasks that come with this project, and which of them are left out here, and why.

    Args:
        names: Only these.
        images: The image of each task, such as registry.example.org/tasks/{task}:1, or {image} for the one that it
            names itself. Without it, tasks are made in the second container as it is, where that is possible.
        processes: What becomes of the agent's processes before the verifier runs; kept for tasks that are about a
            service that runs.
        packages: Whether an agent that is root may change the packages that Python has; free for tasks that are about
            these.
    """
    found: list[dict[str, Any]] = []
    left: list[dict[str, str]] = []
    for name in names or tasksets.names():
        task = tasksets.find(name)
        image = images.format(task=task.id, image=task.image) if images else ""
        if wrong := task.wrong(built=bool(image)):
            left.append({"id": name, "why": wrong})
        else:
            found.append(_listed(task, image, processes, packages))
    if names and left:
        raise Invalid(f"task {left[0]['id']} cannot be played here: {left[0]['why']}")
    source = {"name": tasksets.PROJECT_NAME, "version": tasksets.VERSION}
    return {"tasks": found, "source": source, "left_out": left}


@register_function
async def solution(task: str, ctx: Context | None = None) -> list[dict[str, Any]]:
    """What the task's own solution does. Its files are brought into the container for it.

    Args:
        task: The one that was begun.
    """
    found = tasksets.find(task)
    if not episode.is_open or episode.task is None or episode.task.id != task:
        raise Invalid(f"task {task} was not begun", hint="begin it with a reset, then ask")
    context = _known(ctx)
    box = episode.box(context)
    await put(box.second, found.directory / "solution", "/solution")
    given = {"DEBIAN_FRONTEND": "noninteractive"} | found.variables(context.environment_variables, "solution")
    variables = " ".join(f"{name}={shlex.quote(value)}" for name, value in given.items())
    command = f"chmod +x /solution/solve.sh && env {variables} /solution/solve.sh"
    timeout = float(found.config.get("agent", {}).get("timeout_sec") or 600)
    return [{"name": "execute_command", "arguments": {"command": command, "timeout": timeout}}]


def _listed(task: HarborTask, image: str, processes: str, packages: str) -> dict[str, Any]:
    reset: dict[str, Any] = {"task": task.id}
    if image:
        reset["built"] = True
    if processes != "ended":
        reset["processes"] = processes
    if packages != "compared":
        reset["packages"] = packages
    metadata = {**task.config.get("metadata", {}), "timeout": task.config.get("agent", {}).get("timeout_sec")}
    listed = {"id": task.id, "instruction": task.instruction, "reset": reset, "metadata": metadata}
    return {**listed, "datasource": image} if image else listed


def _known(ctx: Context | None) -> Context:
    if ctx is None:
        raise Invalid("this takes a sandbox: call it through an Environment")
    return ctx


def _shown(text: str) -> str:
    if len(text) <= SHOWN:
        return text
    half = SHOWN // 2
    return f"{text[:half]}\n... {len(text) - 2 * half} characters are left out ...\n{text[-half:]}"
