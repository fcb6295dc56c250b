from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.web.shop import Server, opened


@pytest.fixture(scope="module")
def shared() -> Iterator[Server]:
    """One shop for a module's tests that leave nothing behind."""
    with opened() as server:
        yield server


@pytest.fixture
def server() -> Iterator[Server]:
    """A shop of the test's own."""
    with opened() as server:
        yield server
