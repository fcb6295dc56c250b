"""The SDK in the wild on a platform of ours: its address, a token and an environment are the arguments."""

import asyncio
import json
import os
import sys

address, token, name = sys.argv[1:]
os.environ["AENV_SYSTEM_URL"] = address

from aenv.client.scheduler_client import AEnvSchedulerClient  # noqa: E402
from cli.client.aenv_hub_client import AEnvHubClient  # noqa: E402

from aenv import Environment  # noqa: E402


async def episode():
    env = Environment(name, api_key=token, timeout=30.0, ttl="10m", labels={"suite": "wild"})
    await env.initialize()
    try:
        tools = await env.list_tools()
        result = await env.call_tool(tools[0]["name"], {"word": "lemon"})
        failed = await env.call_tool("guess", {"word": ""})
        async with AEnvSchedulerClient(f"{address}:8080", api_key=token) as control:
            found = await control.get_env_instance(env._instance.id)
        return {
            "tools": [tool["name"] for tool in tools],
            "content": result.content,
            "is_error": result.is_error,
            "failed": failed.is_error,
            "reward": await env.call_reward({}),
            "function": await env.call_function("hint", {"letter": 1}),
            "functions": await env.list_functions(),
            "health": await env.check_health({}),
            "status": found.status,
            "env": f"{found.env.name}@{found.env.version}",
            "labels": found.labels,
            "id": found.id,
        }
    finally:
        await env.release()


def hub():
    client = AEnvHubClient(f"{address}:8080", api_key=token)
    given = {
        "name": "from-the-wild",
        "version": "0.0.1",
        "tags": ["swe", "linux"],
        "buildConfig": {"dockerfile": "./Dockerfile"},
        "testConfig": {"script": "pytest"},
        "deployConfig": {"cpu": "1", "memory": "2Gi", "os": "linux"},
        "status": "Ready",
        "codeUrl": "",
    }
    made = client.create_environment(given)
    client.update_environment({**given, "description": "changed"})
    return {
        "made": made["name"],
        "exists": client.check_env("from-the-wild", "0.0.1"),
        "missing": client.check_env("from-the-wild", "9.9.9"),
        "listed": "from-the-wild" in [env["name"] for env in client.list_environments()],
        "got": client.get_environment("from-the-wild", "0.0.1"),
        "status": client.state_environment("from-the-wild", "0.0.1"),
    }


print(json.dumps({"episode": asyncio.run(episode()), "hub": hub()}))
