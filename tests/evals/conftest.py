"""What the tests of evaluations share."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.evals.bench import new_home


@pytest.fixture(scope="module")
def benchmark_home() -> Iterator[Path]:
    """A home with the benchmark, for the tests of a module."""
    with new_home() as found:
        yield found
