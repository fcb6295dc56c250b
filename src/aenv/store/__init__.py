"""Where records are kept that outlive a process: in a file of this machine, or in a Redis that several share."""

from __future__ import annotations

from importlib import import_module

from aenv.errors import Invalid, did_you_mean
from aenv.store.base import Add, Change, Delete, Full, Page, Put, Record, Store

__all__ = ["Add", "Change", "Delete", "Full", "Page", "Put", "Record", "Store", "open_store"]

_STORES = {
    "sqlite": "aenv.store.sqlite",
    "redis": "aenv.store.redis",
    "rediss": "aenv.store.redis",
}
"""The module that opens what an address begins with."""


async def open_store(url: str) -> Store:
    """The store at ``sqlite:PATH`` or ``redis://[user:password@]host:port/db``; ``rediss`` is the same over TLS."""
    scheme, colon, _ = url.partition(":")
    if not colon:  # what it is may be a secret that was put in the wrong place
        raise Invalid("the store's address does not say which store", hint="use sqlite:PATH or redis://host:port/0")
    if scheme not in _STORES:
        raise Invalid(f"there is no store {scheme[:32]!r}", hint=did_you_mean(scheme[:32], _STORES))
    opened: Store = await import_module(_STORES[scheme]).open(url)
    return opened
