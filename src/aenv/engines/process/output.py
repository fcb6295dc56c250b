"""What a process of a sandbox prints, kept within bounds, however much and however fast it prints."""

from __future__ import annotations

import asyncio
import os

from aenv.runtime.hidden import Hidden, Printing

KEPT = 256 * 1024
"""Bytes of the newest output that are kept."""
_PIECE = 64 * 1024
_PAUSE, _BREATH = 0.05, 0.01
"""Seconds that a flood has to wait after a full piece, and after any, so that it costs its sandbox and nobody else."""


class Printed:
    """The reading end of a pipe."""

    def __init__(self, descriptor: int) -> None:
        os.set_blocking(descriptor, False)
        self._descriptor = descriptor
        self._loop = asyncio.get_running_loop()
        self._kept = bytearray()
        self.start = 0
        """Position of the first byte that is kept."""
        self._paused: asyncio.TimerHandle | None = None
        self._printing: Printing | None = None
        self._loop.add_reader(descriptor, self._read)

    def _read(self) -> None:
        data = self._some()
        if data == b"":
            self.close()
        elif data is not None:
            self._loop.remove_reader(self._descriptor)
            self._paused = self._loop.call_later(_PAUSE if len(data) == _PIECE else _BREATH, self._resume)

    def _some(self) -> bytes | None:
        """The next piece, kept; empty at the end, None when there is nothing now."""
        try:
            data = os.read(self._descriptor, _PIECE)
        except BlockingIOError:
            return None
        except OSError:
            return b""
        self._keep(data if self._printing is None else self._printing.pass_on(data))
        return data

    def _keep(self, data: bytes) -> None:
        self._kept += data
        if (over := len(self._kept) - KEPT) > 0:
            del self._kept[:over]
            self.start += over

    def _resume(self) -> None:
        self._paused = None
        self._loop.add_reader(self._descriptor, self._read)

    def hide(self, hidden: Hidden) -> None:
        """Keep no secrets of what is printed from now on."""
        if self._printing is not None:
            self._keep(self._printing.end())
        self._printing = Printing(hidden)

    def since(self, position: int) -> tuple[int, bytes]:
        """What is kept from that position on, and where it begins."""
        begin = max(position, self.start)
        return begin, bytes(self._kept[begin - self.start :])

    def last(self, lines: int = 20) -> str:
        """The last lines, as text."""
        return "\n".join(self._kept[-16384:].decode(errors="replace").splitlines()[-lines:])

    def close(self) -> None:
        """Take what is there still, and let go of the pipe. What was kept stays."""
        if self._descriptor < 0:
            return
        for _ in range(KEPT // _PIECE):
            if not self._some():
                break
        if self._printing is not None:
            self._keep(self._printing.end())
        if self._paused is not None:
            self._paused.cancel()
        self._loop.remove_reader(self._descriptor)
        os.close(self._descriptor)
        self._descriptor = -1
