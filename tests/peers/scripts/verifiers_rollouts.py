"""Rollouts of verifiers in instances of the keypad, some of which are lost: ``verifiers_rollouts.py MODEL-URL``."""

import asyncio
import json
import os
import sys
from pathlib import Path
from typing import Any

import verifiers.v1 as vf

from aenv.integrations.checking import lose_episode
from aenv.integrations.verifiers import AenvEnv, AenvEnvConfig, AenvTask
from aenv.models import ToolResult
from aenv.rl import Driven, Rules, Trajectory

os.environ["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"  # verifiers needs uv
CLIENT = vf.EvalClientConfig(base_url=sys.argv[1], api_key_var="NO_KEY")
MODEL = vf.ModelContext(model="reader", client=CLIENT, sampling=vf.SamplingConfig())
RULES = Rules()
"""Nothing goes on in another instance."""


class LosingAtCall(Driven):
    """An episode whose instance is gone when its first tool is called."""

    lost = False

    async def call_tool(self, *given: Any, **more: Any) -> ToolResult:
        if not self.lost:
            self.lost = True
            await lose_episode(self)
        return await super().call_tool(*given, **more)


class LosingAtEnd(Driven):
    """One whose instance is gone when it is to be scored."""

    async def end(self, answer: Any = None) -> Trajectory:
        if self.trajectory is None and answer is not None:
            await lose_episode(self)
        return await super().end(answer)


class Hanging(Driven):
    """One in which no call ever ends."""

    async def call_tool(self, *given: Any, **more: Any) -> ToolResult:
        await asyncio.Event().wait()
        raise AssertionError


class Keypads(AenvEnv):
    """Plays the kinds of episodes that it is told, one after the other."""

    kinds: list[type[Driven]]

    def driven(self, task: AenvTask) -> Driven:
        kind = self.kinds.pop(0)
        return kind(self.taskset.env, task.data.task, rules=self.taskset.rules, group=task.key)


async def played(*kinds: type[Driven], rules: Rules | None = None, name: str = "keypad", **config: Any) -> Any:
    """What there is of an episode of the digit 3."""
    env = Keypads(AenvEnvConfig(taskset={"id": "keypad_verifiers"}, **config))
    env.kinds = list(kinds)
    env.taskset.env = name
    if rules is not None:
        env.taskset.rules = rules
    async with env.serving():
        task = next(task for task in env.taskset if task.data.task["reset"]["digit"] == 3)
        (slot,) = env.slots(task)
        episode = await env.run_slot(slot, MODEL)
    return {
        "ok": episode.ok,
        "errors": [error.type for error in episode.errors],
        "traces": [[trace.ok, {name: one.value for name, one in trace.rewards.items()}] for trace in episode.traces],
    }


async def main() -> dict[str, Any]:
    return {
        "going on": await played(LosingAtCall),
        "lost at a call": await played(LosingAtCall, rules=RULES),
        "lost at the end": await played(LosingAtEnd, rules=RULES),
        "again": await played(LosingAtEnd, Driven, rules=RULES, retries={"max_retries": 1}),
        "out of time": await played(Hanging, agent={"timeout": {"rollout": 6}}),
        "nowhere": await played(Driven, name="nowhere"),
    }


if __name__ == "__main__":
    print(json.dumps(asyncio.run(main())))
