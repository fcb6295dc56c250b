"""Late imports of the runtime's own, which find nothing in the project.

Its folder comes first in ``sys.path``, and what runs in a sandbox may write there: a file that a tool was told to call
``pydantic.py`` would be taken for the library, and be run by the runtime itself.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from types import ModuleType

_left_out: set[str] = set()


def leave_out(*places: Path) -> None:
    """From now on, late imports look into none of these entries of ``sys.path``."""
    _left_out.update(map(os.path.realpath, places))


def take_back(*places: Path) -> None:
    """Undo ``leave_out``."""
    _left_out.difference_update(map(os.path.realpath, places))


@contextmanager
def imports() -> Iterator[None]:
    """A block that imports. What other threads import meanwhile is found as ever, so ``sys.path`` stays as it is."""
    if _finder not in sys.meta_path:  # and there it stays: who goes through a list that gets shorter misses an entry
        sys.meta_path.insert(0, _finder)
    before = _finder.path
    _finder.path = [entry for entry in sys.path if entry and os.path.realpath(entry) not in _left_out]
    try:
        yield
    finally:
        _finder.path = before


class _Finder(threading.local):
    """Asks the other finders, and the one that goes through ``sys.path`` for a part of it."""

    path: list[str] | None = None
    """Where this thread looks; None outside of such a block."""

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None, /
    ) -> ModuleSpec | None:
        if self.path is None or path is not None:  # a package knows where its modules are
            return None
        for finder in sys.meta_path:
            if finder is not self:
                found = finder.find_spec(name, self.path if finder is PathFinder else None, target)
                if found is not None:
                    return found
        raise ModuleNotFoundError(f"No module named {name!r}", name=name)  # None would let the next one look everywhere


_finder = _Finder()
