"""Agents of a framework in instances, as its guide has them: ``agent_loops.py``, in a folder with its programs.

The model is a small server in this process, which says what an episode is about.
"""

import asyncio
import contextlib
import importlib
import io
import json
import logging
import os
import runpy
import warnings
from pathlib import Path
from typing import Any

from tests.rl.standin import HANG, Model, calling, calling_all, model, saying

from aenv import AEnvError, Environment
from aenv.integrations.checking import LOOK, LOSE, TASK, WRITE
from aenv.models import Sandbox
from aenv.rl import Episode, Rules, Task, Trajectory, rollout

os.environ |= {"OPENAI_API_KEY": "none", "ANTHROPIC_API_KEY": "none", "OPENAI_AGENTS_DISABLE_TRACING": "1"}
warnings.simplefilter("ignore")
logging.disable()
USED: list[Sandbox] = []
"""Every instance that an agent had."""
EPISODES: list[Episode] = []
WHOLE = {"id": "x", "created": 0, "usage": {"prompt_tokens": 11, "completion_tokens": 7, "total_tokens": 18}}
"""What some clients miss in an answer that is shorter."""


def tool(call: dict[str, Any], id: str = "c1") -> Any:
    return calling(call["name"], json.dumps(call["arguments"]), id=id)


WRITES, LOSES, DONE = tool(WRITE, "w1"), tool(LOSE, "l1"), saying("Done.")
SLEEPS = calling("execute_command", '{"command": "sleep 500"}')
SCENES: dict[str, tuple[Any, ...]] = {
    "done": (WRITES, DONE),
    "nothing": (DONE,),
    "both": (calling_all(*((one["name"], json.dumps(one["arguments"])) for one in (WRITE, LOOK))), DONE),
    "no json": (calling("execute_command", '{"command": "', id="b1"), WRITES, DONE),
    "no object": (calling("execute_command", "[1]", id="b1"), WRITES, DONE),
    "wrong": (calling("execute_command", '{"command": ["no"]}', id="b1"), WRITES, DONE),
    "unknown": (calling("nothing", "{}", id="b1"), WRITES, DONE),
    "lost": (WRITES, LOSES, DONE),
}


class Speaker(Model):
    """Says what it is told in the words of whoever asks."""

    def choose(self, body: dict[str, Any]) -> Any:
        said = self.answers[min(len(self.asked), len(self.answers)) - 1]
        if said == HANG:
            return said
        return _anthropics(said) if b"/messages" in self.heads[-1].split(b"\r\n")[0] else {**said, **WHOLE}

    def start(self, *answers: Any) -> None:
        self.answers = list(answers)
        self.asked.clear()


def _anthropics(completion: dict[str, Any]) -> dict[str, Any]:
    (choice,) = completion["choices"]
    content = [{"type": "text", "text": text}] if (text := choice["message"]["content"]) else []
    for call in choice["message"].get("tool_calls", ()):
        try:
            given = json.loads(call["function"]["arguments"])
        except ValueError:
            given = call["function"]["arguments"]
        content.append({"type": "tool_use", "id": call["id"], "name": call["function"]["name"], "input": given})
    return {
        "id": "m1",
        "type": "message",
        "role": "assistant",
        "model": completion["model"],
        "content": content,
        "stop_reason": {"tool_calls": "tool_use", "stop": "end_turn"}[choice["finish_reason"]],
        "usage": {"input_tokens": 11, "output_tokens": 7},
    }


def program(name: str) -> dict[str, Any]:
    """One of the guide's programs."""
    path = Path(f"{name}.py")
    if "from agents import" in path.read_text():
        importlib.import_module("agents").set_default_openai_api("chat_completions")  # what the server speaks
    return runpy.run_path(str(path))


async def played(server: Speaker, play: Any, *answers: Any, turns: int | None = None) -> Trajectory:
    async def agent(env: Episode, task: Task) -> Any:
        assert env.sandbox is not None
        USED.append(env.sandbox)
        EPISODES.append(env)
        return await play(env, task)

    server.start(*answers)
    return await rollout("mini-terminal", agent, TASK, rules=Rules(max_turns=turns, retries=0))


