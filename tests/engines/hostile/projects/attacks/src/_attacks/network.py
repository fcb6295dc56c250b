"""Attacks by the network: what is reachable that should not be."""

import socket
import threading
from pathlib import Path
from typing import Any

_FAMILIES = {
    "packet": (17, socket.SOCK_RAW, 0x0300),
    "packet datagram": (17, socket.SOCK_DGRAM, 0x0300),
    "raw ip": (socket.AF_INET, socket.SOCK_RAW, 1),
    "raw ip6": (socket.AF_INET6, socket.SOCK_RAW, 58),
    "alg": (38, 5, 0),
    "vsock": (40, socket.SOCK_STREAM, 0),
    "xdp": (44, socket.SOCK_RAW, 0),
    "key": (15, socket.SOCK_RAW, 2),
    "bluetooth": (31, socket.SOCK_RAW, 1),
    "can": (29, socket.SOCK_RAW, 1),
    "tipc": (30, socket.SOCK_STREAM, 0),
    "rds": (21, 5, 0),
    "smc": (43, socket.SOCK_STREAM, 0),
    "qrtr": (42, socket.SOCK_DGRAM, 0),
    "kcm": (41, socket.SOCK_DGRAM, 0),
    "nfc": (39, socket.SOCK_RAW, 0),
}
_kept: list[Any] = []


def odd_sockets() -> list[str]:
    """Kinds of sockets that can be made and that no environment needs."""
    made = []
    for name, (family, kind, protocol) in _FAMILIES.items():
        try:
            socket.socket(family, kind, protocol).close()
        except OSError:
            continue
        made.append(name)
    return made


def connect(addresses: list[list[Any]], timeout: float = 2.0) -> list[str]:
    """Connect to each host and port, plainly; those that answered."""
    reached = []
    for host, port in addresses:
        for family, *_ in ((socket.AF_INET6,) if ":" in host else (socket.AF_INET,),):
            with socket.socket(family) as sock:
                sock.settimeout(timeout)
                try:
                    sock.connect((host, port))
                except OSError:
                    continue
                reached.append(f"{host}:{port}")
    return reached


def send_datagrams(addresses: list[list[Any]]) -> list[str]:
    """Send a datagram to each host and port; those that could be sent."""
    sent = []
    for host, port in addresses:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
            try:
                sock.sendto(b"hostile", (host, port))
            except OSError:
                continue
            sent.append(f"{host}:{port}")
    return sent


def connect_unix(names: list[str]) -> list[str]:
    """Connect to unix sockets by path, or by an abstract name where it begins with '@'; those that answered."""
    reached = []
    for name in names:
        for kind in (socket.SOCK_STREAM, socket.SOCK_DGRAM, socket.SOCK_SEQPACKET):
            with socket.socket(socket.AF_UNIX, kind) as sock:
                try:
                    sock.connect("\0" + name[1:] if name.startswith("@") else name)
                except OSError:
                    continue
                reached.append(name)
    return reached


def abstract_names() -> list[str]:
    """Unix sockets with names that this process can see in its network namespace."""
    with open("/proc/net/unix") as file:
        rows = [line.split() for line in file.readlines()[1:]]
    return [row[7] for row in rows if len(row) > 7]


def listen_unix(name: str) -> bool:
    """Listen on an abstract name, and on a port, until the end."""
    for family, address in ((socket.AF_UNIX, "\0" + name), (socket.AF_INET, ("0.0.0.0", 8099))):
        sock = socket.socket(family)
        sock.bind(address)
        sock.listen()
        _kept.append(sock)
        threading.Thread(target=_accept, args=(sock,), daemon=True).start()
    return True


def _accept(sock: socket.socket) -> None:
    while True:
        _kept.append(sock.accept())


def interfaces() -> list[str]:
    """Network interfaces other than loopback, and routes."""
    found = [name for _, name in socket.if_nameindex() if name != "lo"]
    found += Path("/proc/net/route").read_text().splitlines()[1:]
    return found


def ask_proxy(port: int, urls: list[str]) -> dict[str, list[Any]]:
    """Ask the proxy on a port of this sandbox for each URL; the status, and the body."""
    answers = {}
    for url in urls:
        host = url.split("/")[2].rpartition("@")[2]
        with socket.create_connection(("127.0.0.1", port), timeout=20) as sock:
            sock.sendall(f"GET {url} HTTP/1.1\r\nHost: {host}\r\n\r\n".encode())
            answer = b""
            while piece := sock.recv(65536):
                answer += piece
        head, _, body = answer.partition(b"\r\n\r\n")
        answers[url] = [int(head.split()[1]), body.decode("latin-1")]
    return answers


def tunnel(port: int, targets: list[str]) -> dict[str, str]:
    """Ask the proxy on a port of this sandbox for a tunnel to each target; its first line."""
    answers = {}
    for target in targets:
        with socket.create_connection(("127.0.0.1", port), timeout=20) as sock:
            sock.sendall(f"CONNECT {target} HTTP/1.1\r\nHost: {target}\r\n\r\n".encode())
            answers[target] = sock.recv(4096).split(b"\r\n")[0].decode("latin-1")
    return answers


def hijack_proxy(port: int) -> bool:
    """Take the proxy's own port away from it."""
    with socket.socket() as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        sock.bind(("127.0.0.1", port))
        sock.listen()
    return True
