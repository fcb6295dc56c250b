# ruff: noqa
# fmt: off
import asyncio  # not in the document
from aenv import Environment

async def main():  # ours
    async with Environment("my-env") as env:
        # Environment instance is up and running
        tools = await env.list_tools()
    print([tool["name"] for tool in tools])  # ours

asyncio.run(main())  # ours
