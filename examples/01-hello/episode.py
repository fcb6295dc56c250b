"""Two episodes of a scripted agent on the island. Run it here: python episode.py

Nothing needs to be started: Environment("hello") runs the project in the current directory.
"""

import asyncio
import time
from typing import Any

from aenv import Environment

Square = tuple[int, int]
started = time.perf_counter()


def show(what: str, answer: object) -> None:
    """One line: the seconds since the beginning, what was done, what came back."""
    print(f"{time.perf_counter() - started:6.3f} s  {what:<16}  {answer}")


async def call(env: Environment, tool: str, **arguments: Any) -> dict[str, Any] | None:
    """Call a tool as a model would. A tool that fails is an observation; a sandbox that fails raises."""
    result = await env.call_tool(tool, arguments)
    shown = ", ".join(map(str, arguments.values()))
    if result.is_error:
        show(f"{tool}({shown})", f"tool error: {result.text}")
        return None
    show(f"{tool}({shown})", ", ".join(f"{key} {value}" for key, value in result.structured.items()))
    return result.structured


async def episode(env: Environment, seed: int) -> float:
    """Dig until the treasure is found: each time in the middle of the squares that fit every clue so far."""
    first = await env.reset(seed=seed)
    show(f"reset, seed {seed}", f"an island of {first['rows']} x {first['columns']}, {first['digs_left']} digs")
    clue = await call(env, "survey")
    middle = first["rows"] // 2
    half = range(middle) if clue and clue["half"] == "north" else range(middle, first["rows"])
    squares: list[Square] = [(row, column) for row in half for column in range(first["columns"])]
    while squares:
        row, column = squares[len(squares) // 2]
        clue = await call(env, "dig", row=row, column=column)
        if clue is None or clue["found"]:
            break
        squares = [(r, c) for r, c in squares if abs(r - row) + abs(c - column) == clue["distance"]]
    reward = await env.call_reward()
    show("reward", f"{reward['score']}: {'; '.join(reward['reasons'])}")
    return float(reward["score"])


async def main() -> None:
    async with Environment("hello") as env:
        info = await env.get_env_info()
        show("start", f"{info['name']} {info['version']}, in a sandbox of its own: {env.instance_id}")
        for tool in await env.list_tools():
            show("tool", f"{tool['name']}: {tool['description'].split('. ')[0].rstrip('.')}")
        await call(env, "dig", row=99, column=0)  # a mistake: a model reads what was wrong, and goes on
        scores = []
        for seed in (7, 8):
            print()
            scores.append(await episode(env, seed))
        health = await env.check_health()
    print()
    show("end", f"the sandbox was {health['status']} to the last, and is gone")
    print(f"\n{len(scores)} episodes, mean score {sum(scores) / len(scores):.3f}")


asyncio.run(main())
