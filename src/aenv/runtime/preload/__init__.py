"""Whether a project may be imported once and then forked: watches the import, and says what speaks against it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from aenv.runtime.preload.watching import Verdict, Watch

__all__ = ["Verdict", "Watch", "watch"]


@contextmanager
def watch(source: Path) -> Iterator[Watch]:
    """Watch what is done inside the block, which is to import the modules in ``source``; then ask its ``verdict``."""
    watched = Watch(source)
    watched.begin()
    try:
        yield watched
    except BaseException as exc:
        watched.failed(exc)
        raise
    finally:
        watched.end()
