# ruff: noqa
# fmt: off
import asyncio
from aenv import Environment

async def recommended_usage():
    # Recommended: automatic initialization and destruction
    async with Environment("safe-env") as env:
        # Environment automatically initialized
        tools = await env.list_tools()
        # Execute tools
        result = await env.call_tool("python", {
            "code": "print('Hello from AEnvironment!')"
        })
        print(result.content)
    # Automatically destroys environment on exit

asyncio.run(recommended_usage())
