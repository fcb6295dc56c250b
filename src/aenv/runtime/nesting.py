"""How deep calls are nested: the code of a sandbox calls another sandbox, whose code calls another one, and so on.

Two agents that ask each other for ever would make sandboxes until nothing is left to make them of.
"""

from __future__ import annotations

from contextvars import ContextVar

from aenv.errors import Conflict

HEADER = b"aenv-depth"
MOST = 16

_depth: ContextVar[int | None] = ContextVar("depth", default=None)
"""Of the call that runs; None outside of sandboxes."""


def enter(given: bytes | None) -> None:
    """A call begins, with the depth that its caller says. ``Conflict`` where that is too deep."""
    depth = int(given) if given is not None and given.isdigit() and len(given) < 9 else 0
    if depth > MOST:
        raise Conflict(f"calls of sandboxes that call sandboxes are over {MOST} deep", hint="do they call each other?")
    _depth.set(depth)


def header() -> bytes:
    """The line that goes with a call to another sandbox."""
    depth = _depth.get()
    return b"" if depth is None else b"AEnv-Depth: %d\r\n" % (depth + 1)
