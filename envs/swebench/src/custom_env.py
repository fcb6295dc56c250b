"""SWE-bench: an issue, a repository to mend, and the verdict of the benchmark's own harness in a clean sandbox."""

import asyncio
import math
import posixpath
from collections.abc import Coroutine
from typing import Any, TypeVar

from swe import harness, judging, prediction
from swe import rows as rowsets
from swe.rows import Row
from swe.testbed import ROOT, Testbed

from aenv import (
    AEnvError,
    Context,
    Invalid,
    ToolError,
    register_function,
    register_reset,
    register_reward,
    register_tool,
)

SHOWN = 30_000
"""Characters of a file, or of each stream of a command, that an agent gets to see."""
LINE = 300
"""Characters of a line that was found."""
T = TypeVar("T")
_SEARCH = 'grep -rnIF --null --exclude-dir=.git --exclude-dir=__pycache__ -e "$1" . | head -n 2000'
_TOLD = f"""The repository is at {ROOT}. Mend it so that the following is settled, without changing its tests, which are
not counted as a part of your work. When you are done, call submit.

"""


class Episode:
    """The one that is played in this process."""

    def __init__(self) -> None:
        self.row: Row | None = None
        self.over = ""
        """Why no tool answers any more."""
        self.verdict: dict[str, Any] | None = None
        self._testbed: Testbed | None = None
        self._calls: set[asyncio.Task[Any]] = set()

    def testbed(self, ctx: Context | None) -> Testbed:
        if ctx is None:
            raise Invalid("this takes a sandbox: call it through an Environment")
        if self._testbed is None:
            self._testbed = Testbed(ctx.second)
        return self._testbed

    async def begin(self, row: Row, ctx: Context | None) -> None:
        await self.close("no task has begun: a reset begins one")
        self.row = self.verdict = None
        await self.testbed(ctx).begin(row)
        self.row, self.over = row, ""

    async def close(self, why: str) -> None:
        """Cut the agent off: what it asked for is ended, and it can ask for nothing more."""
        self.over = self.over or why
        for call in self._calls:
            call.cancel()
        if self._calls:
            await asyncio.wait(self._calls)

    async def play(self, ctx: Context | None, doing: Coroutine[Any, Any, T]) -> T:
        """A call of the agent's. Before any reset, it begins the first task."""
        try:
            if self.row is None and not self.over:
                await self.begin(next(iter(rowsets.rows().values())), ctx)
            if self.over:
                raise ToolError(self.over)
        except AEnvError:
            doing.close()
            raise
        call = asyncio.create_task(doing)
        self._calls.add(call)
        try:
            return await call
        except asyncio.CancelledError:
            if not self.over:
                raise
            raise ToolError(self.over) from None
        finally:
            call.cancel()
            self._calls.discard(call)


episode = Episode()


@register_tool
async def execute_command(command: str, timeout: float = 60, ctx: Context | None = None) -> dict[str, Any]:
    """Run a command in the repository, in a shell of its own.

    The answer holds returncode, stdout and stderr; timed_out, when it was ended since its time was over; and truncated,
    when the middle of a long output is left out. Directory and variables do not last from one call to the next.

    Args:
        command: One or more lines, as for bash.
        timeout: Seconds after which the command is ended.
    """
    if not (timeout > 0 and math.isfinite(timeout)):
        raise ToolError(f"timeout must be a number of seconds over 0, found {timeout:g}")
    testbed = episode.testbed(ctx)

    async def run() -> dict[str, Any]:
        done = await testbed.run(command, timeout)
        stdout, stderr = _shown(done.stdout), _shown(done.stderr)
        return {
            "returncode": done.returncode,
            "stdout": stdout,
            "stderr": stderr,
            "timed_out": done.timed_out,
            "truncated": done.truncated or stdout != done.stdout or stderr != done.stderr,
        }

    return await episode.play(ctx, run())


@register_tool(annotations={"readOnlyHint": True})
async def read_file(path: str, first: int = 1, last: int = 0, ctx: Context | None = None) -> str:
    """Read a text file.

    Args:
        path: Where it is, from the root of the repository.
        first: The first line that is wanted, from 1.
        last: The last one; 0 for the end of the file.
    """
    testbed = episode.testbed(ctx)

    async def read() -> str:
        lines = (await testbed.second.read(_place(path))).decode(errors="replace").splitlines(keepends=True)
        return _shown("".join(lines[max(first, 1) - 1 : last or None]))

    return await episode.play(ctx, read())


@register_tool
async def edit_file(path: str, old: str, new: str, ctx: Context | None = None) -> str:
    """Replace a text in a file, or make a new file.

    Args:
        path: Where it is, from the root of the repository.
        old: What is replaced, exactly as it stands there, with enough around it to occur once. Empty for a new file.
        new: What stands there afterwards.
    """
    testbed = episode.testbed(ctx)

    async def edit() -> str:
        place = _place(path)
        if not old:
            if (await testbed.run(["test", "-e", place], 60)).returncode == 0:
                raise ToolError(f"{path} is there already: say in old what is replaced")
            await testbed.second.write(place, new)
            return f"{path} was made"
        text = (await testbed.second.read(place)).decode(errors="surrogateescape")
        if (count := text.count(old)) != 1:
            raise ToolError(
                f"old occurs {count} times in {path}, and must occur once" if count else f"{path} has no such text"
            )
        await testbed.second.write(place, text.replace(old, new).encode(errors="surrogateescape"))
        return f"{path} was changed"

    return await episode.play(ctx, edit())


