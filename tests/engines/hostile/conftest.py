"""What the hostile tests share."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
import pytest_asyncio

from aenv.engines.process.engine import ProcessEngine
from tests.engines.hostile import ground
from tests.engines.hostile.loot import Loot, gather


@pytest.fixture(autouse=True, scope="session")
def strict_is_to_be_had() -> None:
    if why := ground.why_not():
        pytest.skip(why)


@pytest.fixture(scope="session")
def loot(strict_is_to_be_had: None, tmp_path_factory: pytest.TempPathFactory) -> Loot:
    """What the attacks that only look got, from each place."""
    return gather(tmp_path_factory.mktemp("hostile"))


@pytest.fixture(scope="module")
def home(strict_is_to_be_had: None) -> Iterator[Path]:
    with ground.own_home() as path, pytest.MonkeyPatch.context() as patch:
        patch.setenv("AENV_SPARE", "0")  # so that control groups can be counted; what was looted saw spares
        yield path


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def engine(home: Path) -> AsyncIterator[ProcessEngine]:
    """An engine under strict isolation that a module's tests share."""
    async with ground.strict_engine(home) as made:
        yield made
