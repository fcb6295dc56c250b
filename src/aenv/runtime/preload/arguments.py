"""A list in place of ``sys.argv`` that tells when it is looked at, whichever way."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

_SILENT = {"__class_getitem__", "__getattribute__", "__init__", "__new__", "__sizeof__"}


class Arguments(list[str]):
    """As long as ``looked`` is set, it is called with who looked, and whether for the program's name alone."""

    looked: Callable[[FrameType, bool], None] | None = None

    def __radd__(self, other: list[str]) -> list[str]:
        return other + self[:]


def _telling(name: str) -> Callable[..., Any]:
    plain = getattr(list, name)

    def method(self: Arguments, *args: Any, **named: Any) -> Any:
        if self.looked is not None:
            self.looked(sys._getframe(1), name == "__getitem__" and args == (0,))
        return plain(self, *args, **named)

    return method


for _name in {name for name in vars(list) if callable(getattr(list, name))} - _SILENT | {"__reduce_ex__"}:
    setattr(Arguments, _name, _telling(_name))
