# ruff: noqa
# fmt: off
from aenv import Environment
import os

# Set AEnvironment system service endpoint
os.environ["AENV_SYSTEM_URL"] = "http://aenv-service/"
mini_terminal = Environment("mini-terminal@1.0.1", timeout=180)

async def main():  # ours
    print(await mini_terminal.initialize())
    await mini_terminal.release()

import asyncio  # ours
asyncio.run(main())  # ours
