"""An agent of OpenAI Agents that plays a task of tau2, for AReaL: ``agent.py airline 19`` plays one on its own."""

import asyncio
import json
import os
import sys
from typing import Any

from agents import (
    Agent,
    FunctionTool,
    MaxTurnsExceeded,
    ModelSettings,
    OpenAIChatCompletionsModel,
    RunConfig,
    Runner,
)
from openai import AsyncOpenAI, OpenAIError

from aenv import Environment, ModelError
from aenv.rl import Episode, Rules, Task, rollout

RULES = Rules(fast_forward=True, once=True)
"""AReaL keeps what the model said. So an episode whose instance is lost goes on in another, and is not begun again."""
MAX_TURNS = 50
"""Answers of the model between two of the user."""
SETTINGS = ModelSettings(temperature=1.0, top_p=1.0, max_tokens=8192)
USER = ("TAU2_USER_", "TAU2_JUDGE_")
"""Variables that name the models which play the user and the judge, as in the environment's README."""


class Tau2Agent:
    """What AReaL is given: ``PPOTrainer.train(workflow="agent.Tau2Agent")``."""

    async def run(self, data: dict[str, Any], **extra: Any) -> float:
        """One episode. AReaL says where its proxy is."""
        return await run_agent_return_reward({**data, **extra})


async def run_agent_return_reward(data: dict[str, Any]) -> float:
    """The reward of one episode of the task that ``domain`` and ``task_id`` name. A failure is raised, and no reward.

    The model is at ``base_url``, with ``api_key``; without them, where ``OPENAI_BASE_URL`` and ``OPENAI_API_KEY`` say.
    """
    client = AsyncOpenAI(
        base_url=data.get("base_url"),
        api_key=data.get("api_key"),
        http_client=data.get("http_client"),
        max_retries=0,  # of an answer that nobody waited for AReaL would keep the tokens, too
    )
    model = OpenAIChatCompletionsModel(data.get("model", "default"), client)

    async def play(env: Episode, _: Task) -> None:
        await serve(env, model)

    task = Task(reset={"domain": data["domain"], "task": str(data["task_id"])})
    users = {name: value for name, value in os.environ.items() if name.startswith(USER)}
    tau2 = Environment("tau2", startup_timeout=600, environment_variables=users)
    trajectory = await rollout(tau2, play, task, data.get("seed"), rules=RULES)
    return trajectory.reward


async def serve(env: Episode, model: OpenAIChatCompletionsModel) -> None:
    """Talk to the user until the conversation is done."""
    info = await env.call_function("get_task_info")
    offered = [found["function"] for found in await env.list_openai_tools()]
    tools = [
        tool(env, found) for found in offered if found["name"] in info["tools"] and found["name"] != "send_message"
    ]
    policy = await env.call_function("get_system_prompt")
    agent = Agent("tau2", instructions=policy, model=model, tools=tools, model_settings=SETTINGS)
    said: list[Any] = [{"role": "user", "content": info["message"]}]
    done = False
    while not done:
        try:
            result = await Runner.run(agent, said, max_turns=MAX_TURNS, run_config=RunConfig(tracing_disabled=True))
        except MaxTurnsExceeded:
            return  # scored as it is
        except OpenAIError as exc:
            raise ModelError(str(exc)) from exc
        answer = await env.call_tool("send_message", {"message": result.final_output})
        heard = answer.structured
        said = [*result.to_input_list(), {"role": "user", "content": heard["message"]}]
        done = heard["done"]


def tool(env: Episode, found: dict[str, Any]) -> FunctionTool:
    """A tool of the environment, as the agent takes it. What it refuses is told to the model."""

    async def call(context: Any, arguments: str) -> str:
        try:
            given = json.loads(arguments or "{}")
        except ValueError:
            return "the arguments are no JSON"
        return (await env.call_tool(found["name"], given)).text

    return FunctionTool(
        found["name"], found.get("description", ""), found["parameters"], call, strict_json_schema=False
    )


if __name__ == "__main__":
    domain, task_id = sys.argv[1:]
    print(asyncio.run(run_agent_return_reward({"domain": domain, "task_id": task_id})))
