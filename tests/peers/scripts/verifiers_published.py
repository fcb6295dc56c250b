"""A taskset of verifiers as our environment and as its own: ``verifiers_published.py MODEL-URL``, in its project.

The model adds 2 and 3 and says 5. In our instances somebody does the same, and less.
"""

import asyncio
import json
import os
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import verifiers.v1 as vf

from aenv import AEnvError, Context, Environment
from aenv.integrations.verifiers import publish
from aenv.integrations.verifiers.publishing import Table

os.environ["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"  # verifiers needs uv
sys.path.insert(0, "src")
os.environ["PYTHONPATH"] = os.path.abspath("src")


async def theirs() -> dict[str, Any]:
    """What verifiers scores a model in its own harness."""
    agent = {"harness": {"id": "null"}, "runtime": {"type": "subprocess"}}
    config = vf.resolve_env_config({"taskset": {"id": "sums"}, "agent": agent})
    env = vf.load_environment(config)
    client = vf.EvalClientConfig(base_url=sys.argv[1], api_key_var="NO_KEY")
    model = vf.ModelContext(model="reader", client=client, sampling=vf.SamplingConfig())
    async with env.serving():
        task = next(iter(env.taskset))
        (trace,) = (await env.run_episode(task, model)).traces
    if not trace.ok:
        raise SystemExit(str(trace.errors))
    rewards = {name: reward.model_dump() for name, reward in trace.rewards.items()}
    return {"score": trace.reward, "rewards": rewards, "metrics": trace.metrics, "stop": trace.stop_condition}


async def ours() -> dict[str, Any]:
    """What somebody is scored in our instance."""
    found: dict[str, Any] = {}
    async with Environment("sums") as env:
        found["tasks"] = (await env.call_function("tasks"))["tasks"]
        found["tools"] = [tool["name"] for tool in await env.list_tools()]
        await env.reset(arguments={"task": "2+3"})
        added = await env.call_tool("calculator_add", {"left": 2, "right": 3})
        wrong = await env.call_tool("calculator_add", {"left": "two", "right": 3})
        found["added"], found["wrong"] = [added.text, added.is_error], wrong.is_error
        found["said"] = (await env.call_tool("send_message", {"message": "It is 5."})).structured
        late = await env.call_tool("bash", {"command": "true"})
        found["late"] = [late.text, late.is_error]
        found["done"] = await env.call_reward()
        await env.reset(arguments={"task": "40+2"})
        written = await env.call_tool("bash", {"command": "echo 42 > note; cat note; exit 3"})
        found["written"] = written.text
        found["nothing"] = await env.call_reward()
    return found


class Plain(vf.Taskset[vf.Task]):
    def load(self) -> list[vf.Task]:
        return [vf.Task(vf.TaskData(id="plain", prompt="Say something."))]


class Boxed(vf.Task):
    NEEDS_CONTAINER = True


class Boxes(vf.Taskset[Boxed]):
    def load(self) -> list[vf.Task]:
        return [Boxed(vf.TaskData(prompt="Say something."))]


class Rewriting(vf.Task):
    @vf.intercept
    def hide(self, request: vf.Request) -> None:
        """Nothing."""


class Rewritten(vf.Taskset[Rewriting]):
    def load(self) -> list[vf.Task]:
        data = vf.TaskData(id="plain", prompt="Say something.")
        return [Rewriting(data), Rewriting(data.model_copy(update={"id": "drawn", "image": "drawn:1"}))]


async def refused() -> list[str]:
    """Why what cannot be ours is refused."""
    for kind in (Plain, Boxes, Rewritten):
        module: Any = ModuleType(kind.__name__.lower())
        module.__all__ = ["Found"]
        module.Found = kind
        sys.modules[module.__name__] = module
    reasons = []
    for env in ({"taskset": {"id": "boxes"}}, {"id": "user-sim", "taskset": {"id": "plain"}}):
        try:
            publish(env, seat="assistant" if "id" in env else "")
        except AEnvError as exc:
            reasons.append(str(exc))
    for given, task in (("rewritten", "plain"), ("rewritten", "drawn"), ("plain", "plain")):
        table = Table({"id": "best-of-n" if given == "plain" else "", "taskset": {"id": given}}, "", False)
        await table.start(Context())
        try:
            await table.restart(task)
            await table.say("Something.")
        except AEnvError as exc:
            reasons.append(str(exc))
        finally:
            await table.stop()
    return reasons


async def main() -> dict[str, Any]:
    return {"theirs": await theirs(), "refused": await refused(), **await ours()}


print(json.dumps(asyncio.run(main())))
