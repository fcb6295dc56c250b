"""The example of tau2 for AReaL, whose instance is lost after the first call of its agent."""

import asyncio
from contextlib import suppress
from typing import Any

from agents import FunctionTool

import agent
from aenv import AEnvError, Environment
from aenv.client.provision import attach
from aenv.rl import Episode

tool, lost = agent.tool, []


def lossy(env: Episode, found: dict[str, Any]) -> FunctionTool:
    made = tool(env, found)
    call = made.on_invoke_tool

    async def then_lose(context: Any, arguments: str) -> str:
        said = await call(context, arguments)
        if not lost:
            lost.append(env.instance_id)
            sandbox = env.sandbox
            async with Environment("tau2", provision=attach(sandbox.url, sandbox.token)) as other:
                with suppress(AEnvError):  # the episode knows nothing of it
                    await other.exec("kill -9 $PPID")
        return said

    made.on_invoke_tool = then_lose
    return made


agent.tool = lossy
print(asyncio.run(agent.run_agent_return_reward({"domain": "airline", "task_id": "19"})), len(lost))
