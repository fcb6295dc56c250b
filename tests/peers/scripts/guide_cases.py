"""The agents of a guide in every case that its page speaks of: ``guide_cases.py NAME``, in a copy of the keypad with
the page's programs ``by_url.py`` and ``play.py``. A scripted server stands in for the model. Prints what came of it."""

from __future__ import annotations

import asyncio
import copy
import importlib
import io
import json
import os
import sys
from collections.abc import Sequence
from contextlib import redirect_stdout
from typing import Any

from tests.rl import standin
from tests.rl.standin import USAGE, calling, calling_all, saying

from aenv import AEnvError, Environment
from aenv.client.local import embedded
from aenv.rl import Rules, Task, rollout

NAME = sys.argv[1]
PAGE = "as on the page"
PRESS = calling("press", '{"key": 3}', id="c3")
DONE = calling("final_answer", '{"answer": "Done."}', id="end") if NAME == "smolagents" else saying("Done.")
LEFT_OUT = '{"text": "it", "times": null, "tags": null}' if NAME == "crewai" else '{"text": "it"}'
SCRIPTS: dict[str, Sequence[Any]] = {
    PAGE: [PRESS, DONE],
    "wrong": [
        calling("press", '{"key": "three"}', id="c1"),
        calling("jump", "{}", id="c2"),
        calling("press", '{"key": 9}', id="c9"),
        PRESS,
        DONE,
    ],
    "no JSON": [calling("press", '{"key": ', id="c1"), PRESS, DONE],
    "twice": [PRESS, calling("press", '{"key": 3}', id="c4"), DONE],
    "together": [calling_all(("press", '{"key": 3}'), ("press", '{"key": 4}')), DONE],
    "crash": [calling("crash"), PRESS, DONE],
    "crash beside others": [calling_all(("crash", "{}"), ("press", '{"key": 3}'), ("crash", "{}")), PRESS, DONE],
    "left out": [calling("note", LEFT_OUT), DONE],
    "wait": [calling("wait"), PRESS, DONE],
}
"""What the model says, by its instruction."""
asked: dict[str, list[dict[str, Any]]] = {name: [] for name in SCRIPTS}


def choose(body: dict[str, Any]) -> Any:
    told = json.dumps(body["messages"])
    case = next((name for name in SCRIPTS if f"Case {name}." in told), PAGE)
    asked[case].append(body)
    answer = copy.deepcopy(SCRIPTS[case][min(len(asked[case]), len(SCRIPTS[case])) - 1])
    offered = [tool["function"]["name"] for tool in body.get("tools", ())]
    for call in answer["choices"][0]["message"].get("tool_calls") or ():
        name = call["function"]["name"]  # frameworks have prefixes of their own
        call["function"]["name"] = next((tool for tool in offered if tool.endswith(name)), name)
    return answer | {"usage": USAGE | {"total_tokens": sum(USAGE.values())}}


async def played(play: Any, case: str, **rules: Any) -> dict[str, Any]:
    """A rollout with that instruction."""
    task = {"instruction": f"Case {case}.", "reset": {"digit": 3}}
    found = await rollout("keypad", play, task, rules=Rules(retries=0, **rules))
    answers = [[call.name, call.arguments, call.result and call.result.is_error] for call in found.calls]
    return {
        "reward": found.reward if found.failure is None else None,
        "answer": found.answer,
        "ended": found.ended,
        "failure": found.failure and [found.failure.kind, found.failure.phase],
        "calls": answers,
        "turns": len(found.turns),
        "said": [message for message in found.messages if message["role"] == "assistant"],
        "heard": [message for message in found.messages if message["role"] != "assistant"],
        "roles": [message["role"] for message in found.messages],
        "asked": len(asked[case]),
    }


def of_team(model: Any) -> Any:
    """Two agents of autogen that speak in turn."""
    from autogen_agentchat.agents import AssistantAgent
    from autogen_agentchat.teams import RoundRobinGroupChat

    from aenv.integrations.autogen import AutogenTools

    async def play(env: Environment, task: Task) -> None:
        async with AutogenTools(env) as tools:
            told = {"workbench": tools.workbench, "max_tool_iterations": 8}
            players = [AssistantAgent(name, model, model_context=tools.context(), **told) for name in ("one", "other")]
            await RoundRobinGroupChat(players, max_turns=2).run(task=task.instruction)

    return play


async def crashed(play: Any) -> list[Any]:
    """What an agent raises that is in no rollout, and how often its model was asked."""
    asked["crash"].clear()
    try:
        async with Environment("keypad") as env:
            await play(env, Task(instruction="Case crash."))
    except AEnvError as exc:
        return [exc.code, len(asked["crash"])]
    return ["nothing was raised"]


async def cancelled(play: Any) -> list[Any]:
    """What comes of an agent that is cancelled in a call."""
    async with Environment("keypad") as env:
        running = asyncio.create_task(play(env, Task(instruction="Case wait.")))
        while not env.journal.under_way:
            assert not running.done(), running
            await asyncio.sleep(0.01)
        running.cancel()
        await asyncio.wait((running,))
    return ["cancelled" if running.cancelled() else repr(running.exception())]


async def main() -> dict[str, Any]:
    async with standin.model() as server:
        server.choose = choose  # type: ignore[method-assign]
        os.environ["MODEL_URL"] = server.url
        by_url, page = importlib.import_module("by_url"), importlib.import_module("play")
        if NAME == "google-adk":
            from guide_adk_model import Scripted

            by_url.MODEL = page.MODEL = Scripted(model="qwen3", url=server.url)
        found: dict[str, Any] = {}
        for name, program in (("by_url", by_url), ("page", page)):
            with redirect_stdout(io.StringIO()) as printed:
                await program.main()
            found[name] = printed.getvalue().splitlines()[-1]
            asked[PAGE].clear()
        found["whole"] = await played(page.play, PAGE)
        for case in ("wrong", "no JSON", "twice", "together", "crash", "crash beside others", "left out"):
            found[case] = await played(page.play, case)
        offered = [tool["function"] for tool in asked["left out"][0]["tools"]]
        found["offered"] = {tool["name"]: tool["parameters"] for tool in offered}
        asked[PAGE].clear()
        found["one turn"] = await played(page.play, PAGE, max_turns=1)
        if NAME == "autogen":
            asked["crash"].clear()
            asked[PAGE].clear()
            found["team crash"] = await played(of_team(page.MODEL), "crash")
            found["team one turn"] = await played(of_team(page.MODEL), PAGE, max_turns=1)
        found["alone"] = await crashed(page.play)
        found["cancelled"] = await cancelled(page.play)
        left = await embedded._engine().find()
        found["left"] = [sandbox.id for sandbox in left if not sandbox.state.over]
        await asyncio.get_running_loop().shutdown_default_executor()  # which waits for agents in threads
        found["cancelled"].append(len(asked["wait"]))
    return found


if __name__ == "__main__":
    print(json.dumps(asyncio.run(main())))
