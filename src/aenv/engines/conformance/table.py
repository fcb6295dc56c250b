"""A row of the list: a check, what it promises in one sentence, and the power it needs."""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable
from typing import NamedTuple

from aenv.engines.conformance.bench import Bench


class Check(NamedTuple):
    """Something that every engine must do, or every engine that has a power."""

    name: str
    promise: str
    run: Callable[[Bench], Awaitable[None]]
    needs: str | None = None
    """The power without which there is nothing to check; None for the core."""


def check(run: Callable[[Bench], Awaitable[None]], needs: str | None = None) -> Check:
    """A row made from a function: its name, and its docstring as the promise."""
    promise = " ".join((inspect.getdoc(run) or "").split())
    return Check(run.__name__.replace("_", "-"), promise, run, needs)
