"""OpenEnv's own client plays an episode in an instance: it lists the tools, reads the display, and presses the key."""

import asyncio

from aenv import Environment
from aenv.integrations.openenv import playing


async def main() -> None:
    async with Environment("keypad") as env, playing(env) as client:
        listed = await client.step({"type": "list_tools"})
        print("tools:", *(tool["name"] for tool in listed.observation["tools"]))
        begun = await client.reset(seed=1)
        print(begun.observation["result"])
        key = int(begun.observation["result"].rstrip(".").split()[-1])
        pressed = await client.step({"type": "call_tool", "tool_name": "press", "arguments": {"key": key}})
        print(pressed.observation["result"]["data"])
        ended = await client.step({"type": "call_tool", "tool_name": "finish"})
        print("reward:", ended.reward, "done:", ended.done)


asyncio.run(main())
