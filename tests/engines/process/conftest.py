"""What the tests of the process engine share."""

from __future__ import annotations

import functools
import shutil
import tempfile
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from aenv.engines.process.engine import ProcessEngine
from tests.engines.process import lab

_mode = functools.cache(lab.isolation_or_skip)


@pytest.fixture(scope="session")
def pen() -> Iterator[lab.Pen]:
    """Control groups of this test process."""
    found = lab.Pen()
    found.enter()
    yield found
    found.leave()


@pytest.fixture
def home(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Where engines keep their state: a short path, since sockets are below it."""
    path = Path(tempfile.mkdtemp(prefix="aeflt-", dir="/tmp"))
    path.chmod(0o755)
    monkeypatch.setenv("AENV_HOME", str(path))
    monkeypatch.setenv("AENV_SPARE", "0")  # so that processes can be counted; test_cells.py has spares
    yield path
    shutil.rmtree(path, ignore_errors=True)


@pytest.fixture
async def leftovers(pen: lab.Pen, home: Path) -> AsyncIterator[lab.Leftovers]:
    """Counts processes, mounts, control groups, files and descriptors; none may be left when the test is over."""
    found = lab.Leftovers(pen, home)
    yield found
    await found.finish()


@pytest.fixture
def family(home: Path) -> lab.Family:
    return lab.Family(home)


@pytest.fixture(params=["auto", "none"])
def isolation(request: pytest.FixtureRequest) -> str:
    return _mode(request.param)


@pytest.fixture
def jailed() -> str:
    """Isolation with everything; skips where that is not to be had."""
    return _mode("auto")


@pytest.fixture
async def engine(isolation: str, leftovers: lab.Leftovers) -> AsyncIterator[ProcessEngine]:
    async with ProcessEngine(isolation=isolation) as made:
        yield made


@pytest.fixture
async def jail(jailed: str, leftovers: lab.Leftovers) -> AsyncIterator[ProcessEngine]:
    """An engine with every isolation."""
    async with ProcessEngine(isolation=jailed) as made:
        yield made


@pytest.fixture
def study(isolation: str, tmp_path: Path, leftovers: lab.Leftovers) -> Iterator[lab.Study]:
    found = lab.Study(tmp_path, isolation)
    yield found
    found.close()


@pytest.fixture
def jailed_study(jailed: str, tmp_path: Path, leftovers: lab.Leftovers) -> Iterator[lab.Study]:
    found = lab.Study(tmp_path, jailed)
    yield found
    found.close()
