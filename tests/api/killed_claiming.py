"""A server that dies when it has claimed a warm sandbox, and is about to tell it what it is:
``python -m tests.api.killed_claiming STORE HOME``."""

import asyncio
import os
import signal
import sys
from pathlib import Path
from typing import Any

from aenv.api import specialising
from aenv.engines.process.engine import ProcessEngine
from aenv.wire import InstanceRequest
from tests.api.ground import ALICE, Shelf, service, until
from tests.api.test_pools import KEYED, published


async def die(*arguments: Any, **options: Any) -> None:
    os.kill(os.getpid(), signal.SIGKILL)
    raise AssertionError


async def main(url: str, home: Path) -> None:
    shelf = Shelf()
    published(shelf, home)
    async with service(url, ProcessEngine(state="platform"), shelf, home) as platform:
        instances = platform.instances
        await instances.create(ALICE, InstanceRequest(env_name="shared"), wait=30)
        await until(lambda: any(pool.ready for pool in instances.pools.list()), "a warm sandbox", 60)
        specialising.become = die
        await instances.create(ALICE, KEYED, key="k", wait=30)


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], Path(sys.argv[2])))
