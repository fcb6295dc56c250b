"""Cells that stand still: the freezer of version 2 of control groups, beside whichever version has the limits.

Only that freezer will do. What it holds can be killed; what that of version 1 holds cannot, and would outlive a
spawner that is killed. Where limits are version 1's, a cell has a directory more, in version 2's own hierarchy. Its
processes are moved there when it is first to stand still: having each instance join it when it starts takes 10 ms of
every start, in which the kernel changes no other control group.
"""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path
from typing import Self

from aenv.engines.process import cgroups
from aenv.engines.process.cgroups import Tree, Version1

_FREEZE = "cgroup.freeze"
_JOIN = "cgroup.procs"
_ROUNDS = 4
"""Times to look for processes that are to be moved: each may have started others meanwhile."""


class Freezer:
    """The cells of one spawner that can be held."""

    def __init__(self, tree: Tree, apart: Path | None) -> None:
        """``apart``: the directory in which cells have one of their own, where the tree's are not version 2."""
        self._tree = tree
        self._apart = Version1({"unified": apart}) if apart is not None else None
        self._root = apart if apart is not None else tree.roots[""]

    @classmethod
    def make(cls, tree: Tree) -> Self:
        """The freezer for a spawner's tree; ``OSError`` says why this machine has none."""
        if tree.version == 2:
            made = cls(tree, None)
        else:
            apart = cgroups.unified(tree.roots["memory"].name)
            apart.mkdir(exist_ok=True)
            made = cls(tree, apart)
        if not (made._root / _FREEZE).exists():
            made.close()
            raise OSError("this kernel has no freezer in version 2 of control groups, which takes Linux 5.2")
        return made

    @property
    def roots(self) -> dict[str, str]:
        """What it has beside the tree, to be written down."""
        return {name: str(path) for name, path in self._apart.roots.items()} if self._apart is not None else {}

    def gather(self, leaf: str) -> bool:
        """Get hold of all processes of a cell; False when that cannot be done now."""
        if self._apart is None:
            return True
        place = self._root / leaf
        place.mkdir(exist_ok=True)
        for _ in range(_ROUNDS):
            held = self._apart.processes(leaf)
            found = self._tree.processes(leaf)
            if held == found:
                return True
            for pid in found - held:
                _move(pid, place)
            # An id that was given anew between two lines above is somebody else's, who is never to be held.
            for pid in held - found:
                if pid not in self._tree.processes(leaf):
                    _move(pid, self._root.parent)
        return False

    def hold(self, leaf: str) -> None:
        """Have it stand still. It does so in a moment."""
        (self._root / leaf / _FREEZE).write_text("1")

    def let_go(self, leaf: str) -> None:
        with suppress(OSError):
            (self._root / leaf / _FREEZE).write_text("0")

    def reclaim(self, leaf: str) -> None:
        self._tree.reclaim(leaf)

    def remove(self, leaf: str) -> None:
        """Forget a cell that is gone."""
        if self._apart is not None:
            self._apart.remove(leaf)

    def close(self) -> None:
        if self._apart is not None:
            cgroups.remove_soon(self._apart)


def missing() -> str:
    """Why sandboxes cannot stand still here; nothing when they can."""
    try:
        tree = cgroups.make(f"freezer-{os.getpid()}")
        try:
            Freezer.make(tree).close()
        finally:
            tree.remove()
    except OSError as exc:
        return exc.strerror or str(exc)
    return ""


def _move(pid: int, place: Path) -> None:
    with suppress(OSError):  # it has ended
        (place / _JOIN).write_text(str(pid))
