"""The wait for the only way out of a sandbox. Its engine can make that only when the sandbox is there."""

from __future__ import annotations

import socket
import time

from aenv.errors import StartFailed

_PATIENCE = 60.0
_MOMENT = 5.0
_FIRST, _LONGEST = 0.005, 0.1


def wait(address: str) -> None:
    """Back when the proxy at ``host:port`` takes connections, so that an import may use it."""
    host, _, port = address.rpartition(":")
    deadline = time.monotonic() + _PATIENCE
    pause = _FIRST
    while True:
        try:
            socket.create_connection((host, int(port)), _MOMENT).close()
            return
        except OSError as exc:
            if time.monotonic() > deadline:
                raise StartFailed(
                    f"the proxy at {address} is not there: {exc}",
                    hint="the engine that started this sandbox makes it; its log says why it could not",
                ) from exc
        time.sleep(pause)
        pause = min(pause * 1.2, _LONGEST)
