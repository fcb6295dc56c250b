"""Fixtures that several test modules share."""

from __future__ import annotations

import signal
from collections.abc import Iterator

import hypothesis
import pytest

from tests.support import FIXTURES, Sandbox, sandbox

# A shell that runs the tests in the background has SIGINT ignored, and every process started here would inherit that.
signal.signal(signal.SIGINT, signal.default_int_handler)
hypothesis.settings.register_profile("untimed", deadline=None)  # a busy machine is not a failure
hypothesis.settings.load_profile("untimed")


@pytest.fixture(scope="module")
def lab() -> Iterator[Sandbox]:
    """A live sandbox of the fixture project, shared by a module's tests."""
    with sandbox(FIXTURES / "lab", arguments=["--verbose", "x"], variables={"AENV_SEED": "7"}) as running:
        yield running
