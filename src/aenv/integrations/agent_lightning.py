"""Episodes in instances as rollouts of agent-lightning: a subclass of ``AenvAgent`` is the agent of its controller."""

from __future__ import annotations

import asyncio
import os
import re
import secrets
import socket
from typing import Any

import msgspec
from agentlightning.client import AgentLightningAsyncClient, AgentLightningSyncClient

from aenv.client.environment import Environment
from aenv.errors import ModelError
from aenv.integrations.checking import ENV, LOOK, TASK, WRITE, CheckFailed, lose
from aenv.rl import Episode, OpenAIAgent, Rules, Task, rollout
from aenv.rl.driven import RULES
from aenv.rl.playing import Agent
from aenv.rl.trajectory import Generation

VARIABLE = "AENV_TASK"
"""The variable that has the task of a rollout."""
PATIENCE = 100
"""How often the model is asked again: the gateway refuses while weights are updated."""
ATTEMPT = re.compile(r"/attempt/[^/]+/")


class AenvAgent:
    """Plays one rollout of agent-lightning, and says its reward and what is to be trained on.

    agent-lightning takes a rollout without a reward for one of reward 0, and trains on all that its gateway kept of it.
    So the model is asked under another attempt than the one that is trained on. There the turns are put down once there
    is a score: of an episode that failed there is nothing.
    """

    env: str | Environment = ""
    """What is played in."""
    rules: Rules = RULES
    system: str = ""

    def agent(self, base_url: str, key: str) -> Agent:
        """What plays, with a model at this address."""
        return OpenAIAgent("default", base_url=base_url, api_key=key, system=self.system, tokens=True, retries=PATIENCE)

    async def run(self) -> None:
        """Play it. A failure is raised, and the rollout has failed."""
        base_url, key = os.environ["AGL_OPENAI_BASE_URL"], os.environ.get("AGL_KEY", "")
        given = msgspec.json.decode(os.environ.get(VARIABLE) or "{}")
        task = {name: given[name] for name in Task.__struct_fields__ if given.get(name) is not None}
        agent = self.agent(ATTEMPT.sub("/attempt/playing/", base_url), key)
        sample = secrets.randbits(31)  # no rollout of a group goes on as another does
        trajectory = await rollout(self.env, agent, task, rules=self.rules, sample=sample)
        reward = {"event_type": "reward", "data": {"value": trajectory.reward, "source": "agent"}}
        said = [_event(turn.generation) for turn in trajectory.turns if turn.generation]
        with AgentLightningSyncClient(key=key) as client:
            for event in (reward, *said):
                client.post_with_retry(os.environ["AGL_EVENT_URL"], json=event)


def check() -> str:
    """Let agent-lightning's controller play an episode, and look at what its server then has."""
    return asyncio.run(_checked())


class Checked(AenvAgent):
    """Does the task, loses its instance, and does the task once more."""

    env = ENV
    rules = Rules()
    _lost = False

    def agent(self, base_url: str, key: str) -> Agent:
        return self._play

    async def _play(self, env: Episode, task: Task) -> None:
        await env.call_tool(**WRITE)
        if not self._lost:
            self._lost = True
            await lose(env)
            await env.call_tool(**LOOK)
            raise CheckFailed("an instance was ended, and the episode went on in it")


async def _checked() -> str:
    import uvicorn  # each rollout has a process of its own, which needs none of these
    from agentlightning.controller.local_reconciler import LocalReconciler
    from agentlightning.server.app import create_app
    from omegaconf import OmegaConf

    key = secrets.token_hex(8)
    sampling = {"model_name": "none", "train": {"temperature": 1}, "val": {"temperature": 0}}
    server = uvicorn.Server(uvicorn.Config(create_app({"key": key, "default_proxy": sampling}), log_level="warning"))
    with socket.create_server(("127.0.0.1", 0)) as listening:
        url = f"http://127.0.0.1:{listening.getsockname()[1]}"
        local = {"maximum_size": 1, "poll_interval": 0.1}
        config = {"runner_type": "local", "agl_server": {"url": url, "key": key}, "local_runner": local}
        async with AgentLightningAsyncClient(base_url=url, key=key) as api:
            controller = LocalReconciler(api, OmegaConf.create(config))
            serving = asyncio.create_task(server.serve([listening]))
            try:
                agent = {"agent_class": f"{__name__}:Checked", "env_map": {VARIABLE: "input"}}
                asked = [{"input": msgspec.to_builtins(TASK), "config": {"local": agent}}]
                (rollout,) = (await api.post("/api/rollouts", json=asked)).json()
                controlling = asyncio.create_task(controller.run())
                ended: list[Any] = []
                while not ended:
                    await asyncio.sleep(0.1)
                    ended = (await api.get("/api/rollouts/terminal")).json()["items"]
                controller.stop()
                await controlling
                events = (await api.get(f"/api/rollouts/{rollout['rollout_id']}/events")).json()
            finally:
                server.should_exit = True
                await serving
    if [event["data"].get("value") for event in events] != [1.0]:
        raise CheckFailed(f"the rollout has {ended[0]['state']}, and its server has {events}")
    return "a rollout lost its instance, was begun again in another, and was scored 1"


def _event(of: Generation) -> dict[str, Any]:
    """A turn as agent-lightning's gateway keeps it."""
    if of.tokens is None or of.tokens.prompt is None or of.tokens.completion is None:
        raise ModelError("the model's server gave no token ids", hint="agent-lightning needs those of vLLM")
    choice: dict[str, Any] = {"finish_reason": of.finish_reason, "token_ids": of.tokens.completion}
    if of.tokens.logprobs is not None:
        choice["logprobs"] = {"content": [{"logprob": one} for one in of.tokens.logprobs]}
    response = {"prompt_token_ids": of.tokens.prompt, "choices": [choice]}
    data = {"model": of.model, "server": {"model": of.model}, "response": response, "http_status": 200, "status": "ok"}
    return {"event_type": "model_request", "data": data}
