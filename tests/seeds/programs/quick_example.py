# ruff: noqa
# fmt: off
import asyncio  # not in the document
from aenv import Environment, register_tool

# Define a tool
@register_tool
def search_code(query: str, max_results: int = 10) -> list:
    """Search code in the repository."""
    return [{"file": "main.py", "line": 42, "content": "..."}]

async def main():  # ours
    # Use the environment
    async with Environment("swe-env") as env:
        # List available tools
        tools = await env.list_tools()

        # Call a tool
        result = await env.call_tool("search_code", {"query": "bug fix"})
        print(result.content)

asyncio.run(main())  # ours
