"""A server that makes and ends instances until it is killed: ``python -m tests.api.crowded STORE HOME``."""

import asyncio
import random
import sys
from pathlib import Path

from aenv.engines.failing import SlowEngine
from aenv.errors import AEnvError
from aenv.wire import InstanceRequest, QuotaRequest
from tests.api.ground import ADMIN, ALICE, BOB, PaperShelf, service


async def main(url: str, home: Path) -> None:
    shelf = PaperShelf()
    shelf.on_paper("env", ttl="600s")
    async with service(url, SlowEngine(create=0.01), shelf, home) as platform:
        await platform.instances.quotas.set("platform", QuotaRequest(instances=10), 0.0)
        ids: list[str] = []

        async def work(number: int) -> None:
            request = InstanceRequest(
                env_name="env",
                count=random.choice([None, 2]),
                labels={"experiment": str(number % 3)},
            )
            while True:
                try:
                    made = await platform.instances.create(random.choice([ALICE, BOB]), request)
                    ids.extend(each.id for each in made)
                except AEnvError:
                    pass
                await asyncio.sleep(0.01)
                if len(ids) > 30:
                    await platform.instances.delete(ADMIN, ids.pop(random.randrange(len(ids))))
                if len(ids) > 30:
                    print("crowded", flush=True)

        await asyncio.gather(*(work(number) for number in range(8)))


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], Path(sys.argv[2])))
