"""Every test here runs on both event loops that a gateway may run on; and the sandbox that several share."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator

import pytest
import uvloop

from aenv.runtime import tokens
from tests.api.gateway.support import OWNER_TOKEN, Known, place
from tests.support import FIXTURES, Sandbox, sandbox


@pytest.hookimpl(optionalhook=True)
def pytest_asyncio_loop_factories() -> dict[str, Callable[[], asyncio.AbstractEventLoop]]:
    return {"asyncio": asyncio.new_event_loop, "uvloop": uvloop.new_event_loop}


@pytest.fixture(scope="module")
def lab() -> Iterator[Sandbox]:
    """A sandbox with an owner, shared by a module's tests."""
    with sandbox(FIXTURES / "lab", variables={"AENV_OWNER_TOKEN_SHA256": tokens.digest(OWNER_TOKEN)}) as running:
        yield running


@pytest.fixture
def directory(lab: Sandbox) -> Known:
    return Known(place(lab.url))
