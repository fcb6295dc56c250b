"""What the checks of ``aenv train-check`` have in common: a task without a model, and an instance that is lost."""

from __future__ import annotations

from contextlib import suppress

from aenv.client.environment import Environment
from aenv.client.provision import attach
from aenv.errors import AEnvError
from aenv.rl.driven import Driven
from aenv.rl.tasks import Task

ENV = "mini-terminal"
TASK = Task(
    instruction="Write hello into the file note.",
    reward={"checks": [{"kind": "file_contains", "path": "note", "text": "hello"}]},
)
WRITE = {"name": "execute_command", "arguments": {"command": "echo hello > note"}}
"""Does the task."""
LOOK = {"name": "execute_command", "arguments": {"command": "cat note"}}
"""Changes nothing."""


class CheckFailed(AEnvError):
    """A framework that is installed does not do with an instance what it should."""

    code = "check_failed"


async def lose(env: Environment) -> None:
    """End an instance as a machine does that goes away."""
    with suppress(AEnvError):
        await env.exec("kill -9 $PPID")  # what runs the command is the instance


async def lose_episode(driven: Driven) -> None:
    """End the instance of an episode, behind the back of whoever plays it."""
    sandbox = driven.episode.sandbox
    assert sandbox is not None
    async with Environment(driven.episode.env_name, provision=attach(sandbox.url, sandbox.token)) as another:
        await lose(another)


def judge(reward: float, before: str | None, after: str | None) -> str:
    """What became of an episode whose instance was lost after the task was done."""
    if before == after:
        raise CheckFailed(f"instance {before} was ended, and the episode went on in it")
    if reward != 1.0:
        raise CheckFailed(f"an episode that did its task was scored {reward:g}, not 1")
    return "an episode lost its instance, went on in another, and was scored 1"
