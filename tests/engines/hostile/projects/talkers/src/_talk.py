"""What hostile code says to the spawner, on the socket that it finds among its descriptors."""

import itertools
import json
import os
import select
import socket
import stat
import struct
import time
from collections.abc import Callable
from typing import Any


def to_the_spawner() -> socket.socket:
    """The one socket without a name whose other end is outside."""
    for name in sorted(os.listdir("/proc/self/fd"), key=int):
        try:
            if not stat.S_ISSOCK(os.fstat(int(name)).st_mode):
                continue
        except OSError:
            continue
        sock = socket.socket(fileno=os.dup(int(name)))
        peer = struct.unpack("3i", sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))[0]
        listens = sock.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
        if sock.family == socket.AF_UNIX and not listens and sock.getsockname() == "" and peer == 0:
            return sock
        sock.close()
    raise RuntimeError("there is no socket to the spawner")


def frame(message: Any) -> bytes:
    data = message if isinstance(message, bytes) else json.dumps(message).encode()
    return struct.pack("I", len(data)) + data


def say(message: Any) -> str:
    to_the_spawner().sendall(frame(message))
    return "said"


_GOOD_NEWS = {"ready": True, "preloaded": True, "reasons": [], "variables": [], "given": {}, "boot": "b"}
"""What both an instance and a zygote may say when all is well."""


def nested() -> str:
    """JSON that is deeper than any reader likes."""
    return say(b"[" * 200_000)


def unreadable() -> str:
    return say(b"\xff\xfe no json")


def too_long() -> str:
    """A length that no message has."""
    to_the_spawner().sendall(struct.pack("I", 0xFFFFFFFF) + b"x" * 1000)
    return "said"


def big_number() -> str:
    return say(b'{"status": ' + b"9" * 100_000 + b', "exited": 1}')


def strange() -> str:
    """Values of other types than anybody expects."""
    for message in (5, None, [], "text", {"status": 1, "exited": []}, {"exited": {}, "status": 0}, {"failed": 7}):
        say(message)
    return "said"


def many_descriptors() -> str:
    """More descriptors than a message has, at once and bit by bit."""
    sock = to_the_spawner()
    try:
        socket.send_fds(sock, [frame({})], [0] * 20)
        for _ in range(100):
            socket.send_fds(sock, [b"\0"], [0] * 8)
    except OSError:
        pass
    return "said"


def lingering() -> str:
    """A socket whose last owner has to wait when it closes it."""
    told, tell = os.pipe()
    if os.fork() == 0:  # which is who waits, when the socket is not taken
        listener = socket.create_server(("127.0.0.1", 0))
        full = socket.create_connection(listener.getsockname())
        _other, _ = listener.accept()
        full.setblocking(False)
        try:
            while True:
                full.send(b"x" * 65536)
        except BlockingIOError:
            pass
        full.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 3600))
        sock, message = to_the_spawner(), frame(_GOOD_NEWS)
        try:
            socket.send_fds(sock, [message[:3]], [full.fileno()])
            full.close()
            sock.send(message[3:])
        finally:
            os._exit(0)
    os.close(tell)
    select.select([told], [], [], 2.0)
    os.close(told)
    return "said"


def endless() -> str:
    """Small messages for ever, as fast as they are taken."""
    piece = frame({}) * 5000
    return _for_ever(lambda sock: sock.sendall(piece))


def endless_descriptors() -> str:
    """Messages with descriptors for ever."""
    return _for_ever(lambda sock: socket.send_fds(sock, [frame({})], [0] * 8))


def _for_ever(send: Callable[[socket.socket], object]) -> str:
    """Send again and again from a process of its own; back when that is well under way."""
    told, tell = os.pipe()
    if os.fork() == 0:
        sock = to_the_spawner()
        sock.setblocking(True)
        try:
            sock.sendall(frame(_GOOD_NEWS))
            for number in itertools.count():
                send(sock)
                if number == 50:
                    os.write(tell, b"y")
        finally:
            os._exit(0)
    os.close(tell)
    os.read(told, 1)
    os.close(told)
    return "talks"


def last_wails() -> str:
    """Complain more often than anybody listens, and die."""
    for number in range(500):
        say({"unhealthy": f"for the {number}th time"})
    os._exit(3)


def hang_up() -> str:
    to_the_spawner().shutdown(socket.SHUT_RDWR)
    return "hung up"


def exits() -> str:
    """Say of everybody that they ended well."""
    sock = to_the_spawner()
    for number in range(200):
        sock.sendall(frame({"exited": number, "status": 0}))
    return "said"


def wrong_failure() -> str:
    """A failure that is made of anything but text."""
    say({"failed": {"code": "start_failed", "message": {"a": [1]}, "hint": 5}})
    time.sleep(600)
    return ""


def long_failure() -> str:
    """A failure with as many words as fit."""
    say({"failed": {"code": "start_failed", "message": "word " * 200_000}})
    time.sleep(600)
    return ""


def wrong_facts() -> str:
    """Facts of a zygote that are of the wrong kind."""
    return say({"ready": True, "preloaded": True, "reasons": 5, "variables": 7, "given": [], "changes": 3})


def many_patterns() -> str:
    """As many names of variables as fit, each of which has to be compared."""
    names = [f"{number:x}*[a-z]?*" for number in range(60_000)]
    return say({"ready": True, "preloaded": True, "reasons": [], "variables": names, "given": {}})


def long_boot() -> str:
    return say({"ready": True, "teardown": True, "boot": "b" * 900_000})


DEEDS = {
    deed.__name__: deed
    for deed in (
        *(nested, unreadable, too_long, big_number, strange, many_descriptors, endless, endless_descriptors, hang_up),
        *(lingering, last_wails, exits, wrong_failure, long_failure, wrong_facts, many_patterns, long_boot),
    )
}
