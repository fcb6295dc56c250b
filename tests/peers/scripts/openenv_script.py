"""OpenEnv itself, with instances of ours and as one: ``openenv_script.py api URL``, ``lost URL`` and ``server``."""

import json
import os
import sys
from typing import Any

from openenv import GenericEnvClient
from openenv.core.env_server import Action, Environment, Observation, State, create_app
from openenv.core.mcp_client import MCPToolClient
from pydantic import Field

PRESS = {"type": "call_tool", "tool_name": "press", "arguments": {"key": 3}}


def api(url: str) -> dict[str, Any]:
    """An episode through each of its clients; what a second session gets, and what a new one finds."""
    found: dict[str, Any] = {}
    with GenericEnvClient(base_url=url).sync() as env:
        env.reset(digit=3, episode_id="first")
        pressed = env.step(PRESS)
        found["pressed"] = pressed.observation["result"]["data"]
        with GenericEnvClient(base_url=url).sync() as second:
            try:
                second.reset()
            except RuntimeError as exc:
                found["second"] = str(exc)
        try:
            env.reset(seed="x")
        except RuntimeError as exc:
            found["refused"] = str(exc)
        found["state"] = env.state()
        ended = env.step({"tool_name": "finish"})
        found["ended"] = [ended.reward, ended.done]
    with GenericEnvClient(base_url=url).sync() as env:
        found["again"] = env.reset(digit=2).observation["result"]
    with MCPToolClient(base_url=url).sync() as tools:
        found["tools"] = [tool.name for tool in tools.list_tools()]
        tools.reset(digit=3)
        found["called"] = [tools.call_tool("press", key=3), tools.call_tool("finish"), tools.state().step_count]
    return found


def lost(url: str) -> dict[str, Any]:
    """What of an instance that dies in the middle of an episode reaches the client."""
    rewards = []
    with GenericEnvClient(base_url=url, message_timeout_s=20).sync() as env:
        env.reset(digit=3)
        rewards.append(env.step(PRESS).reward)
        os.kill(int(sys.argv[3]), 9)
        try:
            rewards.append(env.step({"tool_name": "finish"}).reward)
        except Exception as exc:
            return {"rewards": rewards, "raised": type(exc).__name__}
    return {"rewards": rewards}


class Guess(Action):
    number: int


class Told(Observation):
    said: str = Field(default="")


class Guessing(Environment):
    """Guess a number: a server of OpenEnv's own kind."""

    def __init__(self) -> None:
        super().__init__()
        self._state = State(episode_id="", step_count=0)
        self._number = 0

    def reset(self, seed: int | None = None, episode_id: str | None = None, **_: Any) -> Told:
        self._number = (seed or 0) % 10
        self._state = State(episode_id=episode_id or "", step_count=0)
        return Told(said="guess", reward=None, done=False)

    def step(self, action: Guess, timeout_s: float | None = None, **_: Any) -> Told:
        self._state.step_count += 1
        if action.number < 0:
            raise ValueError("no number")
        right = action.number == self._number
        return Told(said="right" if right else "wrong", reward=1.0 if right else -0.25, done=right)

    @property
    def state(self) -> State:
        return self._state


def server() -> None:
    """Serve it, on a port that is told."""
    import uvicorn

    app = create_app(Guessing, Guess, Told, env_name="guessing")
    config = uvicorn.Config(app, host="127.0.0.1", port=0, log_level="warning")
    sock = config.bind_socket()
    print(f"http://127.0.0.1:{sock.getsockname()[1]}", flush=True)
    uvicorn.Server(config).run([sock])


if __name__ == "__main__":
    if sys.argv[1] == "server":
        server()
    else:
        print(json.dumps({"api": api, "lost": lost}[sys.argv[1]](sys.argv[2])))
