# ruff: noqa
# fmt: off
from aenv import Environment

# Create environment instance
env = Environment(
    env_name="my-env",
    ttl="1h",
    environment_variables={"DEBUG": "true"}
)

async def main():  # ours
    # Initialize environment (create container)
    await env.initialize()

    print((await env.call_tool("given")).structured["variables"])  # ours

    # Release resources after use
    await env.release()

import asyncio  # ours
asyncio.run(main())  # ours
