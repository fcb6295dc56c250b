"""One process that is sealed and waits to be told which sandbox it is, with all that was made for it."""

from __future__ import annotations

import asyncio
import select
import socket
from pathlib import Path
from typing import Any, NamedTuple, Self

from aenv.engines.process.gate import Gate
from aenv.engines.process.seconds import Second
from aenv.engines.process.wire import close_all, connect, words
from aenv.engines.process.zygotes import Zygote


class Shape(NamedTuple):
    """What a cell may use. Sandboxes of one shape and zygote can have the same cell."""

    cpu: float
    memory: int
    storage: int
    network: str
    """``none``, ``proxy`` or ``full``."""
    rests: bool = False
    """Whether it may stand still while nobody calls."""

    @classmethod
    def of(cls, spec: dict[str, Any], network: str, *, rests: bool = False) -> Self:
        return cls(spec["cpu"], spec["memory"], spec["storage"], network, rests)


class Cell:
    """One process with all that was made for it."""

    def __init__(self, zygote: Zygote, shape: Shape, number: int, slot: int, path: Path) -> None:
        self.channel, self.printed, report, log = connect()
        self.zygote = zygote
        self.shape = shape
        self.number = number
        self.slot = slot
        self.path = path
        """Where it is called."""
        self.listener: socket.socket | None = None
        """The socket of that name, where it is to be seen from here that somebody calls."""
        self.given = [report, log]
        """Descriptors that its process is given, as long as it has not got them."""
        self.mounts: list[str] = []
        """Where the volumes among those are to be."""
        self.pid = 0
        self.pidfd: int | None = None
        """The runtime's process."""
        self.first: int | None = None
        """The first process of its namespace, whose end ends all others in it."""
        self.exit: asyncio.Future[int | str] | None = None
        """How it ended: a code, or words."""
        self.grouped = False
        self.outlet: socket.socket | None = None
        """Where it asks to be let out, when an allow-list says where to."""
        self.second: Second | None = None
        """The sandbox beside it."""
        self.gate: Gate | None = None
        """Who in it may take namespaces, where it may be forked."""
        self.parent: Cell | None = None
        """The cell that it is forked from, when that is not its zygote."""
        self.refusals: dict[int, asyncio.Future[str]] = {}
        """By the number of a cell that was to be forked from this one: why it is not, which may come late."""
        self.forking = 0
        """Forks of it that are under way."""
        self.branches = 0
        """Cells that were forked from it. Their processes are in namespaces below its own."""
        self.is_over = False

    @property
    def generation(self) -> int:
        """How many cells are between it and its zygote."""
        return 0 if self.parent is None else self.parent.generation + 1

    def hears(self, message: Any) -> bool:
        """Whether it is a word on a fork that was asked for, and the first on that."""
        number = message.get("refused") if isinstance(message, dict) else None
        refused = self.refusals.pop(number, None) if isinstance(number, int) else None
        if refused is None:
            return False
        if not refused.done():
            refused.set_result(words(message.get("why"), 1024))
        return True

    @property
    def outlets(self) -> dict[str, socket.socket]:
        """Where it and the sandbox beside it ask to be let out, by what distinguishes the two."""
        found = {"": self.outlet, "/second": self.second.outlet if self.second is not None else None}
        return {which: outlet for which, outlet in found.items() if outlet is not None}

    @property
    def alive(self) -> bool:
        """Whether its process, once sealed, has not ended."""
        assert self.pidfd is not None
        ended = select.poll()
        ended.register(self.pidfd, select.POLLIN)
        return not ended.poll(0)

    def add_volumes(self, mounts: list[str], mounted: list[int]) -> None:
        """Have its process given these as well, before it is forked."""
        self.mounts = mounts
        self.given += mounted

    def give(self) -> None:
        """Only its process has them from now on."""
        close_all(self.given)
        self.given = []

    @property
    def leaf(self) -> str:
        """The name of its control groups."""
        return f"i{self.slot}"

    @property
    def first_leaf(self) -> str:
        """That of the first process of its namespace, where it is not its zygote's. It ends after the others."""
        return f"p{self.slot}"

    @property
    def url(self) -> str:
        return f"unix:{self.path}"

    @property
    def last_words(self) -> str:
        words = self.printed.last()
        return f"; the last it printed:\n{words}" if words else ""