@register_tool(annotations={"readOnlyHint": True})
async def search_code(query: str, max_results: int = 10, ctx: Context | None = None) -> list[dict[str, Any]]:
    """Search code in the repository: the lines that hold a text, each with its file and number.

    Args:
        query: The text, as it stands in the code.
        max_results: The most lines that are wanted.
    """
    if not query.strip() or "\n" in query:
        raise ToolError("query must be a text within one line")
    testbed = episode.testbed(ctx)

    async def search() -> list[dict[str, Any]]:
        done = await testbed.run(["/bin/sh", "-c", _SEARCH, "sh", query], 60)
        found = []
        for line in done.stdout.split("\n"):
            name, _, rest = line.partition("\0")
            number, _, content = rest.partition(":")
            if number.isdigit():
                found.append({"file": name.removeprefix("./"), "line": int(number), "content": content.strip()[:LINE]})
        return sorted(found, key=lambda one: (one["file"], one["line"]))[: max(max_results, 1)]

    return await episode.play(ctx, search())


@register_tool
async def apply_patch(patch: str, ctx: Context | None = None) -> str:
    """Apply a patch to the repository, all of it or nothing.

    Args:
        patch: As git diff writes it, with paths from the root of the repository.
    """
    testbed = episode.testbed(ctx)

    async def apply() -> str:
        line = ["git", "apply", "--verbose", "-"]
        done = await testbed.second.exec(line, cwd=ROOT, env=testbed.variables, input=patch, timeout=120)
        if done.returncode:
            raise ToolError(f"the patch does not apply: {_shown(done.stderr).strip()}")
        return _shown(done.stderr).strip()

    return await episode.play(ctx, apply())


@register_tool
async def submit(ctx: Context | None = None) -> str:
    """Hand in the work as it is. It ends the task: no tool answers any more."""

    async def hand_in() -> str:
        episode.over = "the work was handed in, and the task is over"
        return "The work was handed in."

    return await episode.play(ctx, hand_in())


@register_reset
async def begin(task: str, seed: int | None = None, ctx: Context | None = None) -> None:
    """Begin a task: the repository at its base commit, and nothing of an earlier episode.

    Args:
        task: The instance_id of a row.
    """
    await episode.begin(rowsets.find(task), ctx)


@register_reward
async def score(ctx: Context | None = None) -> dict[str, Any]:
    """What the harness says of the work, in a clean sandbox. It ends the episode: the agent is cut off before."""
    if episode.row is None:
        raise Invalid("there is nothing to score: no task has begun")
    await episode.close("the episode is over")
    if episode.verdict is None:
        testbed, row = episode.testbed(ctx), episode.row
        work = await prediction.take(testbed, row)
        verdict = await judging.judge(testbed, row, work.patch)
        episode.verdict = {**verdict, "files": work.files, "left_out": work.left_out, "patch": work.patch[:SHOWN]}
    return episode.verdict


@register_function
async def evaluate(task: str, patch: str, ctx: Context | None = None) -> dict[str, Any]:
    """The score of a patch that was made elsewhere. It ends the episode that is played here.

    Args:
        task: The instance_id of a row.
        patch: The prediction, as git diff writes it.
    """
    row, testbed = rowsets.find(task), episode.testbed(ctx)
    await episode.begin(row, ctx)
    await episode.close("the episode is over")
    return await judging.judge(testbed, row, patch)


@register_function
def tasks(names: list[str] | None = None, repo: str = "") -> dict[str, Any]:
    """The rows of this project, as tasks.

    Args:
        names: Only these, by their instance_id.
        repo: Only those of a repository.
    """
    found = [rowsets.find(name) for name in names] if names else list(rowsets.rows().values())
    listed = [_task(row) for row in found if not repo or row.values["repo"] == repo]
    return {"tasks": listed, "source": {"name": "swebench", "version": harness.VERSION}}


@register_function
def solution(task: str) -> list[dict[str, Any]]:
    """The row's own patch, applied and handed in.

    Args:
        task: The instance_id of a row.
    """
    applied = {"name": "apply_patch", "arguments": {"patch": rowsets.find(task).gold}}
    return [applied, {"name": "submit", "arguments": {}}]


def _task(row: Row) -> dict[str, Any]:
    instruction = _TOLD + str(row.values["problem_statement"])
    metadata = {name: row.values[name] for name in ("repo", "version", "base_commit") if row.values[name]}
    return {"id": row.id, "instruction": instruction, "reset": {"task": row.id}, "metadata": metadata}


def _place(path: str) -> str:
    return posixpath.normpath(posixpath.join(ROOT, path))


def _shown(text: str) -> str:
    if len(text) <= SHOWN:
        return text
    half = SHOWN // 2
    return f"{text[:half]}\n... {len(text) - 2 * half} characters are left out ...\n{text[-half:]}"
