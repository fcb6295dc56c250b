"""A server that dies when its engine is asked for the first instance: ``python -m tests.api.killed STORE HOME``."""

import asyncio
import os
import signal
import sys
from pathlib import Path

from aenv.engines.failing import PaperEngine
from aenv.models import Sandbox, SandboxSpec
from aenv.wire import InstanceRequest
from tests.api.ground import ALICE, PaperShelf, service


class Deadly(PaperEngine):
    async def create(self, id: str, spec: SandboxSpec) -> Sandbox:
        os.kill(os.getpid(), signal.SIGKILL)
        raise AssertionError


async def main(url: str, home: Path) -> None:
    shelf = PaperShelf()
    shelf.on_paper("env", ttl="90s")
    async with service(url, Deadly(), shelf, home) as platform:
        await platform.instances.create(ALICE, InstanceRequest(env_name="env"), key="k", wait=30)


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], Path(sys.argv[2])))
