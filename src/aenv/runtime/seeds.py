"""The instance's seed, for author code that does not ask ``Context`` for it: the generators that everybody shares.

Python's ``random`` and NumPy's global generator are seeded, and torch's where it is imported. Nothing is imported for
it: a NumPy that comes later is seeded when it comes.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Sequence
from importlib import import_module
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

from msgspec import Struct

from aenv.errors import Invalid

_NUMPY = "numpy.random.mtrand"
"""The module that has NumPy's global generator. NumPy itself may be imported without it."""


def plant(seed: int | None) -> None:
    """Seed what draws in this process. Without a seed, nothing is changed."""
    if seed is None:
        return
    random.seed(seed % 2**64)  # it would take a number and its negative for the same
    torch = sys.modules.get("torch")
    if torch is not None and hasattr(torch, "manual_seed"):
        torch.manual_seed(seed % 2**64)
    _plant_numpy(seed)


class Drawn(Struct, frozen=True, kw_only=True):
    """How far the generators have come."""

    python: tuple[int, tuple[int, ...], float | None]
    numpy: tuple[str, list[int], int, int, float] | None = None
    torch: list[int] | None = None
    """None for both where they are not imported."""
    late: int | None = None
    """The seed of a NumPy that is imported later."""


def drawn() -> Drawn:
    """How far the generators of this process have come."""
    numpy, torch = sys.modules.get(_NUMPY), sys.modules.get("torch")
    there = None
    if numpy is not None and hasattr(numpy, "get_state"):
        kind, key, *rest = numpy.get_state()
        there = (kind, key.tolist(), *rest)
    return Drawn(
        python=random.getstate(),
        numpy=there,
        torch=torch.get_rng_state().tolist() if torch is not None and hasattr(torch, "get_rng_state") else None,
        late=_finder.seed if _finder in sys.meta_path else None,
    )


def go_on(found: Drawn) -> None:
    """Let the generators of this process go on from there."""
    try:
        random.setstate(found.python)
        if found.numpy is not None:
            import_module(_NUMPY).set_state(found.numpy)
        elif found.late is not None:
            _plant_numpy(found.late)
        if found.torch is not None:
            torch = import_module("torch")
            torch.set_rng_state(torch.tensor(found.torch, dtype=torch.uint8))
    except Exception as exc:  # each looks at what it is given in its own way
        raise Invalid(f"the generators cannot go on from there: {type(exc).__name__}: {exc}") from exc


def _plant_numpy(seed: int) -> None:
    """Seed it, now or when it comes."""
    numpy = sys.modules.get(_NUMPY)
    if numpy is not None and hasattr(numpy, "seed"):
        _seed_numpy(numpy, seed)
        return
    _finder.seed = seed
    if _finder not in sys.meta_path:
        sys.meta_path.insert(0, _finder)


def _seed_numpy(module: Any, seed: int) -> None:
    module.seed(seed % 2**32)  # it takes no more


class _Finder:
    """Waits for NumPy's generator to be imported, seeds it, and leaves."""

    seed = 0

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None, /
    ) -> ModuleSpec | None:
        if name != _NUMPY:
            return None
        found = (finder.find_spec(name, path, target) for finder in sys.meta_path if finder is not self)
        spec = next(filter(None, found), None)
        if spec is not None and spec.loader is not None:
            self._watch(spec.loader)
        return spec

    def _watch(self, loader: Any) -> None:
        execute = loader.exec_module

        def exec_module(module: ModuleType) -> None:
            del loader.exec_module
            execute(module)
            _seed_numpy(module, self.seed)
            # Another list, since others may go through this one: who does so while it gets shorter misses an entry.
            sys.meta_path = [finder for finder in sys.meta_path if finder is not self]

        loader.exec_module = exec_module


_finder = _Finder()
