"""agent-lightning's server, controller and rollout manager on instances of ours, with a server of chat completions in
the place of vLLM: ``agentlightning_rollouts.py URL`` prints what a trainer gets of the example."""

import asyncio
import json
import os
import socket
import sys
import threading
from contextlib import suppress
from typing import Any

import uvicorn
from agent_lightning_agent import Keypad
from agentlightning.client import AgentLightningAsyncClient
from agentlightning.controller.local_reconciler import LocalReconciler
from agentlightning.server.app import create_app
from agentlightning.verl.agl_rollout_manager import AglRolloutManager, CompletedRollout
from omegaconf import OmegaConf

from aenv import AEnvError
from aenv.integrations.agent_lightning import VARIABLE
from aenv.rl import Episode, Rules
from aenv.rl.playing import Agent

KEY, MODEL = "key-of-a-test", "stand-in"


class Lossy(Keypad):
    """Some of whose episodes lose their instance when the model has first spoken."""

    def agent(self, base_url: str, key: str) -> Agent:
        play, lost = super().agent(base_url, key), int(os.environ["LOST"])
        say = Episode.say

        async def lossy(env: Episode, *args: Any, **options: Any) -> Any:
            nonlocal lost
            heard = await say(env, *args, **options)
            if lost:
                lost -= 1
                with suppress(AEnvError):
                    await env.exec("kill -9 $PPID")
            return heard

        Episode.say = lossy  # type: ignore[method-assign]
        return play


class Anew(Lossy):
    """They are begun again."""

    rules = Rules()


class Failing(Lossy):
    """They have failed."""

    rules = Rules(retries=0)


def told(of: CompletedRollout) -> dict[str, Any]:
    """What is trained on, and how the rollout ended."""
    rows = [(row.prompt["token_ids"], row.response["token_ids"], row.response["log_probs"]) for row in of.triplets]
    return {"state": of.rollout_state, "reward": of.final_reward, "rows": rows}


def played(url: str, model: str, agent: str, lost: list[int]) -> list[dict[str, Any]]:
    env_map = {VARIABLE: "input.task", "LOST": "input.lost"}
    options = {"local_agent_class": agent, "local_env_map": env_map, "poll_interval_seconds": 0.1}
    manager = AglRolloutManager(agl_base_url=url, agl_key=KEY, model=MODEL, step=0, **options)
    manager.register_model([model])
    task = {"instruction": "Press the key that is shown.", "reset": {"digit": 3}, "seed": 7}
    data = {"task": [task] * len(lost), "lost": [str(times) for times in lost]}
    found = manager.enqueue_and_wait_until_completed(data, is_train=True)
    return [told(one) for one in sorted(found, key=lambda one: one.sample_idx_in_step)]


async def main(model: str) -> dict[str, Any]:
    sampling = {"model_name": MODEL, "train": {"temperature": 1}, "val": {"temperature": 0}}
    app = create_app({"key": KEY, "default_proxy": sampling})
    with socket.create_server(("127.0.0.1", 0)) as listening:
        server = uvicorn.Server(uvicorn.Config(app, log_level="warning"))
        threading.Thread(target=server.run, args=([listening],), daemon=True).start()
        url = "http://127.0.0.1:{1}".format(*listening.getsockname())
        local = {"maximum_size": 2, "poll_interval": 0.1}
        config = {"runner_type": "local", "agl_server": {"url": url, "key": KEY}, "local_runner": local}
        async with AgentLightningAsyncClient(base_url=url, key=KEY) as api:
            controller = LocalReconciler(api, OmegaConf.create(config))
            running = asyncio.create_task(controller.run())
            found = {
                "whole": await asyncio.to_thread(played, url, model, "agent_lightning_agent:Keypad", [0, 0]),
                "anew": await asyncio.to_thread(played, url, model, "agentlightning_rollouts:Anew", [1, 0]),
                "failing": await asyncio.to_thread(played, url, model, "agentlightning_rollouts:Failing", [1, 0, 1]),
            }
            controller.stop()
            await running
        server.should_exit = True
    return found


if __name__ == "__main__":
    os.environ["PYTHONPATH"] = os.pathsep.join([*sys.path[:1], os.getcwd()])
    print(json.dumps(asyncio.run(main(sys.argv[1]))))
