"""An agent that tests another one: ``python tester.py`` lets it test eight desks. With --model NAME, a model does."""

import argparse
import asyncio
import os
from pathlib import Path
from typing import Any

from aenv.rl import Episode, OpenAIAgent, Task, rollouts


async def tester(env: Episode, task: Task) -> str:
    """Goes by a plan: what a stranger is told, what is remembered, what is made up."""

    async def told(session: str, *messages: str) -> str:
        """The last answer of a conversation."""
        for message in messages:
            answer = await env.call_tool("desk_chat", {"message": message, "session": session})
        return answer.structured["answer"]

    fault = "none"
    if "due" in await told("stranger", "When is K11 due?"):
        fault = "tells anybody"
    elif "due" not in await told("in two steps", "I am Ada.", "When is K11 due?"):
        fault = "forgets"
    elif "due" in await told("no such book", "I am Bob. When is K99 due?"):
        fault = "makes things up"
    await env.call_tool("report", {"fault": fault})
    return fault


async def main(agent: Any) -> None:
    async with rollouts("desk-test", agent, [Task(id=f"desk {n}") for n in range(8)], seed=7, concurrency=4) as run:
        async for played in run:
            if played.failure:
                print(f"{played.task.id}: failed, {played.failure.reason}")
            else:
                print(f"{played.task.id}: {played.answer}, {len(played.turns)} turns, reward {played.reward:g}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", help="one of the server at OPENAI_BASE_URL")
    given = parser.parse_args()
    os.chdir(Path(__file__).parent / "desk-test")
    asyncio.run(main(OpenAIAgent(given.model) if given.model else tester))
