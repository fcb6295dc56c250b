"""``python -m aenv.runtime.tunnel SOCKET``: join standard input and output with a unix socket.

So a runtime is reached through whatever runs a command beside it. It is started for each connection: it imports little.
"""

import os
import socket
import sys
import threading

_PIECE = 64 * 1024


def main(arguments: list[str]) -> int:
    """End when the socket does, or when nobody reads what it says. The end of the input is passed on."""
    if len(arguments) != 1:
        sys.stderr.write("usage: python -m aenv.runtime.tunnel SOCKET\n")
        return 2
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as sock:
        try:
            sock.connect(arguments[0])
        except OSError as exc:
            sys.stderr.write(f"error: nothing answers at {arguments[0]}: {exc.strerror or exc}\n")
            return 1
        threading.Thread(target=_send, args=(sock,), daemon=True).start()
        try:
            while piece := sock.recv(_PIECE):
                _write(piece)
        except OSError:  # either end is gone
            return 1
    return 0


def _send(sock: socket.socket) -> None:
    """Pass on what comes in, and its end."""
    try:
        while piece := os.read(0, _PIECE):
            sock.sendall(piece)
        sock.shutdown(socket.SHUT_WR)
    except OSError:  # the socket is gone, which the other thread sees
        return


def _write(piece: bytes) -> None:
    left = memoryview(piece)
    while left:
        left = left[os.write(1, left) :]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