def told(trajectory: Trajectory) -> dict[str, Any]:
    failed = trajectory.failure
    generations = [turn.generation for turn in trajectory.turns if turn.generation]
    return {
        "reward": trajectory.reward if trajectory.ok else None,
        "failed": failed and [failed.kind, failed.phase],
        "reason": failed and failed.reason,
        "ended": trajectory.ended,
        "answer": trajectory.answer,
        "messages": trajectory.messages,
        "tools": [one["function"]["name"] for one in trajectory.tools],
        "turns": [len(turn.calls) for turn in trajectory.turns],
        "calls": [
            [call.name, call.arguments, call.id, call.result and call.result.is_error] for call in trajectory.calls
        ],
        "generations": [[one.model, one.finish_reason, one.prompt_tokens] for one in generations],
    }


async def without_episode(server: Speaker, play: Any) -> str:
    """What comes out of a run whose instance is lost, where nobody writes anything down."""
    server.start(LOSES, DONE)
    async with Environment("mini-terminal") as env:
        assert env.sandbox is not None
        USED.append(env.sandbox)
        try:
            await play(env, TASK)
        except AEnvError as exc:
            return f"{exc.code} after {len(server.asked)}"
    return "nothing"


async def pictured(server: Speaker, play: Any) -> str:
    """What a model is given of a tool's answer that has a picture."""
    server.start(calling("picture"), DONE)
    async with Environment("pictures") as env:
        await play(env, TASK)
    return json.dumps(server.asked[-1]["messages"])


async def cancelled(server: Speaker, play: Any, *answers: Any) -> str:
    """What comes out of a run that is cancelled while its model thinks, or while a tool is under way."""
    server.hanging.clear()
    before = len(EPISODES)
    running = asyncio.create_task(played(server, play, *answers))
    if HANG in answers:
        await server.hanging.wait()
    while HANG not in answers and not (len(EPISODES) > before and EPISODES[-1].turns and EPISODES[-1].turns[-1].calls):
        await asyncio.sleep(0.01)
    running.cancel()
    (ended,) = await asyncio.gather(running, return_exceptions=True)
    return type(ended).__name__


async def printed(server: Speaker, name: str) -> str:
    """What one of the guide's programs prints."""
    server.start(WRITES, DONE)
    with contextlib.redirect_stdout(io.StringIO()) as found:
        await program(name)["main"]()
    return found.getvalue()


async def is_there(sandbox: Sandbox) -> bool:
    try:
        _, writer = await asyncio.open_unix_connection(sandbox.url.removeprefix("unix:"))
    except OSError:
        return False
    writer.close()
    return True


async def essential(server: Speaker, play: Any) -> dict[str, Any]:
    """An episode that goes well, and what is lost, with and without an episode."""
    found: dict[str, Any] = {scene: told(await played(server, play, *SCENES[scene])) for scene in ("done", "lost")}
    found["raised"] = await without_episode(server, play)
    return found


async def everything(server: Speaker, play: Any) -> dict[str, Any]:
    found: dict[str, Any] = {scene: told(await played(server, play, *answers)) for scene, answers in SCENES.items()}
    found["raised"] = await without_episode(server, play)
    found["pictured"] = await pictured(server, play)
    found["one turn"] = told(await played(server, play, WRITES, DONE, turns=1))
    found["cancelled"] = [await cancelled(server, play, HANG), await cancelled(server, play, SLEEPS)]
    return found


async def main() -> dict[str, Any]:
    async with Environment("mini-terminal") as env:  # what the process goes on to have, such as a spawner
        await env.list_tools()
    before = asyncio.all_tasks()
    async with model(kind=Speaker) as server:
        assert isinstance(server, Speaker)
        os.environ |= {"OPENAI_BASE_URL": server.url, "ANTHROPIC_BASE_URL": server.url.removesuffix("/v1")}
        found = {
            name: await (everything if name == "play" else essential)(server, play)
            for name, play in program("adapter").items()
            if name.startswith("play")
        }
        found["printed"] = {name: await printed(server, name) for name in ("by_url", "adapter")}
    found["left"] = sorted(repr(task) for task in asyncio.all_tasks() - before if task is not asyncio.current_task())
    found["instances"] = [len(USED), sum([await is_there(sandbox) for sandbox in USED])]
    return found


print(json.dumps(asyncio.run(main())))
