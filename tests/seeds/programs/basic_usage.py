# ruff: noqa
# fmt: off
import asyncio
from aenv import Environment

async def basic_example():
    # Create environment instance
    env = Environment("my-python-env")
    # Initialize environment
    await env.initialize()
    # Use environment
    tools = await env.list_tools()
    print(f"Available tools: {len(tools)}")
    # Destroy environment
    await env.destroy()

# Run example
asyncio.run(basic_example())
